"""A small part of `make faults`: the same few cases each time, as long as commands have the same options."""

import pytest

from tests.faults.__main__ import kind_of
from tests.faults.kinds import KINDS
from tests.support import commands

SEED, CASES = 5065, 7


@pytest.mark.promise(
    "any of these by dice: command lines, settings, checkpoints, data, files in the way, packets to the ranks' ports",
    "status 0 or 2, one error line, no hang, nothing lost, no damaged weights taken",
)
def test_a_few_cases_of_every_kind_break_no_rule():
    assert {kind_of(SEED, number) for number in range(CASES)} == set(KINDS)
    typed = ("--seed", SEED, "--cases", CASES, "--workers", 2)
    ended = commands.run("tests.faults.__main__", *typed, limit=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{CASES} cases in" in ended.stdout
