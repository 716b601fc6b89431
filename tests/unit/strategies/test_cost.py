"""What training costs: traces, links."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from strategies.cost.budget import Cost, PhaseCost
from strategies.cost.tracing import FusedAttention, Kind, traces
from strategies.observers import FOREVER, Living
from strategies.policies.amounts import Collective, Group, Held, Moved, bytes_moved
from strategies.policies.memory import optimizer_cost
from tests.support.composite import Sized
from tests.support.hard_games import HARD
from tests.support.parity import single
from tests.support.planned import pictures, small

# ---- amounts ----


def test_the_peak_is_the_phase_that_holds_most_and_a_rare_phase_moves_its_share():
    often, rare = (PhaseCost("a", every, {}, kept, {}, Moved(80, 8)) for every, kept in ((1, 5), (8, 9)))
    cost = Cost({}, Held(), [often, rare])
    assert cost.peak is rare
    assert cost.moved == Moved(90, 9)


@pytest.mark.parametrize(
    ("group", "local", "expected"),
    [
        (Group(4), 4, Moved(75, 0)),  # one node
        (Group(4), 1, Moved(0, 75)),  # four nodes
        (Group(8), 4, Moved(87.5, 87.5)),  # a ring through two nodes leaves each once
        (Group(2, 4), 4, Moved(0, 4 * 50)),  # four copies side by side, each on two nodes
        (Group(2, 2), 4, Moved(50, 0)),  # copies inside of a node
        (Group(1), 4, Moved(0, 0)),
    ],
)
def test_a_ring_sends_its_part_on_each_link(group, local, expected):
    assert bytes_moved([Collective("all-gather", 100, group)], local) == expected
    assert bytes_moved([Collective("reduce-scatter", 100, group)], local) == expected
    assert bytes_moved([Collective("all-reduce", 100, group)], local) == expected * 2


# ---- optimizer ----


@pytest.mark.parametrize(
    "make",
    [
        lambda ws: SGD([{"params": ws[:1], "momentum": 0.0}, {"params": ws[1:]}], lr=0.1, momentum=0.9),
        lambda ws: Adam([{"params": ws[:5]}, {"params": [ws[5]], "lr": 1e-5}]),
        lambda ws: Adam([{"params": [each], "lr": rate} for each, rate in zip(ws, range(1, 7), strict=True)]),
        lambda ws: Adam([each for each in ws if each.ndim == 4]),
        lambda ws: Adam(ws[2:]),
    ],
    ids=["a group by place", "a group by number", "a rate for each", "by dimensions", "not all"],
)
def test_the_state_of_an_optimizer_that_groups_weights_is_that_of_each(make):
    shapes = [(100, 3, 3, 3), (100,), (32, 100, 3, 3), (32,), (10, 32), (10,)]
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = make(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = sum(each.numel() for of in optimizer.state.values() for each in of.values() if torch.is_tensor(each))
    found = optimizer_cost(make, shapes).state * sum(weight.numel() for weight in weights)
    assert found == pytest.approx(kept, abs=len(weights) + 1)  # beside counts of steps


# ---- tracing ----


def traced(game, batch, device, recompute=()):
    """The traces of a game: kinds and memory of all events, by phase."""
    if device == "meta":
        batch = {name: value.to("meta") for name, value in batch.items()}
    with torch.device(device):
        made = game()
    made.assemble()
    found = traces(made, batch, recompute, device)
    memory = {each.phase: np.split(each.activations, 2) for each in found}
    return {
        each.phase: [(e.kind, *m) for e, *m in zip(each.events, *memory[each.phase], strict=True)] for each in found
    }


@pytest.mark.parametrize("game", [*(HARD[name] for name in ("Plain", "Penalty", "TwoForwards", "TwoPhases")), Sized])
def test_without_values_it_is_the_same_as_with(game):
    """Also with micro-batches and gradients of gradients, as Sized has them."""
    with_, without = (traced(game, single(0), device) for device in ("cpu", "meta"))
    end = None if game is Sized else 2  # the highest amount within an event differs in the others
    assert [e[:end] for name in without for e in without[name]] == [e[:end] for name in with_ for e in with_[name]]


def test_recomputing_keeps_less_and_says_when_it_computes_again():
    plain, again = (traced(small, pictures(0), "meta", players)["student"] for players in ((), ("student",)))
    assert Kind.AGAIN not in [kind for kind, *_ in plain]
    assert [kind for kind, *_ in again].count(Kind.AGAIN) == 5  # blocks
    assert max(highest for *_, highest in again) < 0.9 * max(highest for *_, highest in plain)


def alive(living):
    return sum(life.bytes for life in living.lives if life.end == FOREVER)


def test_attention_without_values_keeps_what_the_fused_kernel_keeps():
    def kept(device, mode):
        x = torch.randn(2, 4, 64, 16, device=device, requires_grad=True)
        with Living([x]) as living, mode:
            out = F.scaled_dot_product_attention(x * 1, x * 1, x * 1)
        return alive(living), out.shape

    real, shape = kept("cpu", torch.enable_grad())
    assert kept("meta", FusedAttention()) == (real, shape)
    assert kept("meta", torch.enable_grad())[0] > 1.5 * real  # the control: the matrix of queries and keys


def test_living_memory_is_what_lives_and_has_no_elements_that_are_sparse():
    weight = nn.Parameter(torch.zeros(100, 100, device="meta"))
    with Living([weight]) as living:
        one = weight * 2
        two = one + 1
        assert alive(living) == 2 * weight.nbytes
        view = two[1:]
        del one, two
        assert alive(living) == weight.nbytes  # the view keeps all of it
        del view
        assert (alive(living), living.highest) == (0, 2 * weight.nbytes)
        sparse = torch.eye(3).to_sparse()  # such as a gradient
        living.forget(sparse)
        living.life(sparse).mark = 1
        assert alive(living) == 0
