"""Late imports: the names of packages, and what Lightning may read while it is imported."""

import gc
import os
import sys

import pytest

import datasets
import gan
import strategies
from gan.files.errors import this_rank
from gan.files.loading import RANKS, loading
from strategies.policies import ALIASES, POLICIES


@pytest.mark.parametrize("package", [gan, strategies, datasets], ids=lambda package: package.__name__)
def test_a_package_has_the_names_that_it_announces_and_no_others(package):
    assert all(
        getattr(package, name).__module__.startswith(package.__name__)
        for name in package.__all__
        if name[0].isupper() and not name.isupper()
    )
    assert all(hasattr(package, name) for name in package.__all__) and not hasattr(package, "nothing")


def test_policies_have_the_names_that_are_typed():
    assert {name: policy.name for name, policy in POLICIES.items()} == {name: name for name in POLICIES} | ALIASES


def test_lightning_does_not_see_a_rank_that_is_no_number(monkeypatch):
    monkeypatch.setenv("RANK", "banana")
    with loading():
        assert "RANK" not in os.environ and not gc.isenabled()
    assert os.environ["RANK"] == "banana" and gc.isenabled()


@pytest.mark.parametrize(("variables", "rank"), [({}, 0), ({"RANK": "banana", "SLURM_PROCID": "3"}, 3)])
def test_before_lightning_is_there_the_environment_says_the_rank(variables, rank, monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    known = sys.modules["gan.files.errors"].rank_zero_only
    monkeypatch.delattr(known, "rank", raising=False)
    assert this_rank() == rank
    known.rank = 5
    assert this_rank() == 5
