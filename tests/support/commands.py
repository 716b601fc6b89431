"""Commands of ours as they are typed, in processes that a server forks: to import everything takes four seconds.

Only tests of how a program starts, and of signals to a whole family of processes, start Python itself.
"""

import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from multiprocessing import forkserver
from pathlib import Path
from runpy import run_module
from typing import Any, NoReturn
from unittest import mock

import torch
from jsonargparse import Namespace
from lightning import Trainer
from lightning.fabric.utilities import registry
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from datasets.drawn import faces, portrait
from gan.app import outputs
from gan.app.fitting.callbacks import Pictures
from gan.app.fitting.metrics import best_effort
from gan.app.page import compared, run_tables
from gan.app.page.table import Charts
from gan.app.run import options, settings_file
from gan.app.run.parser import Parser
from gan.runs import find
from strategies.processes import slurm
from tests.support import namespaces, worlds
from tests.support.forked import Files
from tests.support.rehearsal import windows
from tests.support.trained_on import ON_GPUS

LIMIT = 120.0  # seconds
OURS = ("gan", "nets", "datasets", "strategies", "samples", "tests")
MOVE = result._ResultMetric.to
DRAW, CHARTS = Pictures._curves, run_tables.charts
Ended = subprocess.CompletedProcess


class Typed:
    """A command that runs: what tests, and torch's agent, use of `subprocess.Popen`."""

    def __init__(
        self,
        words: Sequence[object],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
    ) -> None:
        """`words` follow `python -m`, or begin with `-m` or `-c`: see `begin_anew`.

        The streams are files, PIPE or STDOUT, or those of this process.
        """
        self.args, self.returncode = list(map(str, words)), None
        self._said = [tempfile.TemporaryFile("w+") if each == subprocess.PIPE else None for each in (stdout, stderr)]  # noqa: SIM115
        out = _number(self._said[0] or stdout, 1)
        err = out if stderr == subprocess.STDOUT else _number(self._said[1] or stderr, 2)
        ready, tells = os.pipe()
        given = (self.args, str(cwd or Path.cwd()), dict(env or os.environ), start_new_session)
        self.process = worlds.context().Process(target=begin, args=(*given, Files(out, err, tells)), daemon=True)
        self.process.start()
        self.pid = self.process.pid
        os.close(tells)
        os.read(ready, 1)  # it has a session of its own now, if it was to get one
        os.close(ready)

    def poll(self) -> int | None:
        self.returncode = self.process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, ...]:
        self.wait(timeout)
        return tuple(file and (file.seek(0), file.read())[1] for file in self._said)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def __enter__(self) -> "Typed":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def until(condition: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """Wait until this is true, for so many seconds at most; what it is then."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended is a zombie until somebody asks for its status."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def run(*words: object, limit: float = LIMIT, **settings: Any) -> Ended:
    """Type a command, and wait until it has ended."""
    command = Typed(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)
    try:
        out, err = command.communicate(limit)
    finally:
        command.kill()
    return Ended(command.args, command.returncode, out, err)


def leave_out_curves() -> None:
    """From now on in this process, runs leave an empty curves.png, and pages have empty charts.

    To draw them takes most of the time of a tiny run, and of a page.
    """

    def touch(pictures: Pictures, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            with best_effort(pictures.folder.curves):
                pictures.folder.curves.touch()

    def charts(panels: Iterable[str], note: str, *_: Any) -> Charts:
        return Charts(dict.fromkeys(panels, b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'), note)

    Pictures._curves, run_tables.charts, compared.charts = touch, charts, charts


@contextmanager
def curves() -> Iterator[None]:
    """Inside the `with` they are drawn."""
    drawn = mock.patch.object(Pictures, "_curves", DRAW)
    with drawn, mock.patch.object(run_tables, "charts", CHARTS), mock.patch.object(compared, "charts", CHARTS):
        yield


def remember_plugins() -> None:
    """From now on in this process, a Trainer looks once for callbacks that installed packages bring along."""
    registry.entry_points = cache(entry_points)
    registry._load_external_callbacks("lightning.pytorch.callbacks_factory")


def log_in_place() -> None:
    """From now on in this process, a number that is logged on the CPU stays there, as it is.

    Lightning looks through all that each number has for tensors to move: a tenth of a tiny training.
    """

    def to(metric: result._ResultMetric, device: Any = None, *args: Any, **kwargs: Any) -> result._ResultMetric:
        stays = str(device) == "cpu" and not kwargs and metric.is_tensor
        return metric if stays and metric.value.device.type == "cpu" else MOVE(metric, device, *args, **kwargs)

    result._ResultMetric.to = to


def seed_the_cpu() -> None:
    """From now on in this process, a seed is one of the CPU, unless tests run on GPUs.

    Else torch remembers for each kind of GPU that may still begin who has set it: a twentieth of a tiny training.
    """
    for kind in () if ON_GPUS else (torch.cuda.random, torch.xpu.random, torch.mtia):
        kind._lazy_call = lambda *_, **__: None


def make_parsers_once() -> None:
    """From now on in this process, gan.fit makes the parser of a run once: it takes as long as a tiny step."""
    make = options._parser
    made = cache(lambda run, *_: make(run))
    options._parser = lambda run: made(run, find(run), slurm.cpus())


def remember_settings() -> None:
    """From now on in this process, a file of settings is read once, and again when it has another content."""
    read, fit, known = settings_file.read, options._settings_in, {}

    def content(path: Path) -> bytes | Path:
        return path.read_bytes() if path.is_file() else path

    def reading(path: Path) -> dict[str, Any]:
        key = content(path)
        return dict(known[key] if key in known else known.setdefault(key, read(path)))

    def settings_in(path: Path, parser: Parser, run: str, before: Any = None, **overrides: Any) -> Namespace:
        key = content(path), parser, run, repr(overrides)
        if before is not None or key not in known:
            known[key] = fit(path, parser, run, before, **overrides)
        return known[key].clone() if before is None else known.pop(key)

    settings_file.read, options._settings_in = reading, settings_in


def draw_faces_once() -> None:
    """From now on in this process, a face is drawn once, for whatever run: a twelfth of a tiny training."""
    faces.draw_portrait = cache(portrait.draw_portrait)


def fork_ranks() -> None:
    """From now on in this process, torch's agent forks the ranks of our commands, as torchrun's agent does too."""
    start, end = SubprocessHandler._popen, SubprocessHandler.close

    def popen(handler: SubprocessHandler, words: Sequence[str], env: dict[str, str]) -> Typed | subprocess.Popen:
        program, kind, *typed = [word for number, word in enumerate(words) if (number, word) != (1, "-u")]
        if (program, kind) == (sys.executable, "-m") and typed[0].startswith(("gan.", "tests.")):
            streams = dict(stdout=handler._stdout, stderr=handler._stderr)
            return Typed(typed, env=env, start_new_session=True, **streams)
        return start(handler, words, env)

    def close(handler: SubprocessHandler, *args: Any, **kwargs: Any) -> None:
        with suppress(ProcessLookupError):  # it may have ended just now, and the server has waited for it already
            end(handler, *args, **kwargs)

    SubprocessHandler._popen, SubprocessHandler.close = popen, close


def begin(words: list[str], cwd: str, env: dict[str, str], session: bool, files: list[int]) -> None:
    out, err, tells = files
    if session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    namespaces.enter()
    os.dup2(out, 1)
    os.dup2(err, 2)
    how = dict(encoding=env.get("PYTHONIOENCODING"), line_buffering=True)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), **how)  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), errors="backslashreplace", **how)  # noqa: SIM115
    os.write(tells, b".")
    for number in files:
        os.close(number)
    multiprocessing.current_process()._config["daemon"] = False  # it may start processes of its own,
    # They come from the same server. A process that a server has forked would start another one.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    fork_ranks()
    leave_out_curves()
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count())))
    if words[0] in ("-c", "-m"):
        begin_anew(words, env)
    module = import_module(words[0])
    sys.argv = [module.__file__, *words[1:]]
    sys.path.insert(0, cwd)
    outputs.run(module.main if words[0].partition(".")[0] in OURS else partial(_as_python, module.main))


def _as_python(main: Callable[[], int]) -> int:
    """The status of a program of others, such as torchrun, that ends with a traceback is Python's own."""
    try:
        return main()
    except Exception:  # noqa: BLE001 - whatever it is
        sys.excepthook(*sys.exc_info())
        return 1


def begin_anew(words: list[str], env: Mapping[str, str]) -> NoReturn:
    """Be `python -c PROGRAM` or `python -m MODULE`: what is imported are the modules of others, and none of ours."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", "") != "gan.files.loading"]
    gone = {"", worlds.ROOT}
    given = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = ["" if words[0] == "-c" else os.getcwd(), *given, *(p for p in sys.path if p not in gone)]
    sys.path_importer_cache.clear()
    sys.argv = words
    windows.install()  # if the environment says so
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            exec(words[1], {"__name__": "__main__"})
    except Exception:  # noqa: BLE001 - as Python ends
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _number(stream: Any, own: int) -> int:
    return own if stream is None else stream if isinstance(stream, int) else stream.fileno()
