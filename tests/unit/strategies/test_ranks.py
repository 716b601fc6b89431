"""Which players share a process group."""

from datetime import timedelta
from itertools import count
from unittest import mock

import pytest

from gan import Phase
from strategies import ranks
from strategies.ranks import Groups


def phases(*learners):
    return [Phase(f"phase {number}", lambda batch: None, names) for number, names in enumerate(learners)]


@pytest.fixture
def made():
    """torch's groups are numbers here. The list has those that were ended."""
    ended, numbers = [], count()
    with mock.patch.multiple(ranks.dist, new_group=lambda timeout: next(numbers), destroy_process_group=ended.append):
        yield ended


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["a", "b", "c"], [0, 0, 0]),
        ([["a", "b"], "c"], [0, 1, 0]),
        (["a", ["a", "b"], ["b", "c"]], [0, 1, 0]),
        ([["a", "b"], ["b", "c"], ["c", "a"]], [0, 1, 2]),
    ],
)
def test_players_share_one_unless_they_learn_in_the_same_phase(turns, expected, made):
    group = Groups(phases(*turns))
    assert [group.shared(player) for player in "abc"] == expected


def test_one_of_its_own_is_never_shared(made):
    group = Groups(phases("a", "b", "c"))
    assert [group.shared("a"), group.own(), group.own(), group.shared("b")] == [0, 1, 2, 0]


def test_all_have_the_timeout_of_the_strategy():
    with mock.patch.object(ranks.dist, "new_group") as made:
        made_groups = Groups(phases("a", ["a", "b"]), timedelta(seconds=7))
        made_groups.shared("a"), made_groups.shared("b"), made_groups.own()
    assert [call.kwargs for call in made.call_args_list] == [{"timeout": timedelta(seconds=7)}] * 3


def test_released_once_all_are_ended(made):
    group = Groups(phases("a", "b", "c"))
    group.shared("a"), group.own(), group.shared("b")
    group.release()
    group.release()
    assert sorted(made) == [0, 1]
