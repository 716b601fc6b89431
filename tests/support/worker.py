"""A process that runs files of tests: tests/__main__.py tells it one file after the other."""

import sys
from itertools import pairwise
from multiprocessing.connection import Connection

import pytest


class Files:
    """A plugin of pytest: one session for all files, so that they share its worlds of ranks and its trained runs."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Nothing yet: a file is imported by the process that runs it, and by no other."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for file, marks in iter(self.pipe.recv, None):
            session.config.option.markexpr = marks
            items = session.perform_collect([file])
            for item, following in pairwise([*items, session]):  # what belongs to the session stays
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.pipe.send(None)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.pipe.send(("error", "E", report.nodeid, report.longreprtext, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind, letter, _ = self.config.hook.pytest_report_teststatus(report=report, config=self.config)
        said = [f"---- {name}\n{text}" for name, text in report.sections] if report.failed else []
        text = "\n".join([report.longreprtext, *said]) if report.failed else ""
        self.pipe.send((kind, letter, report.nodeid, text, report.duration))


def work(pipe: Connection) -> None:
    sys.dont_write_bytecode = False
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests"], plugins=[Files(pipe)]))
