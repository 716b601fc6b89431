"""Memory that a process frees and soon needs again: kept, instead of given back to the system.

[Note: memory that is kept]
The C library gives large tensors back to the system as soon as they are freed, and takes new memory for the next one.
The system then clears that memory page by page. A step of training allocates the same tensors as the one before, so
on a CPU this can take as long as all arithmetic. While a training lasts we tell the C library to keep what is freed.
Written by hand, because torch keeps freed memory on a GPU only.
"""

import ctypes
import os
import platform

# The names of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
NEVER = -1
# What glibc itself comes to when large tensors are freed again and again: its greatest limit, and twice that.
LARGEST, MAPPINGS = 32 * 2**20, 65_536


def keep_freed_memory() -> bool:
    """Keep what is freed from now on. False without glibc, or where somebody has set glibc's own variables."""
    return _ours() and _set({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: NEVER})


def give_freed_memory_back() -> None:
    """Undo `keep_freed_memory`, and give the system what is free now."""
    if _ours() and _set({M_MMAP_MAX: MAPPINGS, M_MMAP_THRESHOLD: LARGEST, M_TRIM_THRESHOLD: 2 * LARGEST}):
        ctypes.CDLL(None).malloc_trim(0)


def _ours() -> bool:
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.getenv("GLIBC_TUNABLES", "")
    return platform.libc_ver()[0] == "glibc" and not chosen


def _set(values: dict[int, int]) -> bool:
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(name, value) for name, value in values.items()])
