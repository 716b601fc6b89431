"""A world of ranks: processes of this machine that call one function together. For commands that try many worlds.

A rank may fail, hang or die, and the command goes on with the next world. Lightning's own launchers start the ranks of
one training, with which the command ends.
"""

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

from gan.files.disk import whole_file
from gan.files.errors import UserError
from gan.files.system import WINDOWS, cores
from strategies.processes.board import NEVER, VARIABLE, Board
from strategies.processes.failure import FOLLOWS, Failure, cause, ended, failed
from strategies.processes.lost_ranks import STATUS

GRACE = 5.0  # seconds that the other ranks get to report, once one has failed


class WorldFailed(Exception):
    """A rank has failed: the one that failed first."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class WorldHangs(Exception):
    """The ranks did not end in time. `places` is where each rank was that had begun to train."""

    def __init__(self, limit: float, places: dict[int, str]) -> None:
        super().__init__(f"no end within {limit:g} s")
        self.places = places


def call(
    function: Callable[..., Any],
    *args: Any,
    ranks: int,
    limit: float,
    preload: Sequence[str] = (),
    connected: bool = True,
    device: str = "cpu",
) -> list[Any]:
    """What the function returns on each rank, with a time limit in seconds. Each rank has a device of its own.

    `connected`: the ranks have a process group. Without it, the function makes one.

    The function and its arguments are pickled. A server that has imported the modules of `preload` forks each process,
    because importing in each would take most of the time.
    """
    if WINDOWS:
        raise UserError("this command starts ranks in a way that Windows does not have; take Linux in it (WSL 2)")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    with tempfile.TemporaryDirectory() as folder:
        port, board = get_free_port(), Board.new(Path(folder, "board"), ranks)
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            arguments = (Path(folder), rank, ranks, port, connected, device, partial(function, *args))
            processes.append(context.Process(target=_serve, args=arguments))  # no daemon: it may have loader workers
            processes[-1].start()
        try:
            return _wait(Path(folder), processes, limit, board)
        finally:
            for process in processes:
                _end(process)


def _wait(folder: Path, processes: list[BaseProcess], limit: float, board: Board) -> list[Any]:
    """Wait until all ranks have reported, or the time is up, or GRACE after one rank has failed."""
    until = time.monotonic() + limit
    reports: dict[int, Any] = {}
    while True:
        for rank, process in enumerate(processes):
            status = process.exitcode  # first, for a rank reports before it ends
            if rank not in reports and (path := folder / f"rank-{rank}").exists():
                reports[rank] = pickle.loads(path.read_bytes())
            elif rank not in reports and status == 0:
                reports[rank] = None  # it has served the others: see strategies/placing/
            elif rank not in reports and status is not None:
                said = ended(rank, process.pid or 0, socket.gethostname(), status)
                reports[rank] = replace(said, kind=FOLLOWS) if status == STATUS else said  # with it a rank ends itself
        failures = [report for report in reports.values() if isinstance(report, Failure)]
        if len(reports) == len(processes) or time.monotonic() > until:
            break
        if failures:
            until = min(until, time.monotonic() + GRACE)
        time.sleep(0.05)
    if failures:
        raise WorldFailed(cause(failures))
    if len(reports) < len(processes):
        raise WorldHangs(limit, {rank: str(entry) for rank, entry in board.read().items() if entry.step != NEVER})
    return [reports[rank] for rank in range(len(processes))]


def _serve(
    folder: Path, rank: int, ranks: int, port: int, connected: bool, device: str, function: Callable[[], Any]
) -> None:
    """One rank. It reports what the function returns, or how it has failed."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    place |= {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, VARIABLE: folder / "board"}
    os.environ.update({name: str(value) for name, value in place.items()})
    if device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    # See [Note: the thread pool of a fork] in starting.py.
    torch.set_num_threads(torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else max(1, cores() // ranks))
    try:
        if device != "cpu":
            torch.accelerator.set_device_index(rank)
        if ranks > 1 and connected:
            dist.init_process_group("gloo" if device == "cpu" else None)
        report = function()
    except BaseException as error:  # noqa: BLE001 - any error is reported
        report = failed(rank, error, traceback.format_exc())
    with whole_file(folder / f"rank-{rank}") as part:
        part.write_bytes(pickle.dumps(report))
    if not isinstance(report, Failure):
        threading.Event().wait()  # until it is ended: the others may be connecting yet, and rank 0 has their store
    # A normal exit could wait for ever, for threads that the function has left or for a broken process group.
    os._exit(0)


def _end_with_parent() -> None:
    """A rank that waits in a collective would wait on when the process that has started it is killed."""
    if (parent := mp.parent_process()) is not None:
        parent.join()
        os.killpg(os.getpid(), signal.SIGKILL)


def _end(process: BaseProcess) -> None:
    """End a process and all that it has started, such as a compiler."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
