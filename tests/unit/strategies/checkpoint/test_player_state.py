"""What a checkpoint has of a player beside its weights."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import Adam

from gan import GanModule, Phase, Player
from strategies import PhaseStrategy
from strategies.checkpoint.player_state import _with, load_rest, rest_of_state
from tests.support.parity import Whole, trainer


def player(updates, skipped):
    return SimpleNamespace(ema=None, average=SimpleNamespace(updates=updates), loss_scale=None, skipped=skipped)


def test_counts_of_updates_come_back():
    resumed = player(0, 0)
    load_rest(resumed, rest_of_state(player(5, 3)))
    assert (resumed.average.updates, resumed.skipped) == (5, 3)


def test_the_tensors_of_an_optimizers_state_are_found_also_in_lists_and_dicts():
    one, two, three = torch.zeros(3)
    values = {"one": one, "list": [two, 5], "dict": {"three": three}, "step": 3}
    found = _with(values, lambda key, tensor: (key, id(tensor)))
    assert found == {
        "one": ("one", id(one)), "list": [("list", id(two)), 5], "dict": {"three": ("dict", id(three))}, "step": 3
    }  # fmt: skip


class ChannelsLast(GanModule):
    """Its weights lie channels last."""

    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.fused = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), fused

    def configure_players(self):
        yield Player("net", self.net, partial(Adam, lr=1e-2, fused=self.fused))

    def configure_phases(self):
        yield Phase("shrink", self.shrink, "net")

    def shrink(self, batch):
        return self.net(batch["image"]).square().mean()


def images(step):
    generator = torch.Generator().manual_seed(step)
    return {"image": torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_resumed_adam_is_the_unbroken_one_fused_or_not(before, after, tmp_path):
    def trained(game, steps, resumed=None):
        fitted = trainer(PhaseStrategy("single"), 1, steps)
        fitted.fit(game, Whole(steps, batches=images), ckpt_path=resumed)
        return fitted

    unbroken, broken, resumed = (ChannelsLast(fused) for fused in (before, before, after))
    trained(unbroken, 6)
    trained(broken, 3).save_checkpoint(tmp_path / "x.ckpt")
    trained(resumed, 6, tmp_path / "x.ckpt")
    assert torch.equal(resumed.net.weight, unbroken.net.weight)
    assert not torch.equal(broken.net.weight, unbroken.net.weight)
