"""A process that runs files of tests: tests/__main__.py tells it one file after the other."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest


class Files:
    """A plugin of pytest: one session for all files, so that they share its worlds of ranks and its trained runs."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.modules: dict[Path, pytest.Module] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Nothing but folders: a file is imported by the process that runs it, and by no other."""
        session.perform_collect(genitems=False)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Collector]) -> None:
        if not self.modules:
            self.modules = {module.path: module for folder in items for module in modules_of(folder)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        config, hook = self.config, self.config.hook
        for file, marks in iter(self.pipe.recv, None):
            config.option.markexpr = marks
            session.items = list(session.genitems(self.modules[config.rootpath / file]))
            hook.pytest_collection_modifyitems(session=session, config=config, items=session.items)
            hook.pytest_collection_finish(session=session)
            for item, following in pairwise([*session.items, session]):  # what belongs to the session stays
                hook.pytest_runtest_protocol(item=item, nextitem=following)
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


def modules_of(node: pytest.Collector) -> Iterator[pytest.Module]:
    """Those below it, not imported. The folders stay, because the fixtures of a conftest.py belong to them."""
    if isinstance(node, pytest.Module):
        yield node
    else:
        node.ihook.pytest_collectstart(collector=node)
        for each in node.ihook.pytest_make_collect_report(collector=node).result:
            yield from modules_of(each)


def work(pipe: Connection, variables: dict[str, str]) -> None:
    """`variables`: of the environment of who starts it. The server, of which this process is a fork, has others."""
    os.environ.clear()
    os.environ.update(variables)
    sys.dont_write_bytecode = False
    multiprocessing.set_start_method(None, force=True)  # as in any program, though a server has forked this one
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests"], plugins=[Files(pipe)]))
