"""Another operating system, played on Linux: what Windows or macOS lacks is taken away.

    python -m tests.support.rehearsal.systems windows -m gan.fit --max-steps 4

runs Python with these arguments under that system, and so are all processes that it starts.

- Our modules, and the tests, see modules of Python without the names that the system lacks, and without modules that it
  does not have. Other packages see all, because they have their own ways there.
- All see what files are like there: Windows refuses to rename or remove what is open or mapped, folders cannot be
  opened, names may not have some characters, text is cp1252 and its lines end in CRLF. Both take `A` and `a` for one.
- There is no /proc, and processes are spawned.

What this cannot show: what C code does there, paths with drives, and how those systems are in truth.
"""

import builtins
import errno
import io
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "REHEARSED_SYSTEM"
ROOT = Path(__file__).parents[3]
OURS = ("gan", "nets", "datasets", "strategies", "samples", "tests", "__main__", "__mp_main__")
FORBIDDEN = set('<>:"|?*') | {chr(code) for code in range(32)}
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
BREAK = 21  # Windows' number of SIGBREAK


@dataclass(frozen=True)
class System:
    """`lacks` are names by module, as they are written in one text; `has` are values that differ there."""

    lacks: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""  # modules
    has: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    starts: tuple[str, ...] = ("spawn", "fork", "forkserver")
    strict: bool = False  # files as on Windows


MACOS = System(
    lacks={
        "os": """sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate O_DIRECT O_TMPFILE pipe2 memfd_create
            eventfd splice copy_file_range getrandom sched_yield pidfd_open""",
        "signal": "SIGPWR SIGSTKFLT SIGPOLL SIGRTMIN SIGRTMAX sigtimedwait",
        "select": "epoll",
        "socket": "TCP_KEEPIDLE TCP_USER_TIMEOUT AF_NETLINK AF_PACKET",
        "resource": "prlimit",
    },
    has={"sys": {"platform": "darwin"}, "platform": {"system": lambda: "Darwin", "libc_ver": lambda *_: ("", "")}},
)

WINDOWS = System(
    lacks={
        "os": f"""{MACOS.lacks["os"]}
            fork forkpty register_at_fork killpg getpgid setpgid getpgrp setpgrp setsid getsid getuid geteuid
            getgid getegid getgroups setuid setgid uname sysconf nice wait wait3 wait4 waitid pread pwrite
            preadv pwritev fchmod fchown chown lchown statvfs fstatvfs mkfifo mknod sendfile posix_spawn
            posix_spawnp O_NONBLOCK O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_SYNC O_DSYNC O_NOCTTY ttyname openpty
            getpriority getloadavg lockf fdatasync sync ctermid setpriority""",
        "signal": f"""{MACOS.lacks["signal"]}
            SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGCHLD SIGQUIT SIGPIPE SIGALRM SIGSTOP SIGCONT SIGTSTP SIGTTIN
            SIGTTOU SIGWINCH SIGBUS SIGTRAP SIGURG SIGIO SIGPROF SIGVTALRM SIGXCPU SIGXFSZ SIGSYS alarm
            setitimer getitimer pause pthread_kill pthread_sigmask sigwait sigwaitinfo sigpending""",
        "select": "epoll poll",
        "socket": "TCP_USER_TIMEOUT AF_UNIX AF_NETLINK AF_PACKET",
        "time": "tzset pthread_getcpuclockid",
    },
    missing="fcntl resource pwd grp termios tty pty syslog readline crypt curses posix spwd nis",
    has={
        "sys": {"platform": "win32"},
        "os": {"name": "nt"},
        "signal": {"SIGBREAK": BREAK},
        "platform": {"system": lambda: "Windows", "libc_ver": lambda *_: ("", "")},
    },
    starts=("spawn",),
    strict=True,
)
SYSTEMS = {"windows": WINDOWS, "macos": MACOS}


class Lacking(ModuleType):
    """A module of Python as the system has it. What is set is set in the real one, as a test's monkeypatch does."""

    def __init__(self, real: ModuleType, lacks: frozenset[str], has: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_names", (real, lacks, has))

    def __getattribute__(self, name: str) -> Any:
        real, lacks, has = object.__getattribute__(self, "_names")
        if name in lacks:
            raise AttributeError(f"module '{real.__name__}' has no attribute '{name}'", name=name, obj=real)
        return has[name] if name in has else getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_names")[0], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_names")[0], name)


def install(name: str | None = None) -> None:
    """Be this system from now on; by default the one that the environment names, if any."""
    name = name or os.environ.get(VARIABLE)
    if name is not None:
        _take_names(SYSTEMS[name])
        _take_processes(SYSTEMS[name])
        _take_files(SYSTEMS[name].strict)


# ---- names ----


def _take_names(system: System) -> None:
    """Let `import` give our modules what the system has."""
    original, missing = builtins.__import__, set(system.missing.split())
    there: dict[str, ModuleType] = {}

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        caller = (globals or {}).get("__name__") or ""
        if level or caller.partition(".")[0] not in OURS or caller.startswith("tests.support.rehearsal"):
            return original(name, globals, locals, fromlist, level)
        if name == "msvcrt" and system.strict:
            return there.setdefault(name, _msvcrt())
        if name in missing:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        found = original(name, globals, locals, fromlist, level)
        if name in system.lacks or name in system.has:
            if name not in there:
                lacks = frozenset(system.lacks.get(name, "").split())
                there[name] = Lacking(found, lacks, system.has.get(name, {}))
            return there[name]
        return found

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


def _take_processes(system: System) -> None:
    import multiprocessing.context

    multiprocessing.set_start_method("spawn", force=True)  # a fork has that of its server
    known = multiprocessing.context._concrete_contexts
    for name in known.keys() - set(system.starts):
        del known[name]


# ---- files ----


def _take_files(strict: bool) -> None:
    real = {name: getattr(os, name) for name in ("open", "rename", "replace", "remove", "unlink", "rmdir", "mkdir")}
    real |= {name: getattr(os, name) for name in ("stat", "lstat", "readlink", "listdir", "symlink", "link")}
    opened = builtins.open

    def hide(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(("/proc/", "/dev/shm")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))

    def new(path: Any, source: Any = "") -> None:
        """Refuse a name that cannot be made there."""
        if not isinstance(path, str | bytes | os.PathLike):
            return
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        if strict and (FORBIDDEN & set(name) or name != name.rstrip(" .")):
            raise OSError(errno.EINVAL, "Invalid argument", os.fsdecode(path))
        if strict and name.partition(".")[0].lower() in RESERVED:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        try:
            others = real["listdir"](folder)
        except OSError:
            return
        others = {other for other in others if os.path.join(folder, other) != os.path.abspath(os.fsdecode(source))}
        if name not in others and name.lower() in map(str.lower, others):
            raise FileExistsError(errno.EEXIST, "the same name in another case", os.fsdecode(path))

    def free(path: Any, dir_fd: Any = None) -> None:
        """Refuse to touch what this process has open or mapped, or that has such a file in it."""
        whole = os.path.abspath(os.fsdecode(path))
        own_way = sys._getframe(3).f_globals["__name__"] == "tempfile"  # it has another one on Windows
        if dir_fd is not None or not strict or own_way or whole.startswith(("/dev", "/proc")):
            return
        for other in _held(real):
            if other == whole or other.startswith(f"{whole}/"):
                raise PermissionError(errno.EACCES, "it is used by another process", os.fsdecode(path))

    def replaces(src: Any, dst: Any, **_: Any) -> None:
        hide(src)
        if strict and os.path.isdir(dst):
            raise PermissionError(errno.EACCES, "Access is denied", os.fsdecode(src), None, os.fsdecode(dst))
        new(dst, src)
        free(src)
        free(dst)

    def renames(src: Any, dst: Any, **_: Any) -> None:
        if strict and os.path.lexists(dst) and not os.path.isdir(dst):
            raise FileExistsError(errno.EEXIST, "it is there already", os.fsdecode(src), None, os.fsdecode(dst))

    def removes(path: Any, *, dir_fd: int | None = None) -> None:
        hide(path)
        free(path, dir_fd)

    def symlinks(_: Any, dst: Any, *__: Any, **___: Any) -> None:
        if strict:
            raise OSError(errno.EPERM, "A required privilege is not held by the client", os.fsdecode(dst))

    def links(_: Any, dst: Any, *__: Any, **___: Any) -> None:
        new(dst)

    def looks(path: Any = ".", *_: Any, **__: Any) -> None:
        hide(path)

    def makes(path: Any, *_: Any, **__: Any) -> None:
        new(path)

    def opens(path: Any, flags: int, *_: Any, **__: Any) -> None:
        hide(path)
        if flags & os.O_CREAT:
            new(path)
        if strict and os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))

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
        hide(file)
        if set(mode) & set("wax"):
            new(file)
        if strict and "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and set(mode) & set("wax") else newline
        return opened(file, mode, buffering, encoding, errors, newline, closefd, opener)

    open_file.__module__, open_file.__qualname__ = "io", "open"
    builtins.open = io.open = open_file
    checks = {"open": (opens,), "mkdir": (makes,), "symlink": (symlinks, links), "link": (links,)}
    checks |= {"replace": (replaces,), "rename": (renames, replaces)}
    checks |= dict.fromkeys(("stat", "lstat", "readlink", "listdir"), (looks,))
    checks |= dict.fromkeys(("remove", "unlink", "rmdir"), (removes,))
    for name, before in checks.items():
        setattr(os, name, _checked(name, real[name], before))
    shutil._use_fd_functions = False  # rmtree by names


def _checked(name: str, function: Callable[..., Any], checks: Sequence[Callable[..., None]]) -> Callable[..., Any]:
    """A function of os, before which these see its arguments."""

    def call(*args: Any, **how: Any) -> Any:
        for check in checks:
            check(*args, **how)
        return function(*args, **how)

    call.__module__, call.__qualname__ = "os", name  # so it can be pickled
    return call


def _held(real: Mapping[str, Callable[..., Any]]) -> set[str]:
    """The files that this process has open or mapped."""
    found = {os.getcwd()}
    for number in real["listdir"]("/proc/self/fd"):
        try:
            found.add(real["readlink"](f"/proc/self/fd/{number}"))
        except OSError:  # the handle of the list itself
            continue
    maps = real["open"]("/proc/self/maps", os.O_RDONLY)
    try:
        text = b""
        while part := os.read(maps, 2**20):
            text += part
    finally:
        os.close(maps)
    return found | {line.split(None, 5)[5].decode() for line in text.splitlines() if line.count(b" /")}


def status_of_fork(work: Callable[[], None]) -> int:
    """How a fork of this process ends, which does the work and ends itself. Also where the system has no forks."""
    process = os.fork()
    if not process:
        work()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def environment(name: str) -> dict[str, str]:
    """The variables under which Python, and all that it starts, is on that system."""
    path = [str(ROOT / "tests" / "support" / "rehearsal" / "start"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, VARIABLE: name, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return found | ({"PYTHONIOENCODING": "cp1252"} if SYSTEMS[name].strict else {})


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[2:]], environment(sys.argv[1]))
