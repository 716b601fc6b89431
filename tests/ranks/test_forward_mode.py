"""Graphs of a phase of second order that a later phase runs backward; that derivatives train as on one device:
tests/scenes/losses.py."""

from contextlib import nullcontext
from unittest import mock

import pytest

from tests.scenes.losses import Kept
from tests.support.duel import fit


def failure(policy, unended=False):
    """The words of the error, if there is one. `unended`: graphs are not ended with their phase."""
    ends = "strategies.sharding.unshard_on_read.end_graphs"
    with mock.patch(ends) if unended else nullcontext():
        try:
            fit(Kept, policy, 2)
        except RuntimeError as error:
            return str(error)
    return None


@pytest.mark.parametrize("policy", ["zero3", "fsdp"])
def test_another_graph_of_it_is_an_error_and_never_wrong(policy, ranks):
    for message in ranks(2).run(failure, policy):
        assert "has been modified by an inplace operation" in message


def test_the_control_where_weights_stay_trains(ranks):
    assert ranks(2).run(failure, "zero2") == [None, None]


def test_the_controls_that_let_graphs_live_do_not_notice_or_fail_in_other_words(ranks):
    """FSDP2 has freed the memory that the graph needs."""
    assert ranks(2).run(failure, "zero3", True) == [None, None]
    for message in ranks(2).run(failure, "fsdp", True):
        assert "inplace" not in message and "storage" in message
