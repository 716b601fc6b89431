"""Every rank is started as a survivor, whatever starts it, and leaves nothing behind."""

import gc
import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from gan.files.errors import UserError
from strategies.processes import starting
from strategies.processes.lost_ranks import Survivor
from strategies.processes.own_ranks import OwnRanks
from strategies.processes.starting import PARENT, Scripts
from strategies.training.ranks_strategy import launcher
from tests.support.hard_games import Plain
from tests.support.parity import train

ASKS = f"import os, sys; sys.exit(int(os.environ['LOCAL_RANK']) if os.environ['{PARENT}'] == str(os.getppid()) else 9)"


class Environment(SimpleNamespace):
    """Of a node, where nobody else starts ranks."""

    main_address, main_port = "127.0.0.1", 7
    creates_processes_externally = False
    node, local = 0, 0

    def validate_settings(self, **settings):
        pass

    def node_rank(self):
        return self.node

    def local_rank(self):
        return self.local


class AllTrain(SimpleNamespace):
    """A strategy under which no rank serves others."""

    is_dp = False

    def take_part(self, survivor, function, *args, **kwargs):
        self.survivor = survivor
        return survivor.run(function, *args, **kwargs)


def scripts(processes, nodes=1, **environment):
    return Scripts(AllTrain(cluster_environment=Environment(**environment), num_processes=processes, num_nodes=nodes))


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """Lightning writes into the environment what its children shall find there."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1" if name in ("MASTER_PORT", "WORLD_SIZE") else "0")
    monkeypatch.setattr(sys, "argv", ["-c"])


def test_the_first_of_a_node_starts_the_others_and_knows_them_by_rank(monkeypatch):
    monkeypatch.setattr(starting, "same_command", lambda: [sys.executable, "-c", ASKS])
    two = scripts(3, nodes=2, node=1)
    with mock.patch.object(threading.Thread, "start") as starts:
        assert two.launch(lambda value: value, 7) == 7
    assert starts.call_count == 2  # the lifeline, and our look at the family; not Lightning's
    survivor = two.strategy.survivor
    assert (survivor.rank, survivor.first, survivor.parent) == (3, 3, None)
    assert {rank: child.wait() for rank, child in survivor.children.items()} == {4: 1, 5: 2}  # they know their parent
    assert PARENT not in os.environ  # what else this process starts is no rank


def test_a_script_that_was_started_again_may_train_on_one_device_first(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert train(Plain, policy="single", steps=1)


def test_but_not_with_dp_first(monkeypatch):
    """The process that starts it does not take part in that training: both would wait for ever."""
    monkeypatch.setattr(Survivor, "_look_after_family", lambda self: None)
    monkeypatch.setattr(starting, "_parent", "4321")
    monkeypatch.setattr(Scripts, "joined", False)
    one = scripts(2, local=1, creates_processes_externally=True)
    monkeypatch.setattr(one.strategy, "is_dp", True)
    with pytest.raises(UserError, match="dp starts ranks of its own; train with dp in another script"):
        one.launch(lambda: None)
    scripts(2, local=1, creates_processes_externally=True).launch(lambda: None)
    one.launch(lambda: None)  # both are in it


@pytest.mark.parametrize(("imported", "now"), [(".", "later"), ("config", ".")])
def test_the_others_start_where_the_first_was_started(imported, now, monkeypatch, tmp_path):
    """The program may have gone elsewhere, as Hydra's do, or have imported us elsewhere, as LightningCLI does."""
    (tmp_path / "program.py").write_text("from pathlib import Path; Path('here').write_text('')")
    for folder in {imported, now} - {"."}:
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(starting, "_imported_in", str(tmp_path / imported))
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.chdir(tmp_path / now)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    two = scripts(2)
    two.launch(lambda: None)
    assert [child.wait() for child in two.procs] == [0] and (tmp_path / "here").exists()


def test_another_rank_knows_the_one_that_started_it(monkeypatch):
    monkeypatch.setattr(Survivor, "_look_after_family", lambda self: None)
    monkeypatch.setattr(starting, "_parent", "4321")
    one = scripts(3, nodes=2, node=1, local=2, creates_processes_externally=True)
    one.launch(lambda: None)
    survivor = one.strategy.survivor
    assert (survivor.rank, survivor.first, survivor.parent) == (5, 3, 4321)


def test_a_first_process_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setattr(starting, "_parent", "x")
    with pytest.raises(UserError, match="the environment variable GAN_FIRST_PROCESS is 'x', which is no number"):
        scripts(3, nodes=2, node=1, local=2, creates_processes_externally=True).launch(lambda: None)


def test_under_torchrun_and_srun_there_is_no_family():
    for local in (0, 1):
        one = scripts(2, local=local, creates_processes_externally=True)
        one.launch(lambda: None)
        survivor = one.strategy.survivor
        assert (survivor.rank, survivor.children, survivor.parent) == (local, {}, None)


def test_a_notebooks_ranks_are_those_of_one_machine():
    assert isinstance(launcher(AllTrain(cluster_environment=Environment(), num_nodes=1), "fork"), OwnRanks)
    with pytest.raises(UserError, match="start the ranks of one machine, and there are 2; start a program on each"):
        launcher(AllTrain(cluster_environment=Environment(), num_nodes=2), "fork")


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_no_strategy_must_be_told_that_it_is_in_a_notebook(start_method, monkeypatch):
    """Lightning would refuse those whose launcher says that it cannot start ranks there, with a word of its own."""
    alone = AllTrain(cluster_environment=Environment(), num_processes=2, num_nodes=1)
    assert isinstance(launcher(alone, "popen"), Scripts)
    monkeypatch.setattr("sys.ps1", ">>>", raising=False)
    found = launcher(alone, start_method)
    assert isinstance(found, OwnRanks) and found.is_interactive_compatible


def _twice():
    found = []
    for _ in range(3):
        train(Plain, steps=1, world=2)
        gc.collect()
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("lifeline"))
        found.append((names, len(os.listdir("/proc/self/fd"))))
    return found


def test_trainings_of_one_process_group_leave_nothing_open(ranks):
    for (names, files), (later, more) in ((found[1], found[2]) for found in ranks(2).run(_twice)):
        assert names == later == []
        assert more <= files
