"""The model of cost says what a rank really holds and moves, within 5 %."""

from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from gan import GanModule, Phase, Player
from tests.support import placed_costs
from tests.support.composite import Sized, SizedTwice
from tests.support.parity import single
from tests.support.planned import BUCKET, STEPS, payload, pictures, planned, small
from tests.support.scales import weighed

WITHIN = 0.05
STAGES = "pipeline+stages:2"
MIX = "student=zero3,teacher=fsdp,*=zero1"
EIGHT = ["ddp", "zero1", "zero2", "zero3", "fsdp", "zero3+whole", "zero3+offload", MIX]
MORE = ["ddp+recompute", "zero2+recompute", "zero3+recompute", "fsdp+recompute", "fsdp+whole", "fsdp+offload"]
DISTILLATION, SIZED = (small, pictures, BUCKET), (Sized, single, 2**18)


def differences(ranks, policy, world, what):
    """By what part planned and measured figures differ, by phase and kind."""
    game, batches, bucket = what
    if world == 1:
        found = [weighed(game, policy, 1, batches, bucket, STEPS)]
    else:
        found = ranks(world).run(weighed, game, policy, world, batches, bucket, STEPS)
    cost = planned(game, policy, world, batches(0), bucket)
    batch = sum(tensor.nbytes for tensor in batches(0).values())
    moved, differs = payload(cost), {}
    # The ranks' loaders hold the global batches of all steps. On a CPU, what is offloaded is in the same memory; its
    # gradients are there in the update only, when the phase has passed its peak.
    beside = STEPS * batch + cost.host.bytes - cost.host.gradients
    between = sum(held.bytes for held in cost.held.values()) + beside
    for number, phase in enumerate(cost.phases):
        phases = [each[number] for each in found]
        assert {each.phase for each in phases} == {phase.phase}
        highest, before = max(each.highest for each in phases), max(each.before for each in phases)
        differs[phase.phase, "peak"] = (phase.bytes + beside - batch / world) / highest - 1
        differs[phase.phase, "between phases"] = (between / before) - 1
        all_moved = sum(max(each.payload.get(kind, 0) for each in phases) for kind in KINDS)
        for kind in KINDS:
            real = max(each.payload.get(kind, 0) for each in phases)
            if real > 0.01 * all_moved or moved[phase.phase].get(kind, 0) > 0.01 * all_moved:
                differs[phase.phase, kind] = moved[phase.phase].get(kind, 0) / max(1, real) - 1
    return differs


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "gather", "scatter")


class Layers(GanModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._network(), self._network()

    def _network(self) -> nn.Module:
        sides = [6, *[16] * 9, 6]
        each = [(nn.Conv1d(*pair, 3, padding=1), nn.LeakyReLU(0.2)) for pair in pairwise(sides)]
        return nn.Sequential(nn.Unflatten(1, (6, 32)), *chain.from_iterable(each), nn.Flatten())

    def configure_players(self):
        yield Player("first", self.first, partial(Adam, lr=1e-3), ema=0.9)
        yield Player("second", self.second, partial(Adam, lr=1e-3))

    def configure_phases(self):
        yield Phase("one", lambda batch: self.second(batch["x"]).square().mean(), "second")
        yield Phase("two", lambda batch: self.second(self.first(batch["x"])).square().mean(), "first")


def rows(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(64, 192, generator=torch.Generator().manual_seed(step))}


class Skip(nn.Module):
    """What goes in comes out too, beside what its inner layer makes of it."""

    def __init__(self, channels: int, inner: nn.Module) -> None:
        super().__init__()
        self.down = nn.Conv1d(channels, 2 * channels, 4, 2, 1)
        self.inner = inner
        self.up = nn.ConvTranspose1d(2 * channels, channels, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.up(self.inner(self.down(x)))], 1)


class Skips(Layers):
    """Two networks whose first half gives the second one all that it makes."""

    def _network(self) -> nn.Module:
        inner = nn.Sequential(Skip(32, nn.Identity()), nn.Conv1d(64, 32, 3, padding=1))
        ends = nn.Conv1d(6, 16, 3, padding=1), nn.Conv1d(32, 6, 3, padding=1)
        return nn.Sequential(nn.Unflatten(1, (6, 32)), ends[0], Skip(16, inner), ends[1], nn.Flatten())


PENALISED, TWICE, LAYERS, SKIPS = (SIZED, (SizedTwice, single, 2**18), (Layers, rows, 2**18), (Skips, rows, 2**18))
OF_SIZED = [*EIGHT[:-1], "first=zero3,*=zero1"]
PLANNED = {  # and the policies and ranks; a pipeline's rank has the activations of its layers, of all ranks' samples
    "a distillation": (
        DISTILLATION,
        [(policy, world) for world in (2, 4) for policy in EIGHT]
        + [(policy, 2) for policy in MORE]
        + [(policy, 1) for policy in ("single", "zero3+offload", MIX)],
    ),
    "a gradient penalty and micro-batches": (PENALISED, [(policy, 2) for policy in OF_SIZED]),
    "a bucket for each weight": ((Sized, single, 2**12), [("zero3", 2), ("fsdp", 2), ("zero2", 2)]),
    "an optimizer for a phase": (TWICE, [(policy, 2) for policy in OF_SIZED]),
    "layers": (LAYERS, [("pipeline", 2), ("pipeline", 4), (STAGES, 4)]),
    "skips": (SKIPS, [("pipeline", 2), ("pipeline+chunks:1", 2), ("pipeline+chunks:8", 2)]),
}


@pytest.mark.parametrize(
    ("name", "policy", "world"),
    [
        pytest.param(name, *how, marks=[pytest.mark.slow] * ((name, *how) != ("a bucket for each weight", "zero3", 2)))
        for name, (_, hows) in PLANNED.items()
        for how in hows
    ],
)
def test_memory_and_bytes_are_as_planned(name, policy, world, ranks):
    found = differences(ranks, policy, world, PLANNED[name][0])
    print(f"\n{world} {policy:36}", *(f"{' '.join(key)} {100 * by:+.1f} %" for key, by in found.items()), sep=" | ")
    assert {key: by for key, by in found.items() if abs(by) > WITHIN} == {}


def test_on_one_rank_all_policies_do_the_same():
    alone = planned(Sized, "single", 1, single(0), 2**18)
    for policy in EIGHT[:5]:
        assert planned(Sized, policy, 1, single(0), 2**18) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "ranks"),
    [("teacher=zero3@1-2,*=ddp", 3), ("teacher=zero3@2,*=zero1@0-1", 3), ("teacher=ddp@1,*=ddp", 2)],
)
def test_ranks_that_serve_a_player_are_planned_too(policy, ranks, tmp_path):
    """One of them may answer two ranks; and it shares the weights, or has all of them."""
    file = tmp_path / "teacher.safetensors"
    placed_costs.write(file)
    training, serving = placed_costs.planned(file, policy, ranks)
    trained, served = placed_costs.measured(file, policy, ranks)
    for phase, found in zip(training.phases, zip(*trained, strict=True), strict=True):
        assert phase.bytes == pytest.approx(max(each.highest for each in found), rel=WITHIN)
    (cost,) = serving.values()
    for found in served:
        assert cost.peak.bytes == pytest.approx(found["highest"], rel=0.001)
        gathered = placed_costs.STEPS * sum(moved.get("all-gather", 0) for moved in payload(cost).values())
        assert found["payload"].get("all-gather", 0) == gathered
    # The control: if the ranks that train had the teacher, they would need more.
    policy = policy.rpartition("=")[2].partition("@")[0]
    alike = planned(partial(placed_costs.taught, file), policy, len(trained), pictures(0), BUCKET)
    assert alike.peak.bytes > (1 + 2 * WITHIN) * training.peak.bytes
