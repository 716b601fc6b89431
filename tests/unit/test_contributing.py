"""CONTRIBUTING.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_that_it_names_are_there():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests/ranks" / file).read_text(), f"{file}::{test}"
