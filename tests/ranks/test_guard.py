"""Updates with gradients that are not finite: skipped on all ranks together, counted, said; hopeless runs end."""

import math
from functools import partial

import pytest
import torch

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.guard import PATIENCE
from tests.support.hard_games import Plain
from tests.support.parity import parts, snapshot, trainer, warned, words_of


class Poisoned(Plain):
    """The discriminator's loss is not a number in some steps, on the first rank."""

    def __init__(self, bad_steps=range(1000), named=True):
        super().__init__()
        self.bad_steps, self.named = bad_steps, named

    def judge(self, batch):
        losses = super().judge(batch)
        if self.step in self.bad_steps and self.trainer.global_rank == 0:
            losses["fake"] = losses["fake"] * math.nan
        return losses if self.named else sum(losses.values())


NAMELESS = partial(Poisoned, named=False)


class SteepGradient(Plain):
    """A finite loss with an infinite slope: the root of zero."""

    def judge(self, batch):
        losses = super().judge(batch)
        if self.step == 2:
            zero = self.discriminator(batch["x"]).sum() * 0
            losses["root"] = zero.sqrt()
        return losses


def run(game, world=1, steps=6):
    module, strategy = game(), PhaseStrategy("ddp" if world > 1 else "single", check=False)
    with warned("skipped the update") as said:
        trainer(strategy, world, steps).fit(module, parts(steps, world))
    return snapshot(module, strategy), {name: policy.skipped for name, policy in strategy.policies.items()}, said


def test_a_steep_gradient_under_a_finite_loss_is_skipped_too():
    state, skipped, said = run(SteepGradient)
    assert skipped == {"generator": 0, "discriminator": 1}
    assert "the losses are finite, a gradient is not" in said[0]
    assert all(torch.isfinite(value).all() for value in state.values())


def test_a_loss_that_stays_bad_ends_the_run_after_some_patience():
    with pytest.raises(
        UserError, match=rf"at step {1 + PATIENCE}, loss 'fake' is nan; skipped {PATIENCE} updates in a row of"
    ):
        run(partial(Poisoned, range(2, 1000)), steps=40)
    assert run(partial(Poisoned, range(2, 1000)), steps=PATIENCE)[1]["discriminator"] == PATIENCE - 2


@pytest.mark.parametrize(
    ("game", "steps", "words"),
    [
        (Poisoned, 6, "loss 'fake' is nan"),
        (NAMELESS, 6, "the loss is nan"),
        (Poisoned, 1, "loss"),
    ],
)
def test_a_loss_that_is_never_finite_ends_the_run_at_once_also_in_its_last_step(game, steps, words):
    said = words_of(run, game, steps=steps)
    assert f"phase 'discriminator' does not learn: at step 0, {words}" in said
    assert "skipped the update of" in said


def test_all_ranks_give_up_together(ranks):
    messages = ranks(2).run(words_of, run, Poisoned, 2)
    assert messages[0] == messages[1]
    assert "does not learn" in messages[0]
