"""Which serving rank answers which training rank."""

import pytest

from strategies.placing.servers import rounds


@pytest.mark.parametrize(("training", "serving"), [(1, 1), (4, 2), (3, 2), (5, 3), (1, 3), (2, 4), (7, 1)])
def test_every_call_is_answered_once_and_all_work_in_every_round(training, serving):
    those = [rounds(range(training), range(10, 10 + serving), number) for number in range(serving)]
    answered = [rank for each in those for rank, own in each if own]
    assert sorted(answered) == list(range(training))
    assert len({len(each) for each in those}) == 1, "a rank without a call in a round would be missed"
    for each in those:
        assert len({rank for rank, _ in each}) == len(each), "a call would come twice to one rank"
