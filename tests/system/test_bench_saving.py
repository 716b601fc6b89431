"""The benchmark of saving runs and prints figures."""

import pytest

from gan.bench import saving
from gan.bench.saving import SavingBenchmark


def test_it_prints_what_each_kind_of_save_costs(capsys, tmp_path):
    options = "--megabytes", "5", "--steps", "2", "--rounds", "2", "--folder", str(tmp_path)
    assert SavingBenchmark(options).main() == 0
    said = capsys.readouterr().out.splitlines()
    assert "5 MB of state on 2 ranks" in said
    assert said[-2].split("  ")[0] == "policy"
    policy, step, *figures = said[-1].split()
    calls, whole, ratios = (list(map(float, figures[number : number + 2])) for number in (0, 2, 4))
    assert policy == "zero3" and float(step) > 0 and min(calls) > 0 and len(whole) == 2
    assert ratios[0] == pytest.approx(calls[1] / calls[0], rel=0.3)
    assert list(tmp_path.iterdir()) == []


def test_windows_are_counted_to_their_kind():
    calls = {"without": [0.0] * 3, "at once": [0.5, 0.7, 0.6], "in the background": [0.2, 0.1, 0.3]}
    windows = {"without": [2.0, 1.0, 9.0], "at once": [2.5, 2.6, 2.7], "in the background": [2.0, 1.9, 2.1]}
    figures = saving.costs(calls, windows, steps=5)
    assert figures["ms a step"] == 0.2
    assert (figures["call at once, s"], figures["all at once, s"]) == pytest.approx((0.5, 1.5))
    assert (figures["call, of it"], figures["all, of it"]) == pytest.approx((0.2, 0.6))
