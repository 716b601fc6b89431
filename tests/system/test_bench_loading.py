"""The benchmark of loading runs and prints figures."""

import re

import pytest
import torch

from gan.bench import loading


def test_it_prints_a_figure_for_every_step_and_number_of_workers(capsys, monkeypatch):
    monkeypatch.setattr(loading, "WORKERS", (0, 1))
    threads = torch.get_num_threads()
    assert loading.LoadingBenchmark(["--size", "16", "--stored", "64", "--pictures", "9"]).main() == 0
    said = capsys.readouterr().out
    assert "9 pictures, JPEG of 64 px" in said and "to 16 px" in said
    for line in ("decode the picture", "resize the picture, bicubic", "all, with the cut of 286 to 256"):
        milliseconds, rate = re.search(rf"^{line} +([\d.]+) +(\d+)$", said, re.MULTILINE).groups()
        assert float(milliseconds) * int(rate) == pytest.approx(1000, rel=0.2)
    for workers in (0, 1):
        rate, each = re.search(rf"^{workers} workers +[\d.]+ +(\d+) +(\d+)$", said, re.MULTILINE).groups()
        assert int(rate) > 0 and rate == each
    assert len(re.findall(r"^(?:first|second) start +[\d.]+ +\d+$", said, re.MULTILINE)) == 2
    assert torch.get_num_threads() == threads


def test_an_option_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        loading.LoadingBenchmark(["--sise", "16"])
    assert "--sise" in capsys.readouterr().err
