"""A device of torch's own kind in Python, without a compiler: real values, in memory that the CPU may not touch.

`load()` gives this process two devices, `rehearsal:0` and `rehearsal:1`. They are what `torch.accelerator` finds. A
process cannot give them back, so a test calls it in a process of its own: see commands.py.

A tensor is no subclass: torch gets its memory by DLPack, as that of a device which it does not know. An operation is
computed on the CPU, on tensors that lie in the same memory ("twins"). So views, in-place operations, `data_ptr` and the
graph of autograd are torch's own. A CPU tensor of one dimension or more among the arguments is refused, as CUDA does.

What torch cannot do from Python is done here by hand: a second device (its guard has one, so backward runs in the
thread that calls it), the current device, random generators, memory information, synchronisation, pinned memory. Gloo
takes the twins.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration

from gan.app.scoring import scorer

NAME, COUNT = os.environ.get("REHEARSAL_NAME", "rehearsal"), 2
MEMORY = 8 << 30  # bytes that a device says it has
NO_FLOAT64 = "REHEARSAL_HAS_NO_FLOAT64"  # a variable: the device refuses float64, as Apple's does
aten = torch.ops.aten


class Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class Module:
    """What torch looks for in `torch.rehearsal`."""

    def __init__(self) -> None:
        self.index = 0
        self.generators = [torch.Generator() for _ in range(COUNT)]
        self.pinned = 0  # how many tensors were pinned

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.index

    def set_device(self, device: Any) -> None:
        self.index = self._index(device)

    def device_count(self) -> int:
        return COUNT

    def manual_seed(self, seed: int) -> None:
        self.generators[self.index].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for each in self.generators:
            each.manual_seed(seed)

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return self.generators[self._index(device)].get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        self.generators[self._index(device)].set_state(state)

    def get_device_name(self, device: Any = None) -> str:
        return "Rehearsal"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def _index(self, device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return self.index if index is None else index


# ---- memory ----


class _Capsule(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


EXTENSION = 12  # DLPack's number for devices that it does not know
CODES = {torch.bool: 6, torch.bfloat16: 4}
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _code(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 5
    return CODES.get(dtype, 2 if dtype.is_floating_point else int(not dtype.is_signed))


def _memory(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, index: int) -> Tensor:
    """A tensor on a device. Its memory and its description are one piece, which torch frees by `free`."""
    if dtype == torch.float64 and NO_FLOAT64 in os.environ:
        raise TypeError("Cannot convert a tensor to float64: this device has none")
    size, stride = tuple(size), tuple(stride)
    count = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    numbers = len(size) + len(stride)
    head = -(-(ctypes.sizeof(_Capsule) + 8 * numbers) // 64) * 64
    start = _libc.malloc(head + 64 + max(1, count * dtype.itemsize))
    shape = start + ctypes.sizeof(_Capsule)
    (ctypes.c_int64 * numbers).from_address(shape)[:] = size + stride
    capsule = _Capsule.from_address(start)
    capsule.data, capsule.byte_offset = -(-(start + head) // 64) * 64, 0
    capsule.device_type, capsule.device_id = EXTENSION, index
    capsule.ndim, capsule.shape, capsule.strides = len(size), shape, shape + 8 * len(size)
    capsule.code, capsule.bits, capsule.lanes = _code(dtype), 8 * dtype.itemsize, 1
    capsule.context, capsule.deleter = None, _FREE
    return torch._C._from_dlpack(_new_capsule(start, b"dltensor", None))


def _twin(tensor: Tensor) -> Tensor:
    """A CPU tensor in the same memory. It must not outlive the tensor."""
    storage = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


# ---- operations ----

MAY_MIX = {"index", "index_put_", "_index_put_impl_", "index_put", "_copy_from", "_copy_from_and_resize"}
_module = Module()


class _Call:
    """An operation's arguments, as they are on the CPU."""

    def __init__(self, op: Any) -> None:
        self.op, self.index, self.of_cpu = op, None, False
        self.given: list[tuple[Tensor, Tensor]] = []  # tensors and their twins

    def on_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device) and value.type == NAME:
            self._meet(_module.current_device() if value.index is None else value.index)
            return torch.device("cpu")
        if isinstance(value, list | tuple):
            return type(value)(map(self.on_cpu, value))
        return value

    def _tensor(self, value: Tensor) -> Tensor:
        if not _is_here(value):
            self.of_cpu |= value.dim() > 0 and value.device.type == "cpu"
            return value
        self._meet(value.device.index)
        # An empty one may be where an operation puts its result; the CPU must be able to make it larger.
        twin = _twin(value) if value.numel() else torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        self.given.append((value, twin))
        return twin

    def _meet(self, index: int) -> None:
        if self.index not in (None, index):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:{index} and "
                f"{NAME}:{self.index}! ({self.op})"
            )
        self.index = index

    def check(self) -> None:
        if self.of_cpu and self.given and self.op.overloadpacket.__name__ not in MAY_MIX:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:{self.index} "
                f"and cpu! ({self.op})"
            )

    def from_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for tensor, twin in self.given:
                if value is twin:
                    if tensor.size() != twin.size():
                        _twin(_resize(tensor, twin.size())).copy_(twin)
                    return tensor
            return to_device(value, self.index)
        if isinstance(value, list | tuple):
            return type(value)(map(self.from_cpu, value))
        return value


def to_device(value: Tensor, index: int) -> Tensor:
    made = _memory(value.size(), value.stride(), value.dtype, index)
    _twin(made).copy_(value)
    return made


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: on the CPU, on twins."""
    if op.is_view:
        return op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
    call = _Call(op)
    args, kwargs = call.on_cpu(list(args)), {name: call.on_cpu(value) for name, value in kwargs.items()}
    call.check()
    if call.index is None:
        call.index = _module.current_device()
    if "seeded" in str(op.tags) and kwargs.get("generator") is None:
        own = _module.generators[call.index]
        if any(each.name == "generator" for each in op._schema.arguments):
            kwargs["generator"] = own
        else:
            return call.from_cpu(_drawing(own, op, args, kwargs))
    return call.from_cpu(op(*args, **kwargs))


def _drawing(generator: torch.Generator, op: Any, args: Any, kwargs: Any) -> Any:
    """An operation that takes no generator draws from the device's own."""
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return _empty_strided(size, like.stride(), dtype=like.dtype, device=device)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    index = None if device is None else device.index
    index = _module.current_device() if index is None else index
    return _memory(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), index)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    (_twin(target) if _is_here(target) else target).copy_(_twin(source) if _is_here(source) else source)
    return target


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    if tuple(tensor.size()) != tuple(size):
        like = _empty(size, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format)
        aten.set_.source_Tensor._op_dk(torch._C.DispatchKey.CPU, tensor, like)
    return tensor


def _set(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def _convolution(*args: Any) -> Any:
    return _compute(aten.convolution.default, *args)


def _convolution_backward(gradient: Tensor, value: Tensor, weight: Tensor, *args: Any) -> Any:
    transposed, groups = args[3], args[5]
    bias = weight.shape[1] * groups if transposed else weight.shape[0]
    return _compute(aten.convolution_backward.default, gradient, value, weight, [bias], *args)


LOWER = (
    *("addmm", "baddbmm", "bmm", "linear", "matmul", "mm"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "_convolution"),
)


def _lower(op: Any) -> Callable[..., Any]:
    """An operation that autocast computes in the lower precision."""

    def cast(value: Any) -> Any:
        is_float = _is_here(value) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(torch.get_autocast_dtype(NAME)) if is_float else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return kernel


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    _module.pinned += 1
    return tensor.clone()


# ---- what torch cannot do from Python ----


class _Generator(torch.Generator):
    """torch.Generator, also for this device. Below it is one for the CPU, which an operation would take as well."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        device = torch.device(device)
        if device.type != NAME:
            return _of_torch(device)
        made = super().__new__(cls)
        made.place = torch.device(NAME, _module.current_device() if device.index is None else device.index)
        return made

    @property
    def device(self) -> torch.device:
        return self.place


_of_torch = torch.Generator
_in_flight: deque[Any] = deque(maxlen=4096)  # gloo writes into their memory after the call


def _communicate(op: Any) -> Callable[..., Any]:
    def collective(*args: Any) -> Any:
        _in_flight.append(args)
        return _compute(op, *args)

    return collective


def _exchange(index: int) -> int:
    before, _module.index = _module.index, index
    return before


def possible() -> bool:
    """Whether this torch can have such a device; torch 2.11 can."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and hasattr(torch._C, "_acc")


_libraries: list[torch.library.Library] = []


def load() -> None:
    """Give this process the devices."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _module, Hooks())
    everything, ours, collectives = (torch.library.Library(name, "IMPL") for name in ("_", "aten", "c10d"))
    _libraries.extend((everything, ours, collectives))
    everything.fallback(_compute, "PrivateUse1")
    kernels = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
        "_copy_from_and_resize": _copy_from,
        "resize_": _resize,
        "convolution_overrideable": _convolution,
        "convolution_backward_overrideable": _convolution_backward,
        "_fused_sdp_choice": lambda *args, **kwargs: 0,  # attention by plain operations
        "set_.source_Storage_storage_offset": _set(aten.set_.source_Storage_storage_offset),
        "set_.source_Tensor": _set(aten.set_.source_Tensor),
    }
    for name, kernel in kernels.items():
        ours.impl(name, kernel, "PrivateUse1")
    ours.impl("_pin_memory", _pin, "CPU")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in LOWER:
        packet, _, overload = name.partition(".")
        ours.impl(name, _lower(getattr(getattr(aten, packet), overload or "default")), "AutocastPrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        space, _, short = name.partition("::")
        if space == "c10d":
            op = getattr(torch.ops.c10d, short).default
            collectives.impl(short, _communicate(op), "PrivateUse1", allow_override=True)
    if NO_FLOAT64 in os.environ:
        scorer.NO_FLOAT64.append(NAME)
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    dist.Backend.backend_capability["gloo"].append(NAME)
    torch.Generator = _Generator
    core, accelerator = torch._C, torch.accelerator
    core._accelerator_setDeviceIndex = _module.set_device
    core._accelerator_getDeviceIndex = _module.current_device
    core._accelerator_exchangeDevice = core._accelerator_maybeExchangeDevice = _exchange
    core._accelerator_getDefaultGenerator = lambda index: _module.generators[index]
    core._accelerator_synchronizeDevice = _module.synchronize
    core._accelerator_getMemoryInfo = lambda index: (MEMORY // 2, MEMORY)
    accelerator.memory_reserved = accelerator.memory_allocated = accelerator.max_memory_allocated = lambda *_: 0
    torch.autograd.set_multithreading_enabled(False)
