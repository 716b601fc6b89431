"""What is written into whole weights gets into the shard, wherever and in whatever dtype the shard is."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from strategies.sharding.bucket import Bucket, Sharing
from tests.support.writing_games import WRITES, write

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class Done:
    def wait(self):
        pass


@pytest.fixture(autouse=True)
def the_second_of_two_ranks():
    """A gather fills both halves with this rank's shard."""

    def gather(whole, shard, **_):
        whole.copy_(torch.cat([shard, shard]))
        return Done()

    with mock.patch.object(dist, "all_gather_into_tensor", gather):
        yield


def bucket(device, **settings):
    net = nn.Linear(3, 2, device=device)
    with torch.no_grad():
        net.weight.fill_(0.1)
        net.bias.fill_(0.2)
    return net, Bucket(dict(net.named_parameters()), Sharing(2, 1, None, **settings))


def ours(made):
    """The elements of the weight and of the bias that the second rank owns: two and two."""
    return made.pieces["weight"].tolist(), made.pieces["bias"].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["copy_", "data="])
@pytest.mark.parametrize("settings", [{}, {"keep": False}, {"home": CPU}, {"keep": False, "home": CPU}], ids=str)
def test_a_write_gets_into_the_shard(settings, way, device):
    net, made = bucket(device, **settings)
    for number in (1.0, 2.0):
        made.unshard()
        write(way, net.weight, torch.full((2, 3), number, device=device))
        made.keep_writes()
        assert ours(made) == ([number] * 2, [pytest.approx(0.2)] * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_where_nothing_was_written_the_shard_keeps_what_it_has(device):
    """Also where the whole weights are rounded, or older."""
    for settings in ({"compute_dtype": torch.bfloat16}, {"compute_dtype": torch.bfloat16, "home": CPU}):
        net, made = bucket(device, **settings)
        made.unshard()
        with torch.no_grad():
            net.bias[1] = 3
        made.keep_writes()
        weight, bias = ours(made)
        assert weight == [pytest.approx(0.1, abs=1e-8)] * 2
        assert bias[1] == 3.0
        rounded = device == "cuda" and "home" in settings  # what was written decides for the whole bucket there
        assert rounded or bias[0] == pytest.approx(0.2, abs=1e-8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_is_copied_from_the_gpu_for_nothing():
    _, made = bucket("cuda", home=CPU)
    made.shard.zero_()  # so that a copy would be seen
    made.keep_writes()
    assert ours(made) == ([0.0] * 2, [0.0] * 2)


def test_a_write_changes_the_version_of_its_weight_only():
    net, made = bucket("cpu", keep=False)
    made.unshard()
    before = made.version_at(0), made.version_at(7)
    with torch.no_grad():
        net.bias.fill_(1)
    number = made.starts["bias"]
    assert made.version_at(number) == before[number > 0] + 1
    assert made.version_at(made.starts["weight"]) == before[0]
    made.shard_changed()
    assert made.version_at(made.starts["weight"]) == before[0] + 1


@pytest.mark.parametrize("way", WRITES)
def test_the_newer_shard_wins_where_it_has_changed(way):
    net, made = bucket("cpu", keep=False)
    made.unshard()
    write(way, net.weight, torch.full((2, 3), 5.0))
    made.shard_changed()
    assert ours(made) == ([pytest.approx(0.1)] * 2, [pytest.approx(0.2)] * 2)
