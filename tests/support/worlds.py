"""Processes that stay: starting torch takes seconds, so it is started once, and all tests of a world size share one."""

import importlib
import io
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp
from torch import Tensor

from strategies.processes import call_on_ranks
from tests.support.forked import SERVER, join
from tests.support.rehearsal import ordered
from tests.support.trained_on import BACKEND, stand_apart

TIMEOUT = 240
ROOT = str(Path(__file__).parents[2])
NUMBERS = (torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool)
PRELOAD = ["tests.support.preload"]  # what the fork server imports before it forks ranks


def context() -> BaseContext:
    """Its processes are forked from a server that has imported PRELOAD. The first caller starts it for all."""
    made = mp.get_context("forkserver")
    if SERVER in os.environ:
        join()
    made.set_forkserver_preload(PRELOAD)
    # The server imports PRELOAD before it gets our sys.path, and a test may be in another folder.
    with mock.patch.dict(os.environ, PYTHONPATH=ROOT):
        forkserver.ensure_running()
    return made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of a rank of one host, as torchrun sets them."""
    numbers = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK=0, NODE_RANK=0)
    return {name: str(value) for name, value in numbers.items()} | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


class Ranks:
    """A world of ranks on this machine; `run` calls a module-level function on every one."""

    def __init__(self, size: int, limit: timedelta | None = None, backend: str = BACKEND) -> None:
        """`limit`: how long a collective waits for the other ranks."""
        self.size = size
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = mp.Pipe()
            process = context().Process(target=_serve, args=(theirs, rank, size, port, limit, backend), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The results of all ranks, in order. If ranks fail, one error has the rank and traceback of each."""
        for pipe in self.pipes:
            _send(pipe, (function, args, kwargs))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT} s")
            results.append(pickle.loads(pipe.recv_bytes()))
        failures = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(results) if failed]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [result for _, result in results]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(5)
            process.kill()  # a rank that waits in a collective may not hear the first signal
            process.join()


def apart(function: Callable[[], Any], ranks: int, limit: float = 120) -> list[Any]:
    """What a function returns on ranks of a world of its own, which connects them itself."""
    return call_on_ranks.call(function, ranks=ranks, limit=limit, preload=PRELOAD, connected=False)


class Pickler(pickle.Pickler):
    """Writes the numbers of a tensor. torch writes each small one as a file; Connection.send opens a socket for it."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if plain and not value.requires_grad and value.dtype in NUMBERS:
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _send(pipe: Connection, value: Any) -> None:
    packed = io.BytesIO()
    Pickler(packed).dump(value)
    pipe.send_bytes(packed.getbuffer())


def _serve(pipe: Connection, rank: int, size: int, port: int, limit: timedelta | None, backend: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0", OMP_NUM_THREADS="1"
    )
    importlib.import_module(PRELOAD[0])  # it is there, unless it has failed: multiprocessing ignores such an error
    torch.set_num_threads(1)
    if backend == ordered.NAME:
        ordered.register()
    elif backend == "nccl":
        stand_apart(rank)
    torch.distributed.init_process_group(backend, rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            function, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            _send(pipe, (False, function(*args, **kwargs)))
        except BaseException:  # noqa: BLE001 - whatever it was, the test that asked for it shall see it
            _send(pipe, (True, traceback.format_exc()))
        os.environ.pop("PL_GLOBAL_SEED", None)  # seed_everything tells all later trainings its seed
