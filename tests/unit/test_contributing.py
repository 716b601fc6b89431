"""CONTRIBUTING.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_that_it_names_are_there():
    named = re.findall(r"`((?:\w+/)*)(test_\w+\.py)::(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 60
    for folder, file, test in named:
        path = ROOT / "tests" / (folder or "ranks") / file
        assert f"def {test}(" in path.read_text(), f"{path}::{test}"
