"""The table of mistakes that `make mutants` tries fits the source and the tests."""

from collections import Counter

from tests.mutants.__main__ import stale_rows
from tests.mutants.table import mutants


def test_each_text_is_in_its_file_once_and_its_tests_are_there():
    """Where the source has changed, tests/mutants/mistakes.txt is corrected with it."""
    assert stale_rows() == ""


def test_each_mistake_has_a_name_of_its_own_and_changes_something():
    count = Counter(mutant.name for mutant in mutants())
    assert max(count.values()) == 1
    assert all(mutant.old.strip() and mutant.old != mutant.new for mutant in mutants())
