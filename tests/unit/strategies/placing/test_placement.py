"""What is typed with `@`: who trains, who serves, and what is refused before a process starts."""

import pytest

from gan.files.errors import UserError
from strategies.choice import choices
from strategies.placing.placement import placement_of, rounds
from strategies.policies import POLICIES


def placed(typed: str, ranks: int):
    return placement_of(choices(typed, POLICIES), ranks)


@pytest.mark.parametrize(
    "typed", ["teacher=zero3@2-3,*=ddp@0-1", "teacher=zero3@2-3,*=ddp", "*=ddp,teacher=zero3 @ 2 - 3"]
)
def test_the_rest_trains(typed):
    found = placed(typed, 4)
    assert found.training == range(2) and found.serving == {"teacher": range(2, 4)}
    assert [found.part(rank).trains for rank in range(4)] == [True, True, False, False]
    assert (found.part(3).rank, found.part(3).size, found.part(1).size) == (1, 2, 2)


def test_several_sets_serve():
    found = placed("a=zero3@2-3,b=ddp@2-3,c=ddp@4,*=ddp", 5)
    assert found.training == range(2) and found.part(4).ranks == range(4, 5) and found.part(2).size == 2


def test_nothing_typed_is_no_placement():
    assert placed("teacher=zero3,*=ddp", 4) is None


def test_a_choice_is_written_as_it_is_typed():
    assert str(choices("teacher=zero3+offload@2-3,*=ddp", POLICIES)["teacher"]) == "zero3+offload@2-3"
    assert str(choices("teacher=zero3@2,*=ddp", POLICIES)["teacher"]) == "zero3@2"


@pytest.mark.parametrize(
    ("typed", "ranks", "words"),
    [
        ("teacher=zero3@2-3,*=ddp", 2, "on ranks 2-3, and there are 2, from 0 on; type --devices 4"),
        ("teacher=zero3@1,*=ddp", 1, "on rank 1, and there is 1, from 0 on; type --devices 2"),
        ("teacher=zero3@2-3,*=ddp@0-1", 6, "nothing for ranks 4, 5 of 6; type --devices 4"),
        ("teacher=zero3@0-1,*=ddp", 4, "all players that learn train together: type *=ddp@0-1"),
        ("teacher=zero3@1-2,eye=ddp@2-3,*=ddp", 4, "give both the same ranks, or ranks that do not overlap"),
        ("teacher=zero3@1,*=ddp", 4, "does not say on which ranks"),
        ("zero3@0-1", 2, "leave @0-1 out"),
        ("teacher=zero3@1,*=dp@0", 2, "dp is for all players on all ranks"),
        ("teacher=zero3@1-2,*=ddp@3", 4, "on rank 0"),
    ],
)
def test_what_cannot_be_is_refused(typed, ranks, words):
    with pytest.raises(UserError) as caught:
        placed(typed, ranks)
    assert words in str(caught.value)


@pytest.mark.parametrize("where", ["", "a", "3-2", "1-", "-1", "1-b", "1.5"])
def test_what_is_no_range_is_refused(where):
    with pytest.raises(UserError, match=r"type e\.g\. zero3@2-3"):
        placed(f"teacher=zero3@{where},*=ddp", 4)


@pytest.mark.parametrize(("training", "serving"), [(1, 1), (4, 2), (3, 2), (5, 3), (1, 3), (2, 4), (7, 1)])
def test_every_call_is_answered_once_and_all_work_in_every_round(training, serving):
    those = [rounds(range(training), range(10, 10 + serving), number) for number in range(serving)]
    answered = [rank for each in those for rank, own in each if own]
    assert sorted(answered) == list(range(training))
    assert len({len(each) for each in those}) == 1, "a rank without a call in a round would be missed"
    for each in those:
        assert len({rank for rank, _ in each}) == len(each), "a call would come twice to one rank"
