"""What else words of Player and Phase do; that they train as a loop by hand: tests/scenes/words.py."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning import Callback

from gan.app.run.reopen import _load
from gan.files.checkpoint import load
from gan.files.errors import UserError
from gan.runs import Run
from tests.scenes.words import ByAuthor, Copied, Following, Freezing, Normed, NormedByHand
from tests.support import opening
from tests.support.duel import Duel, fit, of
from tests.support.parity import EXACT, distance, often, on
from tests.support.watch import looked

STEPS = 4

# ---- freeze ----


def frozen_there(_, module):
    """The weights that require no gradient."""
    return {name for name, weight in module.named_parameters() if not weight.requires_grad}


@pytest.mark.parametrize(("policy", "world"), [("single", 1), ("zero3", 2)])
def test_between_steps_requires_grad_is_the_authors(policy, world, ranks):
    """Those that freeze names require gradients again, and those that the author has frozen do not."""
    for game, frozen in ((Freezing, set()), (ByAuthor, {"judge.trunk"})):
        seen = on(ranks, world)(looked, frozen_there, game, policy, world, 4)[0]
        assert {name.rpartition(".")[0].rpartition(".")[0] for name in seen} == frozen


# ---- after ----


def test_it_runs_without_gradients_once_an_update_and_not_after_a_skipped_one():
    calls = []

    class Counting(Duel):
        of_judge: ClassVar = {"after": lambda net: calls.append(torch.is_grad_enabled())}

        def judging(self, batch):
            return super().judging(batch) * (float("nan") if self.step == 4 else 1.0)

    with pytest.warns(UserWarning, match="skipped the update of 'judge'"):
        fit(Counting, "single", 1, 6)
    assert calls == [False] * 7  # six steps, and two more turns, without step 4


# ---- ema_buffers ----


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    return NormedByHand().run(STEPS)


class Sees(Callback):
    """The generator's state within `averaged()` after each step."""

    def on_train_batch_end(self, trainer, game, *_):
        before = {name: buffer.clone() for name, buffer in game.generator.named_buffers()}
        with game.averaged():
            self.found = {f"ema generator.{k}": v.clone() for k, v in game.generator.state_dict().items()}
        assert distance(dict(game.generator.named_buffers()), before) == 0


def seen(policy, world):
    sees = Sees()
    fit(Normed, policy, world, STEPS, callbacks=[sees], sync_batchnorm=True)
    return sees.found


@pytest.mark.parametrize(("policy", "world"), often([("ddp", 2), ("zero3", 2), ("fsdp", 2)], ["zero3"]))
def test_they_are_used_with_averaged_weights(policy, world, ranks, by_hand):
    found = ranks(world).run(seen, policy, world)[0]
    assert distance(found, of(by_hand, found)) < EXACT


def test_averaged_buffers_are_opened_and_exported_and_a_checkpoint_without_them_is_refused(by_hand, tmp_path):
    end, copied = tmp_path / "end.ckpt", tmp_path / "copied.ckpt"
    fit(Normed, "single", 1, STEPS, str(end))
    game, saved = Normed().double(), load(Path(end))
    _load(Run(game, None, 1), saved, end)
    opened = {f"ema generator.{key}": value for key, value in game.generator.state_dict().items()}
    assert distance(opened, of(by_hand, opened)) < EXACT
    written = opening.exported(Normed(), end, "ema")[0].state
    assert distance({f"ema generator.{key}": value for key, value in written.items()}, opened) == 0

    fit(type("Normed", (Copied,), {}), "single", 1, steps=1, save=str(copied))
    with pytest.raises(UserError, match=r"player 'generator': the checkpoint has no average of '1\..*'"):
        fit(Normed, "single", 1, resume=str(copied))


# ---- follows ----


@pytest.mark.parametrize("policy", ["judge=ddp,teacher=ddp,*=single", "judge=ddp,generator=single"])
def test_a_player_that_follows_may_be_named_with_the_followed_ones_policy(policy):
    fit(Following, policy, 1, steps=1)


def test_auto_counts_it_with_the_followed(capsys):
    fit(Following, "auto", 1, steps=1)
    told = capsys.readouterr().out
    assert "judge" in told and "teacher" not in told
