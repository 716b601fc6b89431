"""What is checked on the rehearsal's devices, in a process that has them: see commands.py."""

import math
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

from gan import making
from gan.bench import speed
from strategies import PhaseStrategy, TorchAccelerator
from strategies.batches import random_state
from strategies.training.assignment import memory
from tests.support import trained_on
from tests.support.hard_games import HARD, One, mlp
from tests.support.parity import EXACT, distance, train, trainer, vectors

FIRST, SECOND = (torch.device("privateuseone", number) for number in range(2))  # their name before they are loaded


def refused(function, *words):
    try:
        function()
    except (RuntimeError, TypeError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("the device has let it pass")


def memory_that_the_cpu_may_not_touch(_):
    here, there, on_cpu = torch.ones(2, 3, device=FIRST), torch.ones(2, 3, device=SECOND), torch.ones(2, 3)
    weight = torch.ones(3, 3, requires_grad=True)
    for mixed in (lambda: here + on_cpu, lambda: on_cpu.add_(here), lambda: nn.functional.linear(here, weight)):
        refused(mixed, "same device", "cpu")
    refused(lambda: here + there, "same device", "rehearsal:1")
    refused(here.numpy, "rehearsal:0")
    assert torch.Generator(SECOND).device == SECOND
    assert torch.equal((here + there.to(FIRST) * torch.tensor(2.0)).cpu(), 3 * on_cpu)
    view = here[:, 1:].t()
    view.mul_(5)
    assert here.tolist() == [[1, 5, 5], [1, 5, 5]] and view._base is here


class Tied(One):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 6, 6)
        self.net[2].weight = self.net[0].weight


def trained(make, accelerator):
    torch.manual_seed(0)
    game = make()
    loader = DataLoader([vectors(step) for step in range(3)], batch_size=None)
    trainer(PhaseStrategy(), 1, 3, accelerator=accelerator).fit(game.double(), loader)
    return game


def trains_as_a_cpu_does(_):
    hardest = ("Micro4", "BatchNormPenalty", "SometimesReached", "Teacher", "Penalty", "OwnMethods", "Groups")
    for name, make in {**{name: HARD[name] for name in hardest}, "tied": Tied}.items():
        one, other = trained(make, "cpu"), trained(make, TorchAccelerator())
        weights = dict(one.named_parameters())
        assert weights.keys() == dict(other.named_parameters()).keys(), name
        for key, weight in other.named_parameters():
            torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-10, msg=f"{name}: {key}")
    assert other.net[0].weight is other.net[2].weight


def making_draws_from_the_device_that_is_named(_):
    module = torch.get_device_module(FIRST)
    module.manual_seed_all(1)
    before = [module.get_rng_state(device) for device in (FIRST, SECOND)]
    with making.drawing_from(7, SECOND):
        drawn = torch.randn(3, device=SECOND)
    with making.drawing_from(7, SECOND):
        assert torch.equal(torch.randn(3, device=SECOND).cpu(), drawn.cpu())
    assert all(map(torch.equal, before, (module.get_rng_state(device) for device in (FIRST, SECOND))))


def random_states_are_those_of_this_ranks_device(_):
    torch.accelerator.set_device_index(SECOND)
    torch.manual_seed(2)
    state = random_state.capture()
    drawn = torch.randn(3, device=SECOND)
    assert random_state.changed(state)
    random_state.restore(state)
    assert not random_state.changed(state)
    assert torch.equal(torch.randn(3, device=SECOND).cpu(), drawn.cpu())
    # A state of another kind of device is none of this one.
    now = random_state.capture()
    random_state.restore({**now, "accelerator": {"cuda": torch.zeros(16, dtype=torch.uint8)}})
    assert not random_state.changed(now)


def its_memory_is_known(_):
    assert memory(SECOND, 2) == torch.accelerator.get_memory_info(SECOND)[0] > math.exp(10)


def what_make_gpu_runs(_):
    """A cell of the matrix, and a speed."""
    with mock.patch.object(trained_on, "ON_GPUS", True):
        there = train(HARD["Plain"], policy="single", steps=3)
    assert distance(there, train(HARD["Plain"], policy="single", steps=3)) < EXACT
    settings = {"batch_size": 4, "faces": 8, "held_out": 2, "size": 16, "width": 2}
    assert speed.measure("r3gan-faces", settings, speed.Way("32-true"), 1)["flops"] > 0
