"""A rank that is killed: all ranks start again by themselves, and the run ends as if nothing had happened."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gan.fit.folder import RunFolder
from tests.support.parity import BROKEN, EXACT, distance
from tests.support.saved import tensors

ROOT = Path(__file__).parents[2]
GAME = '''
import os
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Adam

from datasets import GlobalLoader
from gan import GanModule, Phase, Player, noise
from gan.runs import Run


class Line(GanModule):
    def __init__(self, dies: str) -> None:
        super().__init__()
        self.net, self.dies = nn.Linear(3, 2), dies

    def configure_players(self):
        yield Player("net", self.net, partial(Adam, lr=0.1), ema=0.5)

    def configure_phases(self):
        yield Phase("learn", self.learn, learners="net")

    def learn(self, x):
        for death in self.dies.split():
            step, rank = map(int, death.split("-"))
            if (step, rank) == (self.step, self.global_rank) and not Path(death).exists():
                Path(death).touch()
                os.kill(os.getpid(), 9)
        return (self.net(x) + noise.randn((len(x), 2))).square().mean()

    def train_dataloader(self):
        return GlobalLoader(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), batch_size=4)


def line(dies: str = "", max_steps: int = 12) -> Run:
    """A line. A rank dies at each step of `dies`, such as 5-1 for step 5 and rank 1, once."""
    return Run(Line(dies), None, max_steps)
'''
FIT = ("-m", "gan.fit")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "--")


def train(folder, *arguments, launcher=FIT):
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(GAME)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    typed = "--run own.py:line --accelerator cpu --precision 64-true --save-every 2 --strategy zero1 --check false"
    ended = subprocess.run(
        [sys.executable, *launcher, *typed.split(), *arguments],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=200,
    )
    return ended.returncode, ended.stdout, ended.stderr


def made(folder, step=12):
    """All tensors of a checkpoint."""
    run = RunFolder(folder / "runs" / "001-line")
    assert run.steps()[-1] == 12
    return tensors(run.checkpoint(step))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    code, _, err = train(folder, "--devices", "1", "--strategy", "single")
    assert code == 0, err
    assert distance(made(folder, 10), made(folder)) > BROKEN  # the control: two more steps make a difference
    return made(folder)


def test_the_command_goes_on_by_itself_to_the_weights_of_one_device(one_device, tmp_path):
    code, out, err = train(tmp_path, "--dies", "5-1")
    assert code == 0, err
    assert re.search(r"rank 1 \(process \d+ on .*\) was ended by signal 9 .* \(step 5\)\nrestart 1 of 3", err)
    # The newest one may not have become whole.
    assert re.search(r"12 steps, from runs/001-line/checkpoints/step-00000[24].ckpt", out)
    assert os.listdir(tmp_path / "runs") == ["001-line"]
    assert distance(made(tmp_path), one_device) <= EXACT


@pytest.mark.slow
def test_a_persons_torchrun_goes_on_with_the_same_run(one_device, tmp_path):
    code, out, err = train(tmp_path, "--dies", "5-1", launcher=(*TORCHRUN, "gan.fit"))
    assert code == 0, err
    assert re.search(r"12 steps, from runs/001-line/checkpoints/step-00000[24].ckpt", out)
    assert os.listdir(tmp_path / "runs") == ["001-line"]
    assert distance(made(tmp_path), one_device) <= EXACT


@pytest.mark.slow
def test_without_restarts_the_error_says_what_to_type(tmp_path):
    code, _, err = train(tmp_path, "--dies", "5-1", "--restarts", "0")
    assert code == 2
    (error,) = re.findall(r"^error: .*", err, re.MULTILINE)
    assert re.search(r"error: rank 1 \(process \d+ on .*\) was ended by signal 9 \(Killed\)", error)
    assert err.rstrip().endswith("Go on from its last checkpoint with\n  python -m gan.fit --resume runs/001-line")
