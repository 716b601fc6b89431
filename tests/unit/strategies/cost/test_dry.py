"""A plan plays the code that trains, without values."""

from unittest import mock

import pytest

from strategies.sharding.bucket import Bucket
from tests.support.composite import Sized
from tests.support.parity import single
from tests.support.planned import payload, planned

SIZED = (single(0), 2**18)


@pytest.mark.parametrize(
    ("policy", "kind", "owner", "method"),
    [
        ("zero3", "all-gather", Bucket, "start_unshard"),
        ("zero2", "reduce-scatter", Bucket, "reduce_scatter"),
        ("fsdp", "all-gather", Bucket, "start_unshard"),
    ],
)
def test_what_training_would_send_twice_is_planned_twice(policy, kind, owner, method):
    original = getattr(owner, method)

    def twice(self, *args):
        original(self, *args)
        return original(self, *args)

    once = payload(planned(Sized, policy, 2, *SIZED))
    with mock.patch.object(owner, method, twice):
        found = payload(planned(Sized, policy, 2, *SIZED))
    assert {phase: each[kind] for phase, each in found.items()} == {
        phase: 2 * each[kind] for phase, each in once.items()
    }


@pytest.mark.parametrize("policy", ["zero3", "fsdp"])
def test_each_phase_moves_the_weights_that_it_reads(policy):
    """Whole weights are gathered once where they stay whole, and nothing is allocated for them on this machine."""
    bytes_ = 4 * sum(parameter.numel() for parameter in Sized().first.parameters())
    found = payload(planned(Sized, policy, 2, *SIZED))["first"]
    assert found["all-gather"] == pytest.approx(2 * bytes_, rel=0.01)
    assert found["reduce-scatter"] == pytest.approx(bytes_, rel=0.01)
