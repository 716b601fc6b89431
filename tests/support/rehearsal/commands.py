"""Commands on the rehearsal's devices: each in a process of its own, which a server forks that has imported torch."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tests.support.commands import LIMIT, Ended, Typed
from tests.support.worlds import free_port, place


def run(folder: Path, name: str, *words: object, ranks: int = 1, **variables: str) -> str:
    """What the first rank of a command says, such as `run(folder, "gan.fit", "r3gan-faces")`. It must succeed."""
    ended = start(folder, name, words, ranks, variables)
    for rank, each in enumerate(ended):
        assert each.returncode == 0, f"rank {rank} of {name} ended with {each.returncode}:\n{each.stdout}"
    return ended[0].stdout


def start(folder: Path, name: str, words: Sequence[object], ranks: int, variables: dict[str, str]) -> list[Ended]:
    own, port, typed = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}, free_port(), []
    for rank in range(ranks):
        env = own | (place(rank, ranks, port) if ranks > 1 else {})
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        typed.append(Typed([__name__, name, *words], cwd=folder, env=env, **streams))
    try:
        said = [each.communicate(LIMIT)[0] for each in typed]
    finally:
        for each in typed:
            each.kill()
    return [Ended(each.args, each.returncode, text) for each, text in zip(typed, said, strict=True)]


def main() -> int:
    """`gan.fit WORDS`, or `MODULE:FUNCTION WORDS`, with the devices."""
    from tests.support.rehearsal import device

    device.load()
    name, *words = sys.argv[1:]
    module, _, function = name.partition(":")
    return getattr(import_module(module), function or "main")(words) or 0
