"""How weights are dealt out to ranks."""

import pytest

from strategies.sharding.whole_weights import deal


def test_every_weight_has_one_owner():
    dealt = deal({"a": 3, "b": 9, "c": 1, "d": 0}, 3)
    assert sorted(name for names in dealt for name in names) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_own_about_as_much_as_each_other(ranks):
    sizes = {f"layer {k}": 1000 + 37 * k % 400 for k in range(60)}
    loads = [sum(sizes[name] for name in names) for names in deal(sizes, ranks)]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_a_weight_larger_than_all_others_is_alone():
    assert deal({"small": 1, "huge": 100, "other": 2}, 2) == [{"huge"}, {"small", "other"}]
