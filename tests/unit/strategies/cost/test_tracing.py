"""A trace without values says what the same phase does with values."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gan import Phase
from strategies.cost import trace as kinds
from strategies.cost.tracing import FusedAttention, steps, traces
from strategies.living import Living
from tests.support.composite import Composite, Sized
from tests.support.hard_games import HARD
from tests.support.parity import single
from tests.support.planned import pictures, small


def traced(game, batch, device, recompute=()):
    """The traces of a game: kinds and memory of all events, by phase."""
    if device == "meta":
        batch = {name: value.to("meta") for name, value in batch.items()}
    with torch.device(device):
        made = game()
    made.assemble()
    found = traces(made, batch, recompute, device)
    return {each.phase: [(e.kind, e.alive, e.highest) for e in each.events] for each in found}


@pytest.mark.parametrize("game", ["Plain", "Penalty", "TwoForwards", "TwoPhases"])
def test_without_values_it_is_the_same_as_with(game):
    with_ = traced(HARD[game], single(0), "cpu")
    without = traced(HARD[game], single(0), "meta")
    assert [(e[0], e[1]) for phase in without for e in without[phase]] == [
        (e[0], e[1]) for phase in with_ for e in with_[phase]
    ]


def test_so_it_is_with_micro_batches_and_gradients_of_gradients():
    assert traced(Sized, single(0), "meta") == traced(Sized, single(0), "cpu")


def test_recomputing_keeps_less_and_says_when_it_computes_again():
    plain, again = (traced(small, pictures(0), "meta", players)["student"] for players in ((), ("student",)))
    assert kinds.AGAIN not in [kind for kind, *_ in plain]
    assert [kind for kind, *_ in again].count(kinds.AGAIN) == 5  # blocks
    assert max(highest for *_, highest in again) < 0.9 * max(highest for *_, highest in plain)


def test_a_game_whose_shapes_depend_on_values_cannot_be_traced_without():
    with pytest.raises(RuntimeError):
        traced(Composite, single(0), "meta")
    assert list(traced(Composite, single(0), "cpu")) == ["critic", "discriminator", "generator", "rarely"]


def test_phases_are_played_with_those_of_the_same_steps():
    def phase(name, start=0, until=None):
        return Phase(name, lambda batch: batch, "net", start=start, until=until, every=3)

    first, later, both = phase("first", until=10), phase("later", start=10), phase("both")
    assert steps([first, later, both]) == {0: [first, both], 10: [later, both]}


def test_it_leaves_the_game_as_it_was():
    game = Sized()
    game.assemble()
    before = [(id(m), type(m), sorted(vars(m)), type(m._parameters), len(m._forward_hooks)) for m in game.modules()]
    traces(game, single(0), device="cpu")
    after = [(id(m), type(m), sorted(vars(m)), type(m._parameters), len(m._forward_hooks)) for m in game.modules()]
    assert after == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in game.parameters())


def test_attention_without_values_keeps_what_the_fused_kernel_keeps():
    def kept(device, mode):
        x = torch.randn(2, 4, 64, 16, device=device, requires_grad=True)
        with Living([x]) as living, mode:
            out = F.scaled_dot_product_attention(x * 1, x * 1, x * 1)
        return living.here.alive, out.shape

    real, shape = kept("cpu", torch.enable_grad())
    assert kept("meta", FusedAttention()) == (real, shape)
    assert kept("meta", torch.enable_grad())[0] > 1.5 * real  # the control: the matrix of queries and keys


def test_living_memory_is_what_lives():
    weight = nn.Parameter(torch.zeros(100, 100, device="meta"))
    with Living([weight]) as living:
        one = weight * 2
        two = one + 1
        assert living.here.alive == 2 * weight.nbytes
        view = two[1:]
        del one, two
        assert living.here.alive == weight.nbytes  # the view keeps all of it
        del view
        assert living.here.alive == 0
        assert living.here.highest == 2 * weight.nbytes
