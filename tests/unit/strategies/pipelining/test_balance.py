"""Where an even cut would be, by the time that layers take."""

from itertools import combinations, pairwise

import pytest

from strategies.pipelining.cutting import advise, share_out


def test_the_slowest_stage_is_as_fast_as_can_be():
    sizes = [0.7, 0.1, 0.1, 0.9, 0.2, 0.4, 0.05, 0.3]
    for stages in range(1, len(sizes) + 1):
        found = share_out(sizes, stages)
        assert found == sorted(found) and set(found) == set(range(stages))
        slowest = max(sum(size for size, its in zip(sizes, found, strict=True) if its == s) for s in range(stages))
        cuts = combinations(range(1, len(sizes)), stages - 1)
        every = ([0, *cut, len(sizes)] for cut in cuts)
        best = min(max(sum(sizes[a:b]) for a, b in pairwise(cut)) for cut in every)
        assert slowest == pytest.approx(best)


def test_it_says_what_to_type():
    stage_of = {"a": 0, "b": 0, "c": 0, "d": 1}
    said = advise("generator", stage_of, {"a": 0.004, "b": 0.003, "c": 0.004, "d": 0.001})
    assert "takes 11, 1 ms a chunk" in said and "with 7, 5 ms" in said
    assert said.endswith("Player('generator', ..., blocks=['a', 'c'])")


@pytest.mark.parametrize("seconds", [(0.002, 0.002), (0.0024, 0.0020)])
def test_even_stages_are_left_as_they_are(seconds):
    assert advise("generator", {"a": 0, "b": 1}, dict(zip("ab", seconds, strict=True))) is None


def test_a_layer_that_is_not_called_does_not_count():
    assert advise("generator", {"a": 0, "b": 1, "c": 1}, {"a": 0.001, "b": 0.001}) is None
