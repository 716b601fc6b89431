"""Fixtures that all tests share."""

import os
import shutil
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gan.files.system import WINDOWS, signals
from tests.support import browser, commands, opening, worlds
from tests.support.counted import forget
from tests.support.hard_games import HARD
from tests.support.journey import leg
from tests.support.parity import train
from tests.support.worlds import Ranks

torch.set_num_threads(1)
# The first backward decides whether autograd has threads. With some, forked ranks of dp could not differentiate. After
# FSDP2 or torch.compile it would start one also where there is no GPU.
torch.zeros((), requires_grad=True).backward()
for name, action in (("SIGHUP", signal.SIG_DFL), ("SIGINT", signal.default_int_handler)):
    for number in signals(name):
        if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup; ranks that tests start would ignore it too
            signal.signal(number, action)


# Few examples, and the same ones each time. HYPOTHESIS_PROFILE=default throws new dice.
settings.register_profile(
    "test",
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))


@pytest.fixture(autouse=True)
def golden_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of golden figures make their networks and tensors on a GPU, where tests run on GPUs."""
    families, from_numpy = getattr(request.module, "families", None), torch.from_numpy
    if families is None or families.DEVICE == "cpu":
        yield
        return
    there = mock.patch.object(torch, "from_numpy", lambda array: from_numpy(array).to(families.DEVICE))
    with torch.device(families.DEVICE), there:
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--promises", action="store_true", help="print the promises of all tests as a table, and end")
    parser.addoption("--regenerate", action="store_true", help="write the golden answers of tests again")


@pytest.hookimpl(tryfirst=True)  # before those that are not run now are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--promises"):
        print(promises(items))
        items.clear()


def promises(items: list[pytest.Item]) -> str:
    """A table of Markdown: what may happen, what holds then, and the tests that hold it."""
    holds: dict[str, str] = {}
    tests: dict[str, dict[str, None]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        for mark in item.iter_markers("promise"):
            what, *words = mark.args
            holds[what] = words[0] if words else holds.get(what, "")
            tests.setdefault(what, {})[f"`{name}`"] = None
    rows = [f"| {what} | {holds[what]} | {', '.join(names)} |" for what, names in sorted(tests.items())]
    return "\n".join(["| what happens | what holds | tests |", "|---|---|---|", *rows])


def pytest_collection_finish(session: pytest.Session) -> None:
    forget()  # half a second each time that the garbage collector looks through all modules and tests
    wanted = not (WINDOWS or session.config.option.collectonly)
    begins = {"ranks", "system", "faults"} & {item.path.parent.name for item in session.items}
    if wanted and (begins or worlds.SERVER in os.environ):
        worlds.context()  # before a command of ours would start a server that has imported less
    make_light()


@cache
def make_light() -> None:
    """Once, as tests/__main__.py collects each file by itself."""
    commands.remember_plugins()
    commands.log_in_place()
    commands.seed_the_cpu()
    commands.make_parsers_once()
    commands.remember_settings()
    commands.draw_faces_once()
    commands.fork_ranks()
    commands.leave_out_curves()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)`: a world of n gloo ranks that lives as long as the test session."""
    if WINDOWS:
        pytest.skip("Windows has no ranks")
    worlds: dict[int, Ranks] = {}

    def world(size: int) -> Ranks:
        if size not in worlds or not all(process.is_alive() for process in worlds[size].processes):
            worlds[size] = Ranks(size)
        return worlds[size]

    yield world
    for each in worlds.values():
        each.close()


@pytest.fixture(scope="session")
def hard_alone() -> Callable[[str], dict[str, Any]]:
    """Each hard game trained by one process, once."""
    return cache(lambda name: train(HARD[name], policy="single"))


@pytest.fixture(scope="session")
def unbroken() -> dict[str, Any]:
    """The journey of one device that never stopped."""
    return leg("single", 1, 6)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, in which we are. What is imported from it is forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def curves() -> Iterator[None]:
    """Runs and pages draw their curves. Elsewhere they leave them out."""
    with commands.curves():
        yield


@pytest.fixture(scope="session")
def sean_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny sean-faces run of two steps (16 faces of 32 pixels, 4 held out). Copy it to change it."""
    return opening.sean_run(tmp_path_factory.mktemp("sean") / "runs")


@pytest.fixture(scope="module")
def shared_copy(sean_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of that run, to write into, for all tests of a file."""
    return shutil.copytree(sean_run, tmp_path_factory.mktemp("copy") / "runs" / sean_run.name)


@pytest.fixture
def copy(sean_run: Path, tmp_path: Path) -> Path:
    """A copy of that run, to write into."""
    return shutil.copytree(sean_run, tmp_path / "runs" / sean_run.name)


@pytest.fixture(scope="session")
def folder_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny sean-folder run on 8 pairs of pictures in data/ beside runs/, 2 of them held out."""
    return opening.folder_run(tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    with browser.page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def screen(chromium: browser.Page) -> Iterator[browser.Page]:
    """A browser's page, for files and addresses; a test after which it has something to complain of fails."""
    chromium.problems.clear()
    yield chromium
    assert chromium.problems == []


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Lightning keeps a trainer's rank for the process, and a launcher its variables: a later test would fail."""
    rank, variables = rank_zero_only.rank, dict(os.environ)
    yield
    rank_zero_only.rank = rank
    if dict(os.environ) != variables:  # to write them takes a third of the time of a small test
        os.environ.clear()
        os.environ.update(variables)
