"""On an accelerator the faster path is measured once, and all ranks and resumed runs take the same one."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from nets.sean.ace import ACE
from nets.sean.generator import SeanGenerator
from nets.sean.normconv import Settings
from nets.sean.paths import TURNS, choose_path
from tests.unit.nets.sean import test_normconv as layers


def generator(recompute=False):
    return SeanGenerator(labels=3, style=4, width=2, hidden=4, upsamplings=2, recompute=recompute)


def chosen(network, times=()):
    """The path that a clock with these readings chooses."""
    with mock.patch("nets.sean.paths.now", side_effect=times):
        line = choose_path(network, (2, 8, 8), torch.device("cpu"), nullcontext)
    return line, {each.plain for each in network.modules() if isinstance(each, ACE)}


def readings(one, plain):
    """A clock's, where a turn of each takes so long; the first one takes longer."""
    each = [(0.0, 9.0), *[(0.0, one)] * (TURNS - 1), (0.0, 9.0), *[(0.0, plain)] * (TURNS - 1)]
    return [time for turn in each for time in turn]


@pytest.mark.parametrize(("one", "plain"), [(0.5, 0.25), (0.25, 0.5), (0.25, 0.25)])
def test_the_faster_one_is_taken_by_all_layers_and_said(one, plain):
    line, paths = chosen(generator(), readings(one, plain))
    assert paths == {plain < one}
    assert f"{1000 * one:.3g} ms as one, {1000 * plain:.3g} ms by torch's own" in line
    assert line.startswith("SEAN's layers compute by " + ("torch's own operations" if plain < one else "one operation"))


def test_it_is_measured_once():
    network = generator()
    chosen(network, readings(0.5, 0.25))
    assert chosen(network) == ("", {True})


def test_nothing_is_measured_where_memory_counts():
    assert chosen(generator(recompute=True)) == ("", {None})


@layers.WAYS
@layers.MODES
def test_both_paths_are_the_same_with_running_statistics(tables, training):
    found = []
    for plain in (False, True):
        given, parts = layers.settings_of(tables, training), layers.tensors(tables)
        settings = Settings(given.norm, training, given.pixels, 0.2, 1, keep=True, plain=plain)
        out = layers.norm_conv(settings, *parts)
        grads = torch.autograd.grad(out.square().sum(), layers.learning(parts))
        found.append([out, *grads, *given.norm.state_dict().values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
