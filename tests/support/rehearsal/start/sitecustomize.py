"""Python imports this at its start, where its folder is on PYTHONPATH: also in processes that others start."""

from tests.support.rehearsal import windows

windows.install()
