"""A command's ranks as torchrun would start them, in forked processes, one of which is killed."""

import contextlib
import multiprocessing as mp
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from gan import fit as fit_command
from gan import noise
from gan.app.fitting.keep import Keep
from gan.app.run.folder import RunFolder
from gan.files import errors
from strategies import PhaseStrategy
from strategies.checkpoint import writing
from strategies.processes import lost_ranks
from strategies.processes.lost_ranks import Survivor
from tests.support.commands import until
from tests.support.saved import tensors
from tests.support.trained_on import ON_GPUS
from tests.support.watch import Trace
from tests.support.worlds import context, free_port, place

ALONE = 240  # seconds after which a run that nobody disturbs is said to hang
LIMIT = 30  # seconds in which the others must have ended
TRAINS, STEP, SAVES = b"trains", b"step", b"saves"  # what a rank tells of itself
FIVE = "--max-steps", "5", "--save-every", "1", "--check", "false"  # the trial would be what is interrupted
ACCELERATOR = "gpu" if ON_GPUS and torch.accelerator.device_count() >= 3 else "cpu"
ARGUMENTS = (
    "--run wgan-gp-faces --width 2 --latent 4 --faces 48 --held-out 12 --batch-size 12 --critic-steps 3 "
    f"--accelerator {ACCELERATOR} --precision 64-true --log-every 1 --sample-every 1000 --resume auto"
)


@dataclass
class Ended:
    """What came of a world of ranks."""

    statuses: list[int | None]
    said: list[str]
    process: int | None  # of the rank that was killed
    seconds: float  # from then until the last of the others had ended
    left: list[int]  # groups of processes that are still there


def train(
    folder: Path,
    size: int,
    *arguments: str,
    victim: int | None = None,
    kill: Callable[[Connection], bool] | None = None,
    itself: str | None = None,
    tied: bool = True,
    patient: bool = True,
    method: str = "forkserver",
) -> Ended:
    """Train a tiny run on `size` ranks in a folder, to its end or until rank `victim` is killed.

    From outside: `kill` hears what the victim tells and returns when the moment has come, or False if it has ended.
    Or by itself: in "forward", in a "collective", or while it "writes" a checkpoint, at some step; or before it
    "connects" to the others. With "error while it writes" it is not killed, and raises an error in a forward while a
    thread saves. The control is not `tied` to a lifeline. Ranks that are not `patient` end
    as soon as they learn of an error. A process that has imported everything itself may take the `method` "fork".
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    made = context() if method == "forkserver" else mp.get_context(method)
    ranks: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(size):
        ours, theirs = made.Pipe(duplex=False)
        command = [*ARGUMENTS.split(), *arguments]
        deeds = [itself] if itself and rank == victim else []
        deeds += [] if tied else ["untied"]
        deeds += [] if patient else ["impatient"]
        ranks.append(made.Process(target=_rank, args=(folder, rank, size, port, command, theirs, deeds)))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    killed = None
    try:
        if kill is not None and kill(pipes[victim]):
            ranks[victim].kill()
        if victim is not None:
            wait([ranks[victim].sentinel], ALONE)
            ranks[victim].join(1)
            killed = time.monotonic() if ranks[victim].exitcode == -signal.SIGKILL else None
        deadline = time.monotonic() + (ALONE if killed is None else LIMIT)
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        seconds = 0.0 if killed is None else time.monotonic() - killed
        statuses = [process.exitcode for process in ranks]
        until(lambda: not any(map(_there, ranks)), 15)
        left = [process.pid for process in ranks if _there(process)]
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    said = [(folder / f"said-{rank}.txt").read_text() for rank in range(size)]
    return Ended(statuses, said, None if killed is None else ranks[victim].pid, seconds, left)


def _there(process: BaseProcess) -> bool:
    """Whether a rank, or whatever it has started, is still there."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- when ----


def after(seconds: float, event: bytes, number: int = 1) -> Callable[[Connection], bool]:
    """So long after the victim has told something for the n-th time."""

    def kill(pipe: Connection) -> bool:
        for _ in range(number):
            while True:
                try:
                    if not pipe.poll(ALONE):
                        return False
                    if pipe.recv_bytes() == event:
                        break
                except EOFError:
                    return False
        time.sleep(seconds)
        return True

    return kill


def some_moment(chance: random.Random) -> tuple[str, Callable[[Connection], bool]]:
    """At random: before training, anywhere in the next few steps, or while a checkpoint is saved."""
    kind, number = chance.choice([TRAINS, STEP, STEP, SAVES, SAVES]), chance.randint(1, 3)
    seconds = chance.uniform(0, 0.03 if kind == SAVES else 0.3)
    words = {TRAINS: "set-up", STEP: f"step {number}", SAVES: f"the start of save {number}"}
    return f"{1000 * seconds:.0f} ms after {words[kind]}", after(seconds, kind, 1 if kind == TRAINS else number)


# ---- what came of it ----


def newest(folder: Path) -> Path | None:
    """The run's newest checkpoint, by the framework's own search."""
    runs = sorted((folder / "runs").glob("*"))
    return RunFolder(runs[-1]).newest_checkpoint() if runs else None


def made(folder: Path) -> dict[str, torch.Tensor]:
    """The weights, averages and optimizer states of a run that has come to its end."""
    return tensors(newest(folder))


def assert_named(ended: Ended, victim: int) -> None:
    """The others have ended in time, by one error that names the rank, and nothing is left."""
    text = "\n".join(f"--- rank {rank}\n{said[-3000:]}" for rank, said in enumerate(ended.said))
    others = [rank for rank in range(len(ended.said)) if rank != victim]
    assert ended.statuses[victim] == -signal.SIGKILL, text
    assert [ended.statuses[rank] for rank in others] == [2] * len(others), text
    assert ended.seconds < LIMIT, text
    for rank in others:
        errors = re.findall(r"^error: .*", ended.said[rank], re.MULTILINE)
        assert len(errors) == 1, text
        assert f"rank {victim} (process {ended.process} on " in errors[0], text
        assert "Traceback" not in ended.said[rank], text
    assert ended.left == [], text


# ---- a rank ----


def _rank(
    folder: Path, rank: int, size: int, port: int, command: list[str], tells: Connection, deeds: list[str]
) -> None:
    os.setpgid(0, 0)  # with all that it starts, such as loaders' workers
    os.chdir(folder)
    said = os.open(f"said-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(place(rank, size, port), TORCHELASTIC_RUN_ID="crashes")
    rank_zero_only.rank = rank  # Lightning looks when it is imported
    errors.FIRST_RANK_SPEAKS = 3  # nobody ends here whom it gives the word to
    torch.set_num_threads(1)
    _add(Keep, "on_train_start", lambda *_: tells.send_bytes(TRAINS), after=True)
    _add(Keep, "on_train_batch_end", lambda *_: tells.send_bytes(STEP), after=True)
    _add(PhaseStrategy, "save_checkpoint", lambda *_: tells.send_bytes(SAVES))
    for deed in deeds:
        DEEDS[deed]()
    sys.exit(fit_command.main(command))


def _add(owner: Any, name: str, call: Callable[..., Any], after: bool = False) -> None:
    """Let a function make this call first, or last."""
    function = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        if not after:
            call(*args)
        result = function(*args, **kwargs)
        if after:
            call(*args)
        return result

    setattr(owner, name, both)


def _the(number: int, error: Exception | None = None) -> Callable[..., None]:
    """The n-th call is the last, by an error or by a signal."""
    calls = iter(range(1, number))

    def call(*_: Any) -> None:
        if next(calls, None) is None:
            if error is not None:
                raise error
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def _in_forward(error: Exception | None = None, number: int = 4) -> None:
    _add(noise, "randn", _the(number, error))


def _in_a_collective() -> None:
    die = _the(45)

    class Deadly(Trace):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(function).startswith("c10d"):
                die()
            return function(*args, **(kwargs or {}))

    run = PhaseStrategy.run

    def watched(self: PhaseStrategy, *args: Any) -> None:
        with Deadly():
            run(self, *args)

    PhaseStrategy.run = watched


def _raises_while_it_writes() -> None:
    """The first checkpoint is still being written when a later step raises an error."""
    _add(writing, "_write_file", lambda *_: time.sleep(2))
    _in_forward(ValueError("no such label"), 5)


DEEDS = {
    "connects": lambda: _add(dist, "init_process_group", _the(1)),
    "forward": _in_forward,
    "collective": _in_a_collective,
    "writes": lambda: _add(writing, "_write_file", _the(2)),  # the first one becomes whole
    "untied": lambda: setattr(Survivor, "tie", lambda *_: None),
    "impatient": lambda: setattr(lost_ranks, "PATIENCE", 0.1),
    "error while it writes": _raises_while_it_writes,
}
