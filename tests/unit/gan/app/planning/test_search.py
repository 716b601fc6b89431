"""What the search takes, and in which order."""

from functools import cache, partial

import torch
from torch import nn
from torch.optim import Adafactor, Adam

from gan import GanModule, Phase, Player
from gan.app.planning.planned import as_typed, search
from strategies.cost.budget import Budget
from strategies.cost.tracing import traces
from strategies.policies import POLICIES
from strategies.policies.choice import Choice, choices
from strategies.world import World

WIDTH = 2048


class Two(GanModule):
    """A learner of some size, with activations, and a frozen judge."""

    optimizer = Adam

    def __init__(self):
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.painter, self.judge = nn.Sequential(*layers), nn.Linear(WIDTH, 1)

    def configure_players(self):
        yield Player("painter", self.painter, partial(self.optimizer, lr=1e-3))
        yield Player("judge", self.judge)

    def configure_phases(self):
        yield Phase("paint", lambda batch: self.judge(self.painter(batch)).mean(), "painter")


class Whole(Two):
    optimizer = Adafactor


@cache
def budget(game=Two, ranks=8, local=4, rows=2048):
    with torch.device("meta"):
        made, batch = game(), torch.empty(rows, WIDTH)
    made.assemble()
    world = World(ranks, 0, torch.device("cuda"), local)
    return Budget(made, world, lambda recompute: traces(made, batch, recompute))


def needs(made, text):
    return made.cost(dict.fromkeys(("painter", "judge"), choices(text, POLICIES)["*"])).peak.bytes


def test_what_fits_moves_least():
    made = budget()
    found = search(made, 1e15)
    assert found.fits
    assert as_typed(found.chosen) in ("judge=ddp,*=zero2+hybrid", "painter=zero2+hybrid,*=ddp")
    for text in ("ddp", "zero1", "zero2", "zero3", "zero3+hybrid"):
        other = made.cost(dict.fromkeys(("painter", "judge"), choices(text, POLICIES)["*"]))
        assert (found.cost.moved.between, found.cost.moved.within) <= (other.moved.between, other.moved.within)


def test_less_memory_moves_more_and_what_is_found_fits():
    made, before = budget(), (0.0, 0.0)
    least = search(made, 1.0).cost.peak.bytes
    for part in (1.0, 0.7, 0.5, 0.3):
        usable = least + part * (needs(made, "ddp") - least)
        found = search(made, usable)
        assert found.fits
        assert found.cost.peak.bytes <= usable
        assert before <= (found.cost.moved.between, found.cost.moved.within)
        before = found.cost.moved.between, found.cost.moved.within


def test_recomputing_comes_before_more_bytes_and_offloading_last():
    made = budget(ranks=4)
    assert as_typed(search(made, needs(made, "ddp") - 1).chosen) == "judge=ddp,*=ddp+recompute"
    least = made.cost({"painter": choices("zero3+recompute", POLICIES)["*"], "judge": Choice("zero3")})
    assert "offload" in as_typed(search(made, 0.99 * least.peak.bytes).chosen)


def test_where_nothing_fits_it_says_what_needs_least():
    found = search(budget(), 1.0)
    assert not found.fits
    assert "recompute" in as_typed(found.chosen)
    assert found.cost.peak.bytes <= needs(budget(), "zero3+offload")
    assert search(budget(Whole), 1.0).chosen["painter"].policy == "ddp"  # which looks at whole weights
