"""A rank that is killed: all ranks start again by themselves, and the run ends as if nothing had happened."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from gan.app.run.folder import RunFolder
from tests.support import commands
from tests.support.parity import BROKEN, EXACT, distance
from tests.support.saved import tensors
from tests.support.worlds import free_port

ROOT = Path(__file__).parents[2]
GAME = '''
import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Adam

from datasets import GlobalLoader
from gan import GanModule, Phase, Player, noise
from gan.runs import Run


class Line(GanModule):
    def __init__(self, width: int, dies: str, waits: bool) -> None:
        super().__init__()
        self.net, self.dies, self.waits = nn.Linear(width, 2), dies, waits

    def configure_players(self):
        yield Player("net", self.net, partial(Adam, lr=0.1), ema=0.5)

    def configure_phases(self):
        yield Phase("learn", self.learn, learners="net")

    def learn(self, x):
        alone = self.waits and self.step == 3 and self.trainer.world_size == 1
        while alone and not self.trainer.strategy.ending.wished:
            Path("waits").touch()
            time.sleep(0.05)
        for death in self.dies.split():
            step, rank, *always = death.split("-")
            again = always or not Path(death).exists()
            if (int(step), int(rank)) == (self.step, self.global_rank) and again:
                with open(death, "a") as deaths:
                    print("once more", file=deaths)
                os.kill(os.getpid(), 9)
        return (self.net(x) + noise.randn((len(x), 2))).square().mean()

    def train_dataloader(self):
        seen = torch.randn(16, self.net.in_features, generator=torch.Generator().manual_seed(0))
        return GlobalLoader(seen, batch_size=4)


def line(width: int = 3, dies: str = "", waits: bool = False, max_steps: int = 12) -> Run:
    """A line, without held-out data, pictures or scores.

    A rank dies at each step of `dies`, such as 5-1 for step 5 and rank 1, once; at 5-1-always, always.
    With `waits`, a rank that is alone trains until step 3, and then waits until it is told to end.
    """
    return Run(Line(width, dies, waits), None, max_steps)
'''
FIT = ("gan.fit",)
TYPED = "--run own.py:line --accelerator cpu --precision 64-true --save-every 2 --strategy zero1 --check false"


def torchrun(restarts):
    words = f"torch.distributed.run --standalone --nproc-per-node 2 --max-restarts {restarts} -m -- gan.fit"
    return words.split()


def train(folder, *arguments, launcher=FIT):
    (folder / "own.py").write_text(GAME)
    ended = commands.run(*launcher, *TYPED.split(), *arguments, cwd=folder, limit=200)
    return ended.returncode, ended.stdout, ended.stderr


def made(folder, step=12):
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


@pytest.mark.parametrize("launcher", [FIT, pytest.param(torchrun(2), marks=pytest.mark.slow)])
def test_the_command_or_a_persons_torchrun_goes_on_to_the_weights_of_one_device(launcher, one_device, tmp_path):
    code, out, err = train(tmp_path, "--dies", "5-1", launcher=launcher)
    assert code == 0, err
    said = r"rank 1 \(process \d+ on .*\) was ended by signal 9 .* \(step 5\)\nrestart 1 of 3"
    assert launcher != FIT or re.search(said, err)
    # The newest one may not have become whole.
    assert re.search(r"12 steps, from runs/001-line/checkpoints/step-00000[24].ckpt", out)
    assert os.listdir(tmp_path / "runs") == ["001-line"]
    assert distance(made(tmp_path), one_device) <= EXACT


@pytest.mark.promise("a rank of `gan.fit` is killed or crashes")
@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(*FIT, "--restarts", "5"), torchrun(5)], ids=["gan.fit", "torchrun"])
def test_the_third_failure_at_one_step_is_the_last(launcher, tmp_path):
    code, _, err = train(tmp_path, "--dies", "5-1-always", launcher=launcher)
    assert code != 0
    assert (tmp_path / "5-1-always").read_text().count("once more") == 3
    assert ("third failure there" if launcher[0] == "gan.fit" else "last 3 attempts have failed at step 5") in err


@pytest.mark.slow
def test_a_host_that_comes_later_takes_part(one_device, tmp_path):
    """The ranks of the first host have been started again before, those of the other have not."""
    words = ("--dies", "1-0", "--waits", "true", "--devices", "1", "--nodes", "1:2")
    words = (*words, "--rendezvous", f"127.0.0.1:{free_port()}")
    (tmp_path / "own.py").write_text(GAME)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with commands.Typed([*FIT, *TYPED.split(), *words], cwd=tmp_path, **pipes) as first:
        try:
            assert commands.until((tmp_path / "waits").exists, 150)
            code, _, err = train(tmp_path, *words)
            out, said = first.communicate(timeout=150)
        finally:
            first.kill()
    assert (first.returncode, code) == (0, 0), said + err
    assert "restart 1 of 3" in said and "restart 2" not in said  # that a host has come is no failure
    assert said.count("a host has come, or starts again: all ranks start again with it") == 1
    assert all("waits at the rendezvous" in each and " for 1 to 2 hosts, until " in each for each in (said, err))
    assert "12 steps, from runs/001-line/checkpoints/step-000004.ckpt" in out
    assert os.listdir(tmp_path / "runs") == ["001-line"]
    assert distance(made(tmp_path), one_device) <= EXACT
