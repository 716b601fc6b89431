"""The benchmark of saving runs and prints figures."""

import re

import pytest

from gan.bench import saving
from gan.bench.saving import SavingBenchmark


def test_it_prints_what_each_kind_of_save_costs(capsys, tmp_path):
    options = "--megabytes", "5", "--steps", "2", "--rounds", "2", "--folder", str(tmp_path)
    assert SavingBenchmark(options).main() == 0
    said = capsys.readouterr().out
    assert re.search(r"^5 MB of state, zero3 on 2 ranks, \d+ ms a step$", said, re.MULTILINE)
    row = r"^{} +([\d.]+) +([\d.]+) +-?[\d.]+ +-?[\d.]+$"
    rows = [re.search(row.format(kind), said, re.MULTILINE).groups() for kind in ("at once", "in the background")]
    (at_once, one), (background, ratio) = (map(float, row) for row in rows)
    assert min(at_once, background) > 0 and one == 1
    assert ratio == pytest.approx(background / at_once, rel=0.3)
    assert list(tmp_path.iterdir()) == []


def test_windows_are_counted_to_their_kind():
    calls = {"without": [0.0] * 3, "at once": [0.5, 0.7, 0.6], "in the background": [0.2, 0.1, 0.3]}
    windows = {"without": [2.0, 1.0, 9.0], "at once": [2.5, 2.6, 2.7], "in the background": [2.0, 1.9, 2.1]}
    figures = saving.costs(calls, windows, steps=5)
    assert figures["at once"] == pytest.approx({"the call, s": 0.5, "all of it, s": 1.5, "step": 0.2})
    assert figures["in the background"] == pytest.approx({"the call, s": 0.1, "all of it, s": 0.9, "step": 0.2})
