"""Marks of tests of what other systems do not have."""

import pytest

from gan.files.system import LINUX, WINDOWS

not_on_windows = pytest.mark.skipif(WINDOWS, reason="Windows has nothing of what this tests")
where_case_counts = pytest.mark.skipif(not LINUX, reason="A and a are one name here")
only_on_linux = pytest.mark.skipif(not LINUX, reason="only Linux has, or forks, what this tests")
