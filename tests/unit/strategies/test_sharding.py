"""Buckets and shards."""

import copy
import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gan.files.errors import UserError
from strategies.sharding.bucket import Bucket, Sharing
from strategies.sharding.resharded_parameter import end_graphs, forget_ended, hide, version_of
from strategies.sharding.storage import deal
from tests.scenes.writing import WRITES, write

# ---- bucket ----


class Done:
    def wait(self):
        pass


@pytest.mark.parametrize("way", WRITES)
def test_what_was_written_stays_where_the_whole_weights_go(way):
    """In a bucket of the second of two ranks, which owns two elements of the weight and the bias."""

    def gather(whole, shard, **_):
        whole.copy_(torch.cat([shard, shard]))
        return Done()

    net = nn.Linear(3, 2)
    net.load_state_dict({"weight": torch.full((2, 3), 0.1), "bias": torch.full((2,), 0.2)})
    made = Bucket(dict(net.named_parameters()), Sharing(2, 1, None, keep=False))
    with mock.patch.object(dist, "all_gather_into_tensor", gather):
        made.unshard()
        write(way, net.weight, torch.full((2, 3), 5.0))
        made.reshard()
    assert made.pieces["weight"].tolist() == [5.0] * 2
    assert made.pieces["bias"].tolist() == [pytest.approx(0.2)] * 2


# ---- resharded parameter ----


@pytest.fixture
def net():
    net = nn.Linear(3, 2)
    hide(net.weight, torch.full((), torch.nan))
    return net


READS = {
    "a forward": lambda net: net(torch.ones(1, 3)),
    "a state dict": lambda net: net.state_dict(),
    "saving a state dict": lambda net: torch.save(net.state_dict(keep_vars=True), io.BytesIO()),
    "saving it": lambda net: torch.save(net.weight, io.BytesIO()),
    "a deep copy": copy.deepcopy,
    "data": lambda net: net.weight.data,
    "arithmetic": lambda net: net.weight + 1,
    "numpy": lambda net: net.weight.numpy(),
    "other memory": lambda net: setattr(net.weight, "data", torch.zeros(2, 3)),
    "writing": lambda net: nn.init.zeros_(net.weight),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_its_values_cannot_be_read_or_written(read, net):
    with pytest.raises(UserError) as refused:
        read(net)
    assert "of shape (2, 3) is sharded" in str(refused.value)
    assert "`with trainer.strategy.gathered():`, on all ranks" in str(refused.value)
    assert "write them inside gathered(write=True)" in str(refused.value)


def test_what_needs_no_values_is_answered(net):
    weight = net.weight
    assert (weight.shape, weight.numel(), weight.dtype, weight.device.type) == ((2, 3), 6, torch.float32, "cpu")
    assert weight.requires_grad and weight.grad is None and weight.is_leaf
    assert sum(p.numel() for p in net.parameters()) == 8
    assert list(net.state_dict(keep_vars=True)) == ["weight", "bias"]
    weight.register_post_accumulate_grad_hook(lambda _: None)
    weight.requires_grad_(False)
    assert isinstance(weight, nn.Parameter) and {weight: 1}[weight] == 1
    assert repr(weight) == "<sharded parameter of shape (2, 3)>"


def test_a_write_counts_and_an_ended_graph_does_not():
    weight = nn.Parameter(torch.ones(3))
    loss, before = weight.square().sum(), version_of(weight)
    end_graphs([weight])
    assert version_of(weight) == before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad():
        weight.add_(1)
    assert version_of(weight) == before + 1
    forget_ended(weight)
    assert not vars(weight)  # as it was
    with torch.inference_mode():
        assert version_of(torch.ones(3)) == 0


@given(sizes=st.dictionaries(st.text("abc", min_size=1), st.integers(0, 1000), max_size=60), ranks=st.integers(1, 9))
@example(sizes={"small": 1, "huge": 100, "other": 2}, ranks=2)
def test_every_weight_has_one_owner_and_ranks_own_about_as_much_as_each_other(sizes, ranks):
    dealt = deal(sizes, ranks)
    assert len(dealt) == ranks and sorted(name for names in dealt for name in names) == sorted(sizes)
    loads = [sum(sizes[name] for name in names) for names in dealt]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    assert "huge" not in sizes or dealt == [{"huge"}, {"small", "other"}]
