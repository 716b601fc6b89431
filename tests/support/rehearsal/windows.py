"""Windows, played on Linux: what it lacks is taken away. What macOS lacks, Windows lacks too.

    python -m tests.support.rehearsal.windows -m gan.fit --max-steps 4

runs Python with these arguments under that system, and so are all processes that it starts.

- Our modules, and the tests, see modules of Python without the names that Windows lacks, and without modules that it
  does not have. Other packages see all, because they have their own ways there.
- All see what files are like there: to rename or remove what is open or mapped is refused, folders cannot be opened,
  names may not have some characters, `A` and `a` are one name, text is cp1252 and its lines end in CRLF.
- There is no /proc, and processes are spawned.

What this cannot show: what C code does there, paths with drives, and how that system is in truth.
"""

import builtins
import errno
import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "REHEARSES_WINDOWS"
ROOT = Path(__file__).parents[3]
OURS = ("gan", "nets", "datasets", "strategies", "samples", "tests", "__main__", "__mp_main__")
FORBIDDEN = set('<>:"|?*') | {chr(code) for code in range(32)}
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
LACKS = {  # names by module
    "os": """sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate O_DIRECT O_TMPFILE pipe2 memfd_create
        eventfd splice copy_file_range getrandom sched_yield pidfd_open
        fork forkpty register_at_fork killpg getpgid setpgid getpgrp setpgrp setsid getsid getuid geteuid
        getgid getegid getgroups setuid setgid uname sysconf nice wait wait3 wait4 waitid pread pwrite
        preadv pwritev fchmod fchown chown lchown statvfs fstatvfs mkfifo mknod sendfile posix_spawn
        posix_spawnp O_NONBLOCK O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_SYNC O_DSYNC O_NOCTTY ttyname openpty
        getpriority getloadavg lockf fdatasync sync ctermid setpriority""",
    "signal": """SIGPWR SIGSTKFLT SIGPOLL SIGRTMIN SIGRTMAX sigtimedwait
        SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGCHLD SIGQUIT SIGPIPE SIGALRM SIGSTOP SIGCONT SIGTSTP SIGTTIN
        SIGTTOU SIGWINCH SIGBUS SIGTRAP SIGURG SIGIO SIGPROF SIGVTALRM SIGXCPU SIGXFSZ SIGSYS alarm
        setitimer getitimer pause pthread_kill pthread_sigmask sigwait sigwaitinfo sigpending""",
    "select": "epoll poll",
    "socket": "TCP_USER_TIMEOUT AF_UNIX AF_NETLINK AF_PACKET",
    "time": "tzset pthread_getcpuclockid",
}
MISSING = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "crypt", "curses", "posix")
HAS: dict[str, dict[str, Any]] = {
    "sys": {"platform": "win32"},
    "os": {"name": "nt"},
    "signal": {"SIGBREAK": 21},
    "platform": {"system": lambda: "Windows", "libc_ver": lambda *_: ("", "")},
}


class Lacking(ModuleType):
    """A module of Python as Windows has it. What is set is set in the real one, as a test's monkeypatch does."""

    def __init__(self, real: ModuleType) -> None:
        lacks, has = LACKS.get(real.__name__, "").split(), HAS.get(real.__name__, {})
        object.__setattr__(self, "_names", (real, frozenset(lacks), has))

    def __getattribute__(self, name: str) -> Any:
        real, lacks, has = object.__getattribute__(self, "_names")
        if name in lacks:
            raise AttributeError(f"module '{real.__name__}' has no attribute '{name}'", name=name, obj=real)
        return has[name] if name in has else getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_names")[0], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_names")[0], name)


def install() -> None:
    """Be Windows from now on, if the environment says so."""
    if VARIABLE in os.environ:
        _take_names()
        _take_processes()
        _take_files()


# ---- names ----


def _take_names() -> None:
    """Let `import` give our modules what the system has."""
    original, there = builtins.__import__, {"msvcrt": _msvcrt()}

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        caller = (globals or {}).get("__name__") or ""
        if level or caller.partition(".")[0] not in OURS or caller.startswith("tests.support.rehearsal"):
            return original(name, globals, locals, fromlist, level)
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        if name not in there and (name in LACKS or name in HAS):
            there[name] = Lacking(original(name))
        return there[name] if name in there else original(name, globals, locals, fromlist, level)

    builtins.__import__ = imported


def _msvcrt() -> ModuleType:
    """Windows' locks of bytes, which end with the handle."""
    import fcntl
    import struct

    def locking(handle: int, mode: int, count: int) -> None:
        place = os.lseek(handle, 0, os.SEEK_CUR)
        try:
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack("hhlli", fcntl.F_WRLCK, os.SEEK_SET, place, count, 0))
        except BlockingIOError as error:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from error

    module = ModuleType("msvcrt")
    module.locking, module.LK_NBLCK = locking, 2
    return module


def _take_processes() -> None:
    import multiprocessing.context

    multiprocessing.set_start_method("spawn", force=True)  # a fork has that of its server
    for name in ("fork", "forkserver"):
        multiprocessing.context._concrete_contexts.pop(name, None)


# ---- files ----

REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("open", "listdir", "readlink")}


def _take_files() -> None:
    opened = builtins.open

    def open_file(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        _hide(file)
        writes = bool(set(mode) & set("wax"))
        if writes:
            _new(file)
        if "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and writes else newline
        return opened(file, mode, buffering, encoding, errors, newline, closefd, opener)

    open_file.__module__, open_file.__qualname__ = "io", "open"
    builtins.open = io.open = open_file
    checks: dict[str, tuple[Callable[..., None], ...]] = {
        **{"open": (_opens,), "mkdir": (_new,), "symlink": (_symlinks,), "link": (lambda _, dst, **__: _new(dst),)},
        **{"replace": (_replaces,), "rename": (_renames, _replaces)},
        **dict.fromkeys(("stat", "lstat", "readlink", "listdir"), (_hide,)),
        **dict.fromkeys(("remove", "unlink", "rmdir"), (_hide, _free)),
    }
    for name, before in checks.items():
        setattr(os, name, _checked(name, getattr(os, name), before))
    shutil._use_fd_functions = False  # rmtree by names


def _hide(path: Any = ".", *_: Any, **__: Any) -> None:
    if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(("/proc/", "/dev/shm")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))


def _new(path: Any, source: Any = "", *_: Any, **__: Any) -> None:
    """Refuse a name that cannot be made there."""
    if not isinstance(path, str | bytes | os.PathLike):
        return
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    if FORBIDDEN & set(name) or name != name.rstrip(" ."):
        raise OSError(errno.EINVAL, "Invalid argument", os.fsdecode(path))
    if name.partition(".")[0].lower() in RESERVED:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
    try:
        others = set(REAL["listdir"](folder))
    except OSError:
        return
    if isinstance(source, str | bytes | os.PathLike):
        others -= {os.path.basename(os.fsdecode(source))}
    if name not in others and name.lower() in map(str.lower, others):
        raise FileExistsError(errno.EEXIST, "the same name in another case", os.fsdecode(path))


def _free(path: Any, *_: Any, dir_fd: Any = None, **__: Any) -> None:
    """Refuse to touch what this process has open or mapped, or that has such a file in it."""
    whole, frame = os.path.abspath(os.fsdecode(path)), sys._getframe(1)
    while frame.f_globals["__name__"] == __name__:
        frame = frame.f_back
    own_way = frame.f_globals["__name__"] == "tempfile"  # it has another one on Windows
    if dir_fd is not None or own_way or whole.startswith(("/dev", "/proc")):
        return
    for other in _held():
        if other == whole or other.startswith(f"{whole}/"):
            raise PermissionError(errno.EACCES, "it is used by another process", os.fsdecode(path))


def _replaces(src: Any, dst: Any, **_: Any) -> None:
    _hide(src)
    if os.path.isdir(dst):
        raise PermissionError(errno.EACCES, "Access is denied", os.fsdecode(src), None, os.fsdecode(dst))
    _new(dst, src)
    _free(src)
    _free(dst)


def _renames(src: Any, dst: Any, **_: Any) -> None:
    if os.path.lexists(dst) and not os.path.isdir(dst):
        raise FileExistsError(errno.EEXIST, "it is there already", os.fsdecode(src), None, os.fsdecode(dst))


def _symlinks(_: Any, dst: Any, *__: Any, **___: Any) -> None:
    raise OSError(errno.EPERM, "A required privilege is not held by the client", os.fsdecode(dst))


def _opens(path: Any, flags: int, *_: Any, **__: Any) -> None:
    _hide(path)
    if flags & os.O_CREAT:
        _new(path)
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))


def _checked(name: str, function: Callable[..., Any], checks: Sequence[Callable[..., None]]) -> Callable[..., Any]:
    """A function of os, before which these see its arguments."""

    def call(*args: Any, **how: Any) -> Any:
        for check in checks:
            check(*args, **how)
        return function(*args, **how)

    call.__module__, call.__qualname__ = "os", name  # so it can be pickled
    return call


def _held() -> set[str]:
    """The files that this process has open or mapped."""
    found = {os.getcwd()}
    for number in REAL["listdir"]("/proc/self/fd"):
        try:
            found.add(REAL["readlink"](f"/proc/self/fd/{number}"))
        except OSError:  # the handle of the list itself
            continue
    maps = REAL["open"]("/proc/self/maps", os.O_RDONLY)
    try:
        text = b""
        while part := os.read(maps, 2**20):
            text += part
    finally:
        os.close(maps)
    return found | {line.split(None, 5)[5].decode() for line in text.splitlines() if line.count(b" /")}


def environment() -> dict[str, str]:
    """The variables under which Python, and all that it starts, is on Windows."""
    path = [str(ROOT / "tests" / "support" / "rehearsal" / "start"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        VARIABLE: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONIOENCODING": "cp1252",
    }


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
