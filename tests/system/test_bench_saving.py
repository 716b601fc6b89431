"""The benchmark of saving runs and prints figures."""

import re

import pytest

from gan.bench import saving


def test_it_prints_what_each_kind_of_save_costs(capsys, tmp_path):
    options = "--megabytes", "5", "--steps", "2", "--rounds", "2", "--folder", str(tmp_path)
    assert saving.main(list(options)) == 0
    said = capsys.readouterr().out
    assert re.search(r"^5 MB of state, zero3 on 2 ranks, \d+ ms a step$", said, re.MULTILINE)
    calls = [
        float(re.search(rf"^{kind} +([\d.]+) s +-?[\d.]+ s$", said, re.MULTILINE)[1])
        for kind in ("at once", "in the background")
    ]
    assert min(calls) > 0
    ratio = re.search(r"^of that at once +([\d.]+) +-?[\d.]+$", said, re.MULTILINE)[1]
    assert float(ratio) == pytest.approx(calls[1] / calls[0], rel=0.3)
    assert list(tmp_path.iterdir()) == []


def test_windows_are_counted_to_their_kind():
    found = {"without": ([0.0] * 3, [2.0, 1.0, 9.0]), "at once": ([0.5, 0.7, 0.6], [2.5, 2.6, 2.7])}
    assert saving.costs(found, "at once") == pytest.approx((0.5, 1.5))
