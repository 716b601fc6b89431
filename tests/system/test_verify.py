"""`python -m gan.verify` on a run in a person's own file, in an empty folder."""

import re
import sys

import pytest

from gan.verify import command
from gan.verify.comparing import LIMITS, Tolerance
from gan.verify.recording import Record
from gan.verify.training import Trained
from gan.verify.verification import OneDevice, Row

GAME = """
from functools import partial

from torch import nn
from torch.nn.functional import softplus
from torch.optim import Adam

from datasets import Faces, GanData
from gan import GanModule, Phase, Player, noise, ranks
from gan.runs import Run


class Relative(GanModule):
    def __init__(self, mean):
        super().__init__()
        self.mean = mean
        self.generator = nn.Sequential(nn.Linear(4, 3 * 16 * 16), nn.Unflatten(1, (3, 16, 16)))
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 1))

    def configure_players(self):
        yield Player("generator", self.generator, partial(Adam, lr=1e-3), ema=0.9)
        yield Player("discriminator", self.discriminator, partial(Adam, lr=1e-3))

    def configure_phases(self):
        yield Phase("judge", self.judge, learners="discriminator")
        yield Phase("fool", self.fool, learners="generator")

    def scores(self, real):
        fake = self.generator(noise.randn((len(real), 4), like=real))
        return self.discriminator(real), self.discriminator(fake)

    def judge(self, batch):
        real, fake = self.scores(batch["image"])
        center = self.mean(fake.mean())
        return {"real": softplus(center - real).mean(), "fake": softplus(fake).mean()}

    def fool(self, batch):
        return softplus(-self.scores(batch["image"])[1]).mean()


def holds(batch_size: int = 4) -> Run:
    return Run(Relative(ranks.mean), GanData(Faces(8, size=16), batch_size=batch_size), 9)


def breaks(batch_size: int = 4) -> Run:
    return Run(Relative(lambda own: own), GanData(Faces(8, size=16), batch_size=batch_size), 9)


def fails() -> Run:
    raise ZeroDivisionError("no canvas")
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "relative_game.py").write_text(GAME)
    yield
    sys.modules.pop("relative_game", None)


def verify(run, *typed):
    return command.main(["--run", f"relative_game.py:{run}", "--steps", "2", "--devices", "2", *typed])


def test_a_run_that_holds_a_run_that_breaks_the_law_and_one_that_fails(capsys):
    assert verify("holds", "--strategy", "zero3,single", "--allow-refused") == 0
    said = capsys.readouterr().out
    assert "holds: 2 steps of 4 samples in float64" in said
    assert re.search(r"^zero3 +2 +\de-\d\d  exact$", said, re.MULTILINE), said
    assert re.search(r"^single +2 +refused: policy 'single' of all players trains on one device", said, re.MULTILINE)
    assert said.endswith("1 of 2 exact, 1 refused\n")

    assert verify("breaks", "--strategy", "ddp") == 1
    said = capsys.readouterr().out
    assert re.search(r"^ddp +2 +\de-\d\d  differs: step 0, phase 'judge': loss 'real' is 0\.", said, re.MULTILINE), said
    assert "the gradient of 'discriminator.1.weight' has norm" in said
    assert "take gan.ranks.mean(x)" in said and said.endswith("0 of 1 exact\n")

    assert verify("fails", "--strategy", "ddp") == 2
    failed = capsys.readouterr().err
    assert failed.startswith("error: one device fails, with\n") and "ZeroDivisionError: no canvas" in failed


def test_what_cannot_be_tried_is_refused_before_anything_is_trained(capsys):
    assert verify("holds", "--batch-size", "5") == 2
    assert "batch 5 is not divisible by 2 ranks; try --batch-size 4" in capsys.readouterr().err
    assert verify("holds", "--strategy", "zero4") == 2
    assert "unknown strategy 'zero4'" in capsys.readouterr().err


EXACT, DIFFERS = Row("exact", 1e-16, exact=True), Row("differs: step 0", 1e-3, advice=("loss",))
REFUSED, FAILS = Row("refused: no", refused=True), Row("fails on rank 1: KeyError")


@pytest.mark.parametrize(
    ("rows", "allow_refused", "status"),
    [
        ([EXACT, EXACT], False, 0),
        ([EXACT, DIFFERS], True, 1),
        ([EXACT, FAILS], True, 1),
        ([EXACT, REFUSED], False, 1),
        ([EXACT, REFUSED], True, 0),
        ([REFUSED, REFUSED], True, 1),
    ],
)
def test_the_exit_status_is_for_a_persons_own_ci(rows, allow_refused, status, capsys):
    one = OneDevice(Trained(Record(), {}, 1.0), None, Tolerance(*LIMITS[True], ends={"a": 1e-9, "b": 0.0}))
    assert command._conclude(rows, {True: one}, allow_refused) == status
    said = capsys.readouterr().out
    assert "  1e-10 in float64; 1 of 2 tensors may be off by more, as rounding moves them by up to 1e-09" in said
    assert ("A loss must be a mean over samples." in said) == (DIFFERS in rows)
