"""A bucket that FSDP2 stores and gathers: the author's weights stay, and their values come and go."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gan.files.errors import UserError
from strategies.sharding.bucket import Sharing
from strategies.sharding.fsdp_unit import Unit


@pytest.fixture
def unit():
    """A layer with a scalar and another memory format, in a world of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    layer.scale = nn.Parameter(torch.tensor(2.0))
    group = dist.group.WORLD
    made = Unit(dict(layer.named_parameters()), Sharing(1, 0, group, keep=False), DeviceMesh.from_group(group, "cpu"))
    yield layer, made
    made.release()
    dist.destroy_process_group()


def test_weights_stay_the_authors_and_their_values_come_and_go(unit):
    layer, made = unit
    torch.manual_seed(0)
    fresh = nn.Conv2d(2, 3, 2)
    before = list(layer.parameters())
    with pytest.raises(UserError, match="is sharded"):
        layer.scale + 1
    for _ in range(2):
        made.unshard()
        assert torch.equal(layer.weight, fresh.weight) and torch.equal(layer.bias, fresh.bias) and layer.scale == 2
        made.reshard()
        assert all(one is other for one, other in zip(before, layer.parameters(), strict=True))
        with pytest.raises(UserError, match="is sharded"):
            layer.bias.sum()


def test_memory_is_fsdp2s_in_a_phase_and_free_after_it(unit):
    _, made = unit
    made.unshard()
    memory = made.whole.untyped_storage()
    made.reshard()
    assert memory.nbytes() == 0


def test_between_phases_memory_may_have_a_numpy_view(unit):
    """Which FSDP2 could not free."""
    layer, made = unit
    made.unshard(torch.float32)
    numbers = layer.scale.detach().numpy()
    made.reshard()
    assert numbers == 2


def test_what_is_written_comes_back_and_a_newer_shard_counts_more(unit):
    layer, made = unit
    made.unshard()
    with torch.no_grad():
        layer.scale.fill_(7)
    made.reshard()
    made.unshard()
    assert layer.scale == 7
    made.pieces["scale"].data.fill_(9)
    made.shard_changed()
    made.unshard()
    assert layer.scale == 9
