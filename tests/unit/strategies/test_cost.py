"""What training costs: traces, links."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, Adam

from gan import Phase
from strategies.cost.budget import Cost, PhaseCost
from strategies.cost.tracing import FusedAttention, Kind, steps, traces
from strategies.observers import FOREVER, Living
from strategies.policies.amounts import Collective, Group, Held, Moved, moved, readable
from strategies.policies.belongings import belongings_of
from strategies.policies.costs import optimizer_cost
from strategies.policies.policy import Policy
from strategies.world import World
from tests.scenes.optimizers import Informed
from tests.support.composite import Composite, Sized
from tests.support.hard_games import HARD
from tests.support.optimizers import Shampoo
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
        (Group(4, 1), 8, Moved(75, 0)),  # neighbours
        (Group(2, 4), 4, Moved(0, 4 * 50)),  # four copies side by side, each on two nodes
        (Group(2, 2), 4, Moved(50, 0)),  # copies inside of a node
        (Group(1), 4, Moved(0, 0)),
    ],
)
def test_a_ring_sends_its_part_on_each_link(group, local, expected):
    assert moved([Collective("all-gather", 100, group)], local) == expected
    assert moved([Collective("reduce-scatter", 100, group)], local) == expected
    assert moved([Collective("all-reduce", 100, group)], local) == expected * 2


@pytest.mark.parametrize(
    ("amount", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (25 * 2**20, "26.2 MB"), (1.234e9, "1.23 GB"), (1.037e12, "1,037 GB")],
)
def test_amounts_are_readable(amount, said):
    assert readable(amount) == said


# ---- optimizer ----


def with_moments(weights):
    """Of wider weights than a stand-in."""
    optimizer = Adam(weights, lr=0.1)
    for weight in weights:
        optimizer.state[weight] = {"step": 7.0, "exp_avg": torch.ones(100, 100), "exp_avg_sq": torch.ones(100, 100)}
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "state", "elementwise"),
    [
        (partial(Adam, lr=0.1), 2, True),
        (partial(SGD, lr=0.1), 0, True),
        (partial(SGD, lr=0.1, momentum=0.5), 1, True),
        (partial(Adafactor, lr=0.1), 2 / 64, False),
        (with_moments, 2, True),
    ],
)
def test_the_state_is_counted(optimizer, state, elementwise):
    found = optimizer_cost(optimizer)
    assert (found.state, found.elementwise) == (pytest.approx(state), elementwise)


@pytest.mark.parametrize(
    ("game", "states"), [(Informed, {"generator": 4, "judge": 4}), (HARD["Teacher"], {"generator": 2, "teacher": 0})]
)
def test_all_optimizers_of_a_player_are_there_at_once(game, states):
    made = game()
    made.assemble()
    belongings = belongings_of(made.players, made, made.phases)
    for name, state in states.items():
        assert Policy(made.players[name], World(), {}, belongings[name]).optimizer_cost.state == state


def test_adam_needs_memory_for_a_while():
    """On a CPU for one weight at a time, and on a GPU for all of them."""
    found = optimizer_cost(partial(Adam, lr=0.1))
    assert (found.one, found.left) == (2, 1)  # two of one weight, and what is left of the one before
    assert found.on_cpu([100, 10, 50, 50], 1000) == 200
    assert found.on_cpu([100, 90], 1000) == 280
    assert found.on_cpu([100, 90], 20) == 40  # a rank owns a part of one of them
    assert found.all == 1
    assert optimizer_cost(partial(SGD, lr=0.1)).all == 0


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


def test_an_optimizer_may_keep_state_for_no_weight():
    assert optimizer_cost(Shampoo, [(6, 4), (4,)]).all > 0


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

    def seen():
        return [(id(m), type(m), sorted(vars(m)), type(m._parameters), len(m._forward_hooks)) for m in game.modules()]

    before = seen()
    traces(game, single(0), device="cpu")
    assert seen() == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in game.parameters())


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
