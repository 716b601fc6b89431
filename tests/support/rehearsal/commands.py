"""Commands on the rehearsal's devices: each in a process of its own, which a server forks that has imported torch."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.worlds import PRELOAD, context, free_port

LIMIT = 120.0  # seconds


@dataclass(frozen=True)
class Ended:
    """How a rank's process has ended, and what it said."""

    status: int | None  # None if it did not end
    said: str


def run(folder: Path, name: str, *words: object, ranks: int = 1, **variables: str) -> str:
    """What the first rank of a command says, such as `run(folder, "gan.fit", "r3gan-faces")`. It must succeed."""
    ended = start(folder, name, words, ranks, variables)
    for rank, each in enumerate(ended):
        assert each.status == 0, f"rank {rank} of {name} ended with {each.status}:\n{each.said}"
    return ended[0].said


def start(folder: Path, name: str, words: Sequence[object], ranks: int, variables: dict[str, str]) -> list[Ended]:
    port, processes = free_port(), []
    for rank in range(ranks):
        own = {**variables, "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            own |= {key: str(value) for key, value in place.items()}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        out = folder / f"said-{rank}"
        process = context().Process(target=_be, args=(folder, out, name, list(map(str, words)), own))
        process.start()
        processes.append((process, out))
    ended = []
    for process, out in processes:
        process.join(LIMIT)
        ended.append(Ended(process.exitcode, out.read_text(errors="backslashreplace") if out.exists() else ""))
        process.kill()
    return ended


def _be(folder: Path, out: Path, name: str, words: list[str], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    importlib.import_module(PRELOAD[0])
    from tests.support.commands import leave_out_curves
    from tests.support.rehearsal import device

    leave_out_curves()

    device.load()
    try:
        module, _, function = name.partition(":")
        called = importlib.import_module(module)
        status = getattr(called, function or "main")(words) or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
