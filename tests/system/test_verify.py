"""`python -m gan.verify` on a run in a person's own file, in an empty folder."""

import re
from pathlib import Path

import pytest

from gan import fit as fit
from gan import verify as command
from gan.app.verifying.records import LIMITS, Record, Tolerance
from gan.app.verifying.verification import OneDevice, Row
from tests.support.saved import damage

GAME = """
import torch
from torch.nn.functional import softplus

from datasets import GanData
from gan import ranks
from gan.runs import Run
from tests.support.hard_games import Plain


class Relative(Plain):
    def __init__(self, mean):
        super().__init__()
        self.mean = mean

    def judge(self, batch):
        real, fake = self.discriminator(batch["x"]), self.discriminator(self.fake(batch["x"]))
        return {"real": softplus(self.mean(fake.mean(), self.step) - real).mean(), "fake": softplus(fake).mean()}


def of(mean, batch_size, max_steps=9):
    samples = [{"x": each} for each in torch.randn(8, 6, generator=torch.Generator().manual_seed(0))]
    return Run(Relative(mean), GanData(samples, batch_size=batch_size), max_steps)


def holds(batch_size: int = 4) -> Run:
    return of(lambda own, step: ranks.mean(own), batch_size)


def breaks(batch_size: int = 4) -> Run:
    return of(lambda own, step: own, batch_size)


def breaks_later(batch_size: int = 4, max_steps: int = 9) -> Run:
    return of(lambda own, step: own if step >= 2 else ranks.mean(own), batch_size, max_steps)


def casts() -> Run:
    torch.ones(2, 2) @ torch.ones(2, 2).double()


def fails() -> Run:
    raise ZeroDivisionError("no canvas")
"""


@pytest.fixture(autouse=True)
def relative_game(here):
    (here / "relative_game.py").write_text(GAME)


def verify(run, *typed):
    return command.main(["--run", f"relative_game.py:{run}", "--steps", "2", "--devices", "2", *typed])


def test_a_run_that_holds_a_run_that_breaks_the_law_and_one_that_fails(capsys):
    assert verify("holds", "--strategy", "zero3,single", "--allow-refused") == 0
    said = capsys.readouterr().out
    assert "holds: 2 steps of 4 samples in float64" in said
    assert re.search(r"^zero3 +2 +\de-\d\d  exact$", said, re.MULTILINE), said
    assert re.search(r"^single +2 +refused: policy 'single' of all players trains on one device", said, re.MULTILINE)
    assert said.endswith("1 of 2 exact, 1 refused\n")

    assert verify("breaks", "--strategy", "ddp", "--check", "false") == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^ddp +2 +\de-\d\d  differs: step 0, phase 'discriminator': loss 'real' is 0\.", said, re.MULTILINE
    ), said
    assert "the gradient of 'discriminator.0.weight' has norm" in said
    assert "take gan.ranks.mean(x)" in said and said.endswith("0 of 1 exact\n")

    assert verify("fails", "--strategy", "ddp") == 2
    failed = capsys.readouterr().err
    assert failed.startswith("error: one device fails, with\n") and "ZeroDivisionError: no canvas" in failed

    assert verify("casts", "--strategy", "ddp") == 2
    failed = capsys.readouterr().err
    assert re.fullmatch(r"error: one device fails in float64, with RuntimeError: .*type --precision 32\n", failed), (
        failed
    )


@pytest.mark.parametrize(("run", "exact"), [("holds", True), ("breaks", False), ("breaks_later", False)])
@pytest.mark.slow
def test_what_verify_finds_exact_is_trained_and_what_it_refuses_is_refused_in_the_same_words(run, exact, capsys):
    assert verify(run, "--steps", "5", "--strategy", "ddp", "--allow-refused") == (0 if exact else 1)
    said = capsys.readouterr().out
    typed = ["--devices", "2", "--accelerator", "cpu", "--precision", "64-true", "--restarts", "0"]
    assert fit.main(["--run", f"relative_game.py:{run}", *typed]) == (0 if exact else 2)
    refusal = capsys.readouterr().err.removeprefix("error: ").partition("\nGo on from")[0]
    words = [line.strip() for line in refusal.splitlines()]
    if exact:
        assert re.search(r"^ddp +2 +\de-\d\d  exact$", said, re.MULTILINE), said
    else:
        lines = [line.strip() for line in said.partition("refused: ")[2].splitlines()]
        assert lines[: len(words)] == words and len(words) > 2
        assert f"In a trial of step {2 if run == 'breaks_later' else 0}, " in words[0]


def test_from_a_checkpoint_all_train_on_and_name_real_steps(tmp_path, capsys):
    alone = ["--devices", "1", "--accelerator", "cpu", "--save-every", "2", "--max-steps", "4", "--batch-size", "2"]
    assert fit.main(["--run", "relative_game.py:breaks_later", *alone]) == 0
    folder = Path("runs/001-breaks_later")
    capsys.readouterr()
    begun = ["--from-checkpoint", str(folder), "--steps", "1", "--devices", "2"]
    assert command.main([*begun, "--strategy", "single,ddp", "--check", "false"]) == 1
    said = capsys.readouterr().out
    assert f"breaks_later: 1 steps of 2 samples from {folder}/checkpoints/step-000004.ckpt in float64" in said
    assert re.search(r"^ddp .*differs: step 4, phase 'discriminator': loss 'real'", said, re.MULTILINE), said

    damage(folder / "checkpoints" / "step-000004.ckpt")
    assert command.main(["--from-checkpoint", f"{folder}/checkpoints/step-000004.ckpt", "--devices", "2"]) == 2
    assert f"type --from-checkpoint {folder}/checkpoints/step-000002.ckpt" in capsys.readouterr().err


EXACT, DIFFERS = Row("exact", 1e-16, exact=True), Row("differs: step 0", 1e-3, advice=("loss",))
REFUSED, FAILS = Row("refused: no", refused=True), Row("fails on rank 1: KeyError")
WRONG = Row("refused: 2 ranks would not train as one device does", refused=True, wrong=True)


@pytest.mark.parametrize(
    ("rows", "allow_refused", "status"),
    [
        ([EXACT, EXACT], False, 0),
        ([EXACT, DIFFERS], True, 1),
        ([EXACT, FAILS], True, 1),
        ([EXACT, REFUSED], False, 1),
        ([EXACT, REFUSED], True, 0),
        ([REFUSED, REFUSED], True, 1),
        ([EXACT, WRONG], True, 1),
    ],
)
def test_the_exit_status_is_for_a_persons_own_ci(rows, allow_refused, status, capsys):
    one = OneDevice(Record(), None, Tolerance(*LIMITS["64"], ends={"a": 1e-9, "b": 0.0}))
    assert command._conclude(rows, {"64": one}, allow_refused) == status
    said = capsys.readouterr().out
    assert "  1e-10 in float64; 1 of 2 tensors may be off by more, as rounding moves them by up to 1e-09" in said
    assert ("A loss must be a mean over samples." in said) == (DIFFERS in rows)
