"""Which run the ranks train: a new one, or the one that an earlier attempt of their launch has begun."""

import itertools
import json
import os
import pickle
import signal
import socket
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from gan.app.run.folder import RunFolder
from gan.app.training import start, train
from gan.app.training.start import Chosen
from gan.files.errors import UserError
from strategies.processes import slurm
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
    folder.launch.write_text(start.launch_record(launchers, *noted))
    os.utime(folder.launch, (time.time() - age,) * 2)
    return folder


AGENT, TORCHRUN = "/tmp/gan-agent-x", "/tmp/torchelastic_abc/none_xyz"
ERROR, JOB = "TORCHELASTIC_ERROR_FILE", {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("by", "variables", "name"),
    [
        (None, {}, None),
        ("torchrun", {}, None),
        (
            "torchrun",
            {"GAN_AGENT": f"agent host {AGENT}"},
            None,
        ),  # somebody has set it: an agent sets the other one too
        ("torchrun", {"GAN_AGENT": f"agent host {AGENT}", ERROR: f"{AGENT}/none/attempt_0/0/e"}, f"agent host {AGENT}"),
        ("torchrun", {ERROR: f"{TORCHRUN}/attempt_0/0/e"}, f"torchrun {socket.gethostname()} {TORCHRUN}"),
        ("torchrun", {ERROR: f"{TORCHRUN}/attempt_1/3/e"}, f"torchrun {socket.gethostname()} {TORCHRUN}"),
        ("slurm", JOB, f"slurm 7 {zlib.crc32(b'--rate 1'):08x}"),
        ("environment", JOB, None),  # a person has started these ranks
    ],
)
def test_who_has_started_a_rank_has_a_name_that_stays_over_restarts(by, variables, name, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert start.launcher_of(by and place(by), ["--rate", "1"]) == name


def test_the_run_of_the_same_launch_goes_on_from_its_own_checkpoint(tmp_path):
    folder = begun(tmp_path, "003-mine", ["a", "b"], checkpoint=8, age=60)
    begun(tmp_path, "004-other", ["c"], checkpoint=100)
    (tmp_path / "005-nobody's").mkdir()
    assert start.begun_by(tmp_path, ["b", "x"]) == Chosen(folder, folder.checkpoint(8), again=True)
    assert start.begun_by(tmp_path, ["x"]) is None
    assert start.begun_by(tmp_path, []) is None


def test_what_the_attempt_before_saves_while_its_lock_is_waited_for_counts(tmp_path):
    folder = begun(tmp_path, "003-mine", ["a"], checkpoint=8)

    def hold(where):
        where.checkpoint(12).mkdir()
        start.note_checkpoint(where, where.checkpoint(12))

    assert start.begun_by(tmp_path, ["a"], hold=hold) == Chosen(folder, folder.checkpoint(12), again=True)


def test_the_newest_of_several_runs_of_one_launch_goes_on_or_begins_where_it_has_saved_nothing(tmp_path):
    begun(tmp_path, "009-first", ["a"], age=60)
    second = begun(tmp_path, "002-resumed", ["a"])
    assert start.begun_by(tmp_path, ["a"]) == Chosen(second, None, again=True)


def test_each_checkpoint_is_noted_unless_there_is_no_launcher(tmp_path):
    folder = begun(tmp_path, "001-mine", ["a", "b"])
    for step in (8, 10, 12, 14):
        folder.checkpoint(step).mkdir()
        start.note_checkpoint(folder, folder.checkpoint(step))
        start.note_checkpoint(folder, folder.checkpoint(step))
        assert start.begun_by(tmp_path, ["b"]).checkpoint == folder.checkpoint(step)
    assert len(json.loads(folder.launch.read_text())["checkpoints"]) == 3
    assert json.loads(folder.launch.read_text())["launchers"] == ["a", "b"]
    folder.launch.unlink()
    start.note_checkpoint(folder, folder.checkpoint(14))
    assert not folder.launch.exists()


def test_saves_that_failed_do_not_push_out_the_last_one_that_was_whole(tmp_path):
    folder = begun(tmp_path, "001-mine", ["a"], checkpoint=8)
    for step in (10, 12, 14, 16):
        start.note_checkpoint(folder, folder.checkpoint(step))
    folder.checkpoint(100).mkdir()  # which this launch did not write
    assert start.begun_by(tmp_path, ["a"]).checkpoint == folder.checkpoint(8)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"launchers": 3}'])
def test_a_broken_record_is_nobodys(text, tmp_path):
    folder = begun(tmp_path, "001-mine", ["a"])
    folder.launch.write_text(text)
    assert start.begun_by(tmp_path, ["a"]) is None


def test_a_first_rank_that_ends_before_it_has_chosen_is_no_traceback(monkeypatch):
    # The second thing that is asked is the choice.
    gone = mock.Mock(get=lambda key: pickle.dumps([(None, "here", {})] * 2))
    gone.check.side_effect = lambda keys: not keys[0].endswith(", 1") or reset()
    reset = mock.Mock(side_effect=dist.DistNetworkError("Connection reset by peer"))
    monkeypatch.setattr(start.cluster, "store", lambda place: gone)
    monkeypatch.setattr(start, "launcher_of", lambda *_: None)
    with pytest.raises(start.Refused, match="the first rank has ended before it has chosen a run"):
        start.chosen_by_first(Launched("mpi", 1, 1, 2, 2, 0), None)


def test_all_ranks_get_the_first_ones_choice_or_its_refusal(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(start.cluster, "store", lambda place: store)
    monkeypatch.setattr(start, "launcher_of", lambda place, argv: f"agent {place.rank % 2}")
    monkeypatch.setattr(start, "_calls", itertools.chain.from_iterable((n, n, n) for n in range(4)))

    def choose(launchers, text):
        if text:
            raise UserError(text)
        return Chosen(RunFolder(Path("x")), Path("y"), again=launchers == ["agent 0", "agent 1"])

    def asked(rank, text, by="mpi", rates="111"):
        typed = {"--rate": rates[rank], f"--of-{rank}": "1"}
        try:
            return start.chosen_by_first(Launched(by, rank, rank, 3, 3, 0), partial(choose, text=text), (), typed)
        except UserError as error:
            return type(error), str(error)

    with ThreadPoolExecutor(3) as pool:
        chosen = Chosen(RunFolder(Path("x")), Path("y"), again=True), ["agent 0", "agent 1"]
        assert list(pool.map(asked, range(3), [""] * 3)) == [chosen] * 3
        monkeypatch.setenv("MASTER_PORT", "7")
        words = "rank 1 was started by another command than rank 0: two trainings of one job have met at MASTER_PORT=7"
        for kind, text in pool.map(partial(asked, text="", by="slurm"), range(3)):
            assert kind is start.Refused and text.startswith(words)
        host = socket.gethostname()
        words = f"rank 2, on {host}, was started with --rate 3, and rank 0, on {host}, with 1; type the same command"
        for kind, text in pool.map(partial(asked, text="", rates="113"), range(3)):
            assert kind is start.Refused and text.startswith(words)
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
            start.check_attempts(place())
            for rank, step in enumerate(ends):
                Board(Path(os.environ[VARIABLE]), 2).write(rank, Entry(step=step))

    return run


ATTEMPTS = {
    "at one step": ([(number, 5, 4) for number in range(3)], "at step 5, so the ranks are not started"),  # one behind
    "before the first step": ([(number,) for number in range(3)], "before the first step"),
    "the control: at other steps": ([(number, 5 + number // 2, NEVER) for number in range(8)], None),
    "hosts that come and go": ([*[(0, 5, 5)] * 5, (1, 5, 5), (1, 7, 7), (1, 5, 5), (2, 5, 5)], "at step 5"),
}


@not_on_windows
@pytest.mark.parametrize("what", ATTEMPTS)
def test_the_third_failure_at_one_step_is_the_last_one_however_often_torchrun_tries(what, attempt):
    attempts, words = ATTEMPTS[what]
    for each in attempts:
        attempt(*each)
    for number in range(attempts[-1][0] + 1, 6 if words else 0):
        with pytest.raises(UserError, match=f"the last 3 attempts have failed {words}"):
            attempt(number)


@pytest.mark.parametrize("by", [None, "slurm", "mpi", "our own agent"])
def test_other_launchers_do_not_try_again_or_count_for_themselves(by, tmp_path, monkeypatch):
    if by == "our own agent":
        monkeypatch.setenv("GAN_AGENT", f"agent host {tmp_path / 'a'}")
        by = "torchrun"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "a" / "b" / "c" / "error.json"))
    there = None if by is None else place(by)
    start.note_steps(there)
    start.check_attempts(there)
    assert list(tmp_path.iterdir()) == []


@not_on_windows
@pytest.mark.parametrize(("restarts", "ends"), [(2, False), (3, True)])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_job_that_is_always_warned_before_it_begins_does_not_go_back_for_ever(
    restarts, ends, has_begun, tmp_path, monkeypatch, capsys
):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "requeue", lambda: None)
    before, job = signal.getsignal(signal.SIGUSR1), place("slurm")
    if has_begun:
        begun(tmp_path, "001-mine", [start.launcher_of(job, ["--rate", "1"])])
    try:
        train.go_back_if_warned(job, tmp_path, ["--rate", "1"])
        with pytest.raises(SystemExit) if ends and not has_begun else nullcontext():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    said = capsys.readouterr().out
    assert ("goes back into the queue" in said) == (not ends or has_begun)
    assert ("type a longer --time" in said) == (ends and not has_begun)
