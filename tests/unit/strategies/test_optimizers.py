"""On a CPU Adam goes over memory once a step, where torch's fused update is right."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from gan.phase import Player
from strategies.checkpoint import player_state
from strategies.optimizers import make_optimizer

LAST = torch.channels_last


def stepped(net, optimizer, steps=3, changed=None):
    """The optimizer and the weights after some steps. Before the last one the network may change."""
    generator = torch.Generator().manual_seed(1)
    optimizer = make_optimizer(Player("net", net, optimizer), net.parameters())
    for step in range(steps):
        if changed is not None and step == steps - 1:
            changed(net)
        for weight in net.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            if weight.dim() == 4 and weight.is_contiguous(memory_format=LAST):
                weight.grad = weight.grad.to(memory_format=LAST)
        optimizer.step()
    return optimizer, [weight.detach().clone() for weight in net.parameters()]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 5, 3)).double()


def apart(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_the_fused_update_is_torchs_own(kind):
    fused, found = stepped(network(), partial(kind, lr=0.1))
    plain, expected = stepped(network(), partial(kind, lr=0.1, fused=False))
    assert [made.param_groups[0]["fused"] for made in (fused, plain)] == [True, False]
    assert apart(found, expected) < 1e-14


def test_weights_that_torch_would_take_for_contiguous_are_updated_rightly():
    """torch's fused update does not look, as the last line shows."""

    def changed(net):
        net.to(memory_format=LAST)

    _, expected = stepped(network(), partial(Adam, lr=0.1, fused=False), changed=changed)
    made, found = stepped(network(), partial(Adam, lr=0.1), changed=changed)
    assert made.param_groups[0]["fused"] is None and apart(found, expected) < 1e-14
    assert apart(stepped(network(), partial(Adam, lr=0.1, fused=True), changed=changed)[1], expected) > 0.01


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": False}])
def test_what_the_author_chose_stays(settings):
    made, _ = stepped(network(), partial(Adam, lr=0.1, **settings), steps=1)
    assert not made.param_groups[0]["fused"]
    assert {name: made.param_groups[0][name] for name in settings} == settings


def test_other_optimizers_are_left_alone():
    made, _ = stepped(network(), partial(SGD, lr=0.1), steps=1)
    assert made.param_groups[0]["fused"] is None


def test_a_checkpoint_does_not_say_how_this_device_computes_an_update(monkeypatch):
    """An update on a GPU would otherwise be taken for fused, since the checkpoint was written on a CPU."""
    optimizer = Adam(network().parameters())
    names = [str(number) for number in range(4)]
    policy = SimpleNamespace(learners_optimizer=optimizer, groups=[names], storage=SimpleNamespace(owned={}))
    monkeypatch.setattr(player_state, "_stepped", lambda _: names)
    saved = {"state": {}, "param_groups": [{**optimizer.param_groups[0], "params": names, "fused": True, "lr": 0.5}]}
    player_state.load_optimizer_state(policy, saved)
    assert [optimizer.param_groups[0][name] for name in ("fused", "lr")] == [None, 0.5]
