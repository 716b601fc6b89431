"""The benchmark of SEAN: its tables, its masks, and that it counts bytes as it says."""

import re

import pytest
import torch

from gan.bench import sean
from gan.bench.sean import SeanBenchmark, keeping
from gan.files.errors import UserError

TINY = ["--size", "32", "--batches", "2", "--repeats", "1", "--width", "2", "--hidden", "3", "--style", "4"]


@pytest.mark.slow
def test_every_kind_of_mask_is_painted_in_every_way(capsys):
    assert SeanBenchmark(TINY).main() == 0
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", sean.MASKS)
def test_what_is_kept_is_at_most_half(kind):
    """Bytes do not depend on the machine. It has a quarter of the published widths, half the size and two pictures."""
    sizes = {"size": 128, "labels": 19, "width": 16, "hidden": 32, "style": 128}
    planes, codes = sean.masks_of(kind, 2, 128, 19), torch.randn(2, 19, 128)
    kept = {}
    for way in ("the plain reference", "ours", "ours, nothing recomputed"):
        net = sean.painter(way, sizes, torch.device("cpu"))
        with keeping(net.parameters()) as count:
            net(planes, codes)
        kept[way] = sum(count.values())
    assert kept["ours"] <= 0.5 * kept["the plain reference"]
    assert kept["ours"] < kept["ours, nothing recomputed"] < kept["the plain reference"]


@pytest.mark.slow
def test_the_whole_step_is_measured_in_both_ways(capsys):
    """In processes of their own, from the same weights: their first losses are the same."""
    sizes = ["--size", "64", "--batches", "1", "--width", "4", "--hidden", "8", "--style", "16"]
    assert SeanBenchmark(["--whole", "--repeats", "1", *sizes]).main() == 0
    said = capsys.readouterr().out
    assert re.search(r"whole step at 64 px, on \d+ CPU threads; a plain convolution has \d+ GFLOP/s", said)
    rows = [re.split("  +", line) for line in said.splitlines() if line.startswith("faces  ")]
    assert [row[:3] for row in rows] == [["faces", "1", "the plain reference"], ["faces", "1", "ours"]]
    for row in rows:
        seconds, generator, discriminator = map(float, row[3:6])
        assert seconds == pytest.approx(generator + discriminator, abs=0.011)
        assert float(row[-1]) < 1e-5
    reference, ours = rows
    assert (reference[6], reference[8], reference[10]) == ("1.00", "1.00", "1.00")
    assert float(ours[8]) < 0.9  # what is kept
    assert re.fullmatch(r"\d+%", ours[11])


@pytest.mark.slow
def test_without_a_checkout_the_reference_is_named_and_ours_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sean, "REFERENCE", tmp_path / "sean_reference.py")
    monkeypatch.setattr(sean, "in_world", lambda function, *args, device: [function(*args)])
    monkeypatch.setattr(sean, "keep_freed_memory", lambda: True)
    assert SeanBenchmark([*TINY, "--masks", "blocks"]).main() == 0
    said = capsys.readouterr().out
    assert "sean_reference.py, which only a checkout of this project has" in said
    assert re.search(r"^blocks +2  the plain reference +see \(1\)$", said, re.MULTILINE)
    assert re.search(r"^blocks +2  ours +[\d.]+ +\d+$", said, re.MULTILINE)  # seconds, and what it keeps


def test_what_cannot_be_measured_is_refused(capsys):
    for words, said in (
        ("--labels 5", "the drawn faces have 19 labels; type --masks blocks random"),
        ("--whole --labels 5", "the drawn faces have 19 labels; leave out --labels"),
        ("--whole --masks blocks", "--whole trains on drawn faces; leave out --masks blocks"),
    ):
        with pytest.raises(UserError, match=said):
            SeanBenchmark(words.split())
    for option in ("--size", "--batches", "--repeats", "--width"):
        with pytest.raises(SystemExit):
            SeanBenchmark([option, "0"])
        assert f"error: {option} 0: type a whole number above 0" in capsys.readouterr().err
