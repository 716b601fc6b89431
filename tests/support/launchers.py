"""Starting two ranks by a launcher as a person types it, and reading what each of them has noted."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support import launched

ROOT = Path(__file__).parents[2]
PROGRAM = """from tests.support.launched import main, noted

if __name__ == "__main__":
    main()
"""
SCRIPT = ["program.py"]
RUN = ["-m", "gan.fit", "program.py:noted", "--precision", "64-true", "--accelerator", "cpu", "--strategy", "ddp"]
TORCHRUN = ("-m", "torch.distributed.run")
LAUNCH = ("-m", "torch.distributed.launch")
# Variables of launchers, which those of a test itself may have set.
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "MASTER_", "TORCHELASTIC", "PL_GLOBAL")


@dataclass
class Command:
    """What is typed after `python`, or another program first, and variables that are set for it."""

    words: list[str]
    program: str = sys.executable
    variables: dict[str, Any] = field(default_factory=dict)


Notes = list[tuple[dict[str, Any], dict[str, Tensor]]]


def start(commands: list[Command], folder: Path, seconds: float = 150) -> Notes:
    """Run the commands at the same time. Returns the place and the weights of each rank, by rank."""
    (folder / "program.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    kept |= dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", NOTES=str(folder), CUDA_VISIBLE_DEVICES="")
    started, logs = [], [folder / f"{number}.log" for number in range(len(commands))]
    for command, log in zip(commands, logs, strict=True):
        environment = {**kept, **{name: str(value) for name, value in command.variables.items()}}
        with log.open("w") as said:
            words, streams = [command.program, *command.words], dict(stdout=said, stderr=subprocess.STDOUT)
            started.append(subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **streams))
    try:
        codes = [process.wait(timeout=seconds) for process in started]
    except subprocess.TimeoutExpired:
        codes = ["no end"]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if any(codes):
        raise AssertionError("\n".join([f"exit {codes}", *(log.read_text()[-4000:] for log in logs)]))
    notes = [torch.load(path) for path in folder.glob("*.pt")]
    return sorted(notes, key=lambda note: note[0]["rank"])


def alone(folder: Path, part: slice = slice(None)) -> dict[str, Tensor]:
    """The weights of one device in this process, on a part of each batch."""
    folder.mkdir()
    with mock.patch.dict(os.environ, NOTES=str(folder), PL_GLOBAL_SEED="0"):
        launched.play(launched.Noted(part))
    ((_, weights),) = [torch.load(path) for path in folder.glob("*.pt")]
    return weights
