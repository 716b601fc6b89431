"""The benchmark of SEAN's generator: its table, its masks, and that it counts bytes as it says."""

import re

import pytest
import torch

from gan.bench import sean
from gan.bench.sean import Kept
from gan.errors import UserError
from nets.sean.generator import SeanGenerator

TINY = ["--size", "32", "--batches", "2", "--repeats", "1", "--width", "2", "--hidden", "3", "--style", "4"]


@pytest.mark.slow
def test_every_kind_of_mask_is_painted_in_every_way(capsys):
    assert sean.main(TINY) == 0
    said = capsys.readouterr().out
    row = r"^{} +2  {} +([\d.]+) +([\d.]+) +(\d+) +([\d.]+) +(\S+)$"
    for kind in sean.MASKS:
        for way in ("the plain reference", "ours", "ours, nothing recomputed"):
            seconds, _, _, share, apart = re.search(row.format(kind, way), said, re.MULTILINE).groups()
            assert float(seconds) >= 0
            assert float(apart) < 1e-4
            assert way != "the plain reference" or float(share) == 1
        ratio = float(re.search(row.format(kind, "the plain reference"), said, re.MULTILINE)[2])
        assert ratio == 1


@pytest.mark.parametrize("kind", sean.MASKS)
def test_what_is_kept_is_at_most_half(kind):
    """Bytes do not depend on the machine. It has a quarter of the published widths, half the size and two pictures."""
    torch.manual_seed(0)
    generator = SeanGenerator(19, 128, width=16, hidden=32)
    planes, codes = sean.masks(kind, 2, 128, 19), torch.randn(2, 19, 128)
    kept = {}
    for way in sean.ways(generator, 128, torch.device("cpu")):
        with Kept(way.weights) as count:
            way.paint(planes, codes)
        kept[way.title] = count.bytes
    assert kept["ours"] <= 0.5 * kept["the plain reference"]
    assert kept["ours"] < kept["ours, nothing recomputed"] < kept["the plain reference"]


def test_the_masks_are_what_they_are_called():
    changes = {}
    for kind in sean.MASKS:
        planes = sean.masks(kind, 2, 64, 19)
        assert planes.shape == (2, 19, 64, 64)
        assert (planes.sum(1) == 1).all()
        label = planes.argmax(1)
        changes[kind] = (label[:, :, 1:] != label[:, :, :-1]).float().mean().item()
    assert changes["blocks"] == pytest.approx(3 / 63 * 18 / 19, abs=0.02)
    assert changes["random"] == pytest.approx(18 / 19, abs=0.02)
    assert 0 < changes["faces"] < 0.2


def test_memory_is_counted_once_and_weights_not_at_all():
    x, weight = torch.randn(10, requires_grad=True), torch.randn(10, requires_grad=True)
    with Kept([weight]) as count:
        y = x * weight
        _ = y * y, y[:3] * weight[:3], y.exp()
    assert count.bytes == 3 * 10 * 4  # x, y, and exp's own result


def test_drawn_faces_have_labels_of_their_own():
    with pytest.raises(UserError, match="the drawn faces have 19 labels; type --masks blocks random"):
        sean.main([*TINY, "--labels", "5"])
