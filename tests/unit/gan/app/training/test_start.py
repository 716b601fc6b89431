"""Which run the ranks train: a new one, or the one that an earlier attempt of their launch has begun."""

import itertools
import json
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from gan.app.run.folder import RunFolder
from gan.app.training import start
from gan.app.training.start import Chosen
from gan.files.errors import UserError
from strategies.processes.board import NEVER, VARIABLE, Board, Entry
from strategies.processes.launchers import Launched
from tests.support.posix import not_on_windows


@pytest.fixture(autouse=True)
def nobody(monkeypatch):
    for name in ("GAN_AGENT", "TORCHELASTIC_ERROR_FILE", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def place(by="torchrun"):
    return Launched(by, 0, 0, 2, 2, 0)


def begun(out, name, launchers, checkpoint=None, age=0.0):
    folder = RunFolder(out / name)
    folder.checkpoints.mkdir(parents=True)
    noted = []
    if checkpoint is not None:
        folder.checkpoint(checkpoint).mkdir()
        noted.append(folder.checkpoint(checkpoint).name)
    folder.launch.write_text(start.text(launchers, *noted))
    os.utime(folder.launch, (time.time() - age,) * 2)
    return folder


def test_an_agent_names_itself(monkeypatch):
    assert start.launcher_of(None) is None
    monkeypatch.setenv("GAN_AGENT", "agent host /tmp/gan-agent-x")
    assert start.launcher_of(place()) is None  # somebody has set it: an agent sets the other one too
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/gan-agent-x/none/attempt_0/0/error.json")
    assert start.launcher_of(place()) == "agent host /tmp/gan-agent-x"


def test_a_torchrun_is_known_by_its_folder_over_all_attempts(monkeypatch):
    assert start.launcher_of(place()) is None
    names = set()
    for attempt, rank in ((0, 0), (1, 0), (1, 3)):
        path = f"/tmp/torchelastic_abc/none_xyz/attempt_{attempt}/{rank}/error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        names.add(start.launcher_of(place()))
    (name,) = names
    assert name.endswith("/tmp/torchelastic_abc/none_xyz")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic_abc/none_other/attempt_0/0/error.json")
    assert start.launcher_of(place()) != name


def test_a_slurm_job_is_known_by_its_step(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert start.launcher_of(place("slurm")) == "slurm 7.0"
    assert start.launcher_of(place("environment")) is None  # a person has started these ranks


def test_the_run_of_the_same_launch_goes_on_from_its_own_checkpoint(tmp_path):
    folder = begun(tmp_path, "003-mine", ["a", "b"], checkpoint=8, age=60)
    begun(tmp_path, "004-other", ["c"], checkpoint=100)
    (tmp_path / "005-nobody's").mkdir()
    assert start.begun_by(tmp_path, ["b", "x"]) == Chosen(folder, folder.checkpoint(8), again=True)
    assert start.begun_by(tmp_path, ["x"]) is None
    assert start.begun_by(tmp_path, []) is None


def test_the_newest_of_several_runs_of_one_launch_goes_on_or_begins_where_it_has_saved_nothing(tmp_path):
    begun(tmp_path, "009-first", ["a"], age=60)
    second = begun(tmp_path, "002-resumed", ["a"])
    assert start.begun_by(tmp_path, ["a"]) == Chosen(second, None, again=True)


def test_each_checkpoint_is_noted_unless_there_is_no_launcher(tmp_path):
    folder = begun(tmp_path, "001-mine", ["a", "b"])
    for step in (8, 10, 12, 14):
        folder.checkpoint(step).mkdir()
        start.note(folder, folder.checkpoint(step))
        start.note(folder, folder.checkpoint(step))
        assert start.begun_by(tmp_path, ["b"]).checkpoint == folder.checkpoint(step)
    assert len(json.loads(folder.launch.read_text())["checkpoints"]) == 3
    assert json.loads(folder.launch.read_text())["launchers"] == ["a", "b"]
    folder.launch.unlink()
    start.note(folder, folder.checkpoint(14))
    assert not folder.launch.exists()


def test_saves_that_failed_do_not_push_out_the_last_one_that_was_whole(tmp_path):
    folder = begun(tmp_path, "001-mine", ["a"], checkpoint=8)
    for step in (10, 12, 14, 16):
        start.note(folder, folder.checkpoint(step))
    folder.checkpoint(100).mkdir()  # which this launch did not write
    assert start.begun_by(tmp_path, ["a"]).checkpoint == folder.checkpoint(8)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"launchers": 3}'])
def test_a_broken_record_is_nobodys(text, tmp_path):
    folder = begun(tmp_path, "001-mine", ["a"])
    folder.launch.write_text(text)
    assert start.begun_by(tmp_path, ["a"]) is None


def test_one_process_chooses_alone():
    chosen, launchers = start.chosen_by_first(None, lambda launchers: Chosen(RunFolder("x"), None, bool(launchers)))
    assert (chosen, launchers) == (Chosen(RunFolder("x")), [])


def test_a_first_rank_that_ends_before_it_has_chosen_is_no_traceback(monkeypatch):
    # The second thing that is asked is the choice.
    gone = mock.Mock(get=lambda key: pickle.dumps([None, None]))
    gone.check.side_effect = lambda keys: not keys[0].endswith(", 1") or reset()
    reset = mock.Mock(side_effect=dist.DistNetworkError("Connection reset by peer"))
    monkeypatch.setattr(start.cluster, "store", lambda place: gone)
    monkeypatch.setattr(start, "launcher_of", lambda place: None)
    with pytest.raises(start.Refused, match="the first rank has ended before it has chosen a run"):
        start.chosen_by_first(SimpleNamespace(world_size=2, rank=1), None)


def test_all_ranks_get_the_first_ones_choice_or_its_refusal(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(start.cluster, "store", lambda place: store)
    monkeypatch.setattr(start, "launcher_of", lambda place: f"agent {place.rank % 2}")
    monkeypatch.setattr(start, "_calls", itertools.chain.from_iterable((n, n, n) for n in range(2)))

    def choose(launchers, text):
        if text:
            raise UserError(text)
        return Chosen(RunFolder(Path("x")), Path("y"), again=launchers == ["agent 0", "agent 1"])

    def asked(rank, text):
        try:
            return start.chosen_by_first(Launched("mpi", rank, rank, 3, 3, 0), partial(choose, text=text))
        except UserError as error:
            return type(error), str(error)

    with ThreadPoolExecutor(3) as pool:
        chosen = Chosen(RunFolder(Path("x")), Path("y"), again=True), ["agent 0", "agent 1"]
        assert list(pool.map(asked, range(3), [""] * 3)) == [chosen] * 3
        refused = [(start.Refused, "no such run")] * 2
        assert list(pool.map(asked, range(3), ["no such run"] * 3)) == [(UserError, "no such run"), *refused]


# ---- the attempts of a person's torchrun, which tells its ranks only how often it has started them ----


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """`attempt(number, ends)`: torchrun's attempt of this number ends in the steps that its two ranks have begun."""
    monkeypatch.delenv("GAN_AGENT", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)

    def run(number, *ends):
        variables = {
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / "none_xyz" / f"attempt_{number}" / "0" / "error.json"),
            "TORCHELASTIC_RESTART_COUNT": str(number),
        }
        (tmp_path / "none_xyz").mkdir(exist_ok=True)
        with mock.patch.dict("os.environ", variables):
            start.note_steps(place())
            start.check(place())
            for rank, step in enumerate(ends):
                Board(Path(os.environ[VARIABLE]), 2).write(rank, Entry(step=step))

    return run


@not_on_windows
def test_the_third_failure_at_one_step_is_the_last_one_however_often_torchrun_tries(attempt):
    for number in range(3):
        attempt(number, 5, 4)  # the other rank was a step behind
    for number in (3, 4, 5):
        with pytest.raises(UserError, match="the last 3 attempts have failed at step 5, so the ranks are not started"):
            attempt(number)


def test_failures_before_the_first_step_count_as_well(attempt):
    for number in range(3):
        attempt(number)
    with pytest.raises(UserError, match="failed before the first step"):
        attempt(3)


@not_on_windows
def test_the_control_failures_at_other_steps_do_not(attempt):
    for number in range(8):
        attempt(number, 5 + number // 2, NEVER)


@not_on_windows
def test_hosts_that_come_and_go_are_no_failures(attempt):
    for _ in range(5):
        attempt(0, 5, 5)
    for step in (5, 7, 5):
        attempt(1, step, step)
    attempt(2, 5, 5)
    with pytest.raises(UserError, match="at step 5"):
        attempt(3)


@pytest.mark.parametrize("by", [None, "slurm", "mpi"])
def test_other_launchers_do_not_try_again(by, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "a" / "b" / "c" / "error.json"))
    there = None if by is None else place(by)
    start.note_steps(there)
    start.check(there)
    assert list(tmp_path.iterdir()) == []


def test_our_own_agent_counts_for_itself(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/x/y/z/error.json")
    assert start.folder(place()) is not None
    monkeypatch.setenv("GAN_AGENT", "agent host /tmp/gan-agent-x")
    assert start.folder(place()) is None
