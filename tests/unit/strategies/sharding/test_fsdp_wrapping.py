"""Units of FSDP2: which parameters are in which, and what a module is while they are sharded and after that."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gan.files.errors import UserError
from strategies.sharding.fsdp_wrapping import wrap


@pytest.fixture
def mesh():
    """A mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.bias = self.one.bias
        self.alone = nn.Linear(3, 1)

    def forward(self, x):
        return self.alone(self.two(self.one(x))) * self.scale


def wrapped(network, mesh, playing=lambda: False, leave=()):
    parameters = {name: each for name, each in network.named_parameters() if name not in leave}
    blocks = [network.one, network.two]
    return wrap(network, blocks, parameters, parameters, lambda _: None, playing, {"mesh": mesh})


def test_a_parameter_of_two_blocks_is_the_roots(mesh):
    units, _ = wrapped(Network(), mesh)
    assert [sorted(unit.everything) for unit in units] == [
        ["alone.bias", "alone.weight", "one.bias", "scale"],
        ["one.weight"],
        ["two.weight"],
    ]
    assert [unit.is_root for unit in units] == [True, False, False]


def test_a_parameter_that_another_player_stores_is_left_alone(mesh):
    network = Network()
    weight = network.two.weight
    units, _ = wrapped(network, mesh, leave=["two.weight"])
    assert "two.weight" not in {name for unit in units for name in unit.everything}
    assert network.two.weight is weight
    assert torch.isfinite(weight).all()


def test_parameters_stay_the_authors_and_their_values_come_and_go(mesh):
    network = Network()
    before, copies = dict(network.named_parameters()), {n: p.detach().clone() for n, p in network.named_parameters()}
    units, _ = wrapped(network, mesh)
    assert all(each is before[name] for name, each in network.named_parameters())
    with pytest.raises(UserError, match="is sharded"):
        network.scale + 1
    for unit in units:
        unit.unshard()
    assert all(torch.equal(each, copies[name]) for name, each in network.named_parameters())
    for unit in units:
        unit.reshard()
    with pytest.raises(UserError, match="is sharded"):
        network.one.bias.sum()


def test_what_is_written_comes_back_and_what_shards_say_counts_more(mesh):
    network = Network()
    (root, *_), _ = wrapped(network, mesh)
    root.unshard()
    with torch.no_grad():
        network.scale.fill_(7)
    root.reshard()
    root.unshard()
    assert network.scale == 7
    root.everything["scale"].shard.fill_(9)
    root.shards_changed(["scale"])
    root.unshard()
    assert network.scale == 9


def test_hooks_gather_only_while_they_are_asked_to(mesh):
    network, playing = Network(), []
    expected = network(torch.ones(1, 3)).detach()
    units, _ = wrapped(network, mesh, playing=lambda: bool(playing))
    with pytest.raises(UserError, match="is sharded"):
        network(torch.ones(1, 3))
    playing.append(True)
    found = network(torch.ones(1, 3))
    assert torch.equal(found, expected)
    assert [unit.unsharded for unit in units] == [True, False, False]


def test_after_the_release_a_module_is_as_it_was(mesh):
    network, fresh = Network(), Network()
    units, hooks = wrapped(network, mesh)
    for unit in units:
        unit.unshard()
        unit.release()
    for hook in hooks:
        hook.remove()
    network.load_state_dict(fresh.state_dict())
    assert torch.equal(network(torch.ones(1, 3)), fresh(torch.ones(1, 3)))
    for own, other in zip(network.modules(), fresh.modules(), strict=True):
        assert type(own) is type(other)
        assert vars(own).keys() == vars(other).keys()
    assert all(not vars(each) for each in network.parameters())


class Recurrent(nn.Module):
    """torch's GRU keeps a list of its parameters beside them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.GRU(3, 3), nn.GRU(3, 3)

    def forward(self, x):
        return self.two(self.one(x)[0])[0]


def test_a_module_that_keeps_its_parameters_in_a_list_too(mesh):
    network = Recurrent()
    expected = network(torch.ones(2, 3)).detach()
    wrapped(network, mesh, playing=lambda: True)
    assert torch.equal(network(torch.ones(2, 3)), expected)
