"""What is refused before any process is started, and which run the ranks train: a new one, or one begun before."""

import itertools
import json
import os
import pickle
import signal
import socket
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from jsonargparse import Namespace

from gan.app.fitting import start, train
from gan.app.fitting.start import Chosen
from gan.app.run import options
from gan.app.run.folder import RunFolder
from gan.files.errors import UserError
from gan.files.system import resource
from strategies import PhaseStrategy
from strategies.processes import slurm
from strategies.processes.board import NEVER, VARIABLE, Board, Entry
from strategies.processes.launchers import Launched
from tests.support.posix import not_on_windows


@pytest.fixture
def check(monkeypatch):
    """`check(*typed, devices=2)`: check a command for so many devices on each host."""
    for name in [*os.environ]:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(start, "cores", lambda: 2)

    def make(*typed, devices=2, on_cpu=True):
        settings = options.parse([*typed])[0]
        start.check_settings(settings, PhaseStrategy(settings.strategy), devices, on_cpu)

    return make


@pytest.mark.promise(
    "what cannot be trained: a batch that does not divide, too many devices, ranks that are not there",
    "refused before the first process",
)
@pytest.mark.parametrize(
    ("typed", "devices", "words"),
    [
        ("", 1000, "1000 processes on 2 CPU cores; type --devices 2, and 32 at most"),
        ("--batch-size 64", 32, None),
        ("--batch-size 6 --nodes 2", 2, "batch 6 is not divisible by 4 ranks"),
        ("--batch-size 6 --nodes 2:4", 2, None),  # two hosts may come, or three
        ("", 3, None),  # nobody has typed the batch, so that it becomes one that they can share
        ("--batch-size 7 --strategy generator=zero3@2-3,*=ddp@0-1", 4, "batch 7 is not divisible by 2 ranks"),
        ("--batch-size 6 --strategy generator=zero3@2-3,*=ddp@0-1", 4, None),
        ("--strategy generator=zero3@2-3,*=ddp@0-1", 2, "--strategy does not place 2 ranks: "),
        ("--strategy generator=pipeline+schedule:interleaved+stages:6,*=ddp", 4, None),
    ],
)
def test_what_cannot_be_trained_is_refused_and_nothing_else(typed, devices, words, check):
    with pytest.raises(UserError, match=words) if words else nullcontext():
        check("wgan-gp-faces", *typed.split(), devices=devices)


def test_gpus_need_no_cpus_and_an_own_run_may_mean_something_else_by_its_batch(check, here):
    check("wgan-gp-faces", "--batch-size", "64", devices=64, on_cpu=False)
    (here / "inside").mkdir()
    for run in (["sean-folder", "--labels", "3"], ["stylegan2"]):
        with pytest.raises(UserError, match=f"^the folder {here} is empty; type --data and one in which data lie"):
            check(*run, "--data", str(here))
    (here / "inside" / "notes.txt").touch()  # what it is can be said by the run alone
    check("sean-folder", "--data", str(here), "--labels", "3")
    text = "from gan.runs import Run\ndef own(batch_size: int = 3, data: str = 'x') -> Run:\n    '''A run.'''\n"
    (here / "own.py").write_text(text)
    check("own.py:own")


NO_LIMIT = None if resource is None else resource.RLIM_INFINITY


@not_on_windows
@pytest.mark.parametrize(
    ("soft", "hard", "taken"),
    [
        (64, 4096, [(544, 4096)]),
        (64, NO_LIMIT, [(544, NO_LIMIT)]),
        (64, 520, [(520, 520)]),  # enough for a rank alone, and ranks may need less
        (1024, 4096, []),
        (NO_LIMIT, NO_LIMIT, []),
        (64, 64, r"a process 64, and a rank with 4 workers needs 512; type ulimit -n 4096$"),
    ],
)
@pytest.mark.promise("too few file handles, threads or processes", "one line with the `ulimit` to type")
def test_a_process_takes_what_it_may_and_a_shell_that_forbids_it_is_refused(soft, hard, taken, monkeypatch):
    found = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: found.append(both))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    with pytest.raises(UserError, match=taken) if isinstance(taken, str) else nullcontext():
        start.allow_files(Namespace(workers=4), 2)
    assert found == (taken if isinstance(taken, list) else [(64, 64)])


@not_on_windows
def test_a_folder_for_temporary_files_whose_name_is_too_long_is_refused_where_loaders_have_workers(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + 75 * "a")
    start.allow_files(Namespace(workers=0), 2)
    with pytest.raises(UserError, match=r"a name of 76 letters, .*; type export TMPDIR=/tmp, or --workers 0$"):
        start.allow_files(Namespace(workers=1), 2)


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
        ("torchrun", {"GAN_AGENT": f"agent host {AGENT}"}, None),  # somebody has set it: an agent sets both
        ("torchrun", {"GAN_AGENT": f"agent host {AGENT}", ERROR: f"{AGENT}/none/attempt_0/0/e"}, f"agent host {AGENT}"),
        ("torchrun", {ERROR: f"{TORCHRUN}/attempt_1/3/e"}, f"torchrun {socket.gethostname()} {TORCHRUN}"),
        ("slurm", JOB, f"slurm 7 {zlib.crc32(b'--rate 1'):08x}"),
        ("environment", JOB, None),  # a person has started these ranks
    ],
)
def test_who_has_started_a_rank_has_a_name_that_stays_over_restarts(by, variables, name, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert start.launcher_of(by and place(by), ["--rate", "1"]) == name


def test_the_newest_run_of_the_same_launch_goes_on_from_its_own_checkpoint_or_begins(tmp_path):
    folder = begun(tmp_path, "003-mine", ["a", "b"], checkpoint=8, age=60)
    begun(tmp_path, "004-other", ["c"], checkpoint=100)
    for name, text in (("005", ""), ("006", "[]"), ("007", '{"launchers": 3}')):
        begun(tmp_path, name, ["a"]).launch.write_text(text)  # a broken record is nobody's
    assert start.begun_by(tmp_path, ["b", "x"]) == Chosen(folder, folder.checkpoint(8), again=True)
    assert start.begun_by(tmp_path, ["x"]) is start.begun_by(tmp_path, []) is None

    def hold(where):
        where.checkpoint(12).mkdir()
        start.note_checkpoint(where, where.checkpoint(12))

    found = start.begun_by(tmp_path, ["a"], hold=hold)
    assert found == Chosen(folder, folder.checkpoint(12), again=True), "what is saved while the lock is waited for"
    second = begun(tmp_path, "002-resumed", ["a"])
    assert start.begun_by(tmp_path, ["a"]) == Chosen(second, None, again=True)


def test_each_checkpoint_is_noted_unless_there_is_no_launcher(tmp_path):
    folder = begun(tmp_path, "001-mine", ["a", "b"])
    for step in (8, 10, 12, 14):
        folder.checkpoint(step).mkdir()
        start.note_checkpoint(folder, folder.checkpoint(step))
        start.note_checkpoint(folder, folder.checkpoint(step))
    for step in (16, 18, 20, 22):  # whose saves have failed
        start.note_checkpoint(folder, folder.checkpoint(step))
    folder.checkpoint(100).mkdir()  # which this launch did not write
    assert start.begun_by(tmp_path, ["b"]).checkpoint == folder.checkpoint(14)
    record = json.loads(folder.launch.read_text())
    assert len(record["checkpoints"]) == 3 and record["launchers"] == ["a", "b"]
    folder.launch.unlink()
    start.note_checkpoint(folder, folder.checkpoint(14))
    assert not folder.launch.exists()


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
    monkeypatch.delenv(VARIABLE, raising=False)

    def run(number, *ends):
        error = tmp_path / "none_xyz" / f"attempt_{number}" / "0" / "error.json"
        variables = {ERROR: str(error), "TORCHELASTIC_RESTART_COUNT": str(number)}
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


@pytest.mark.parametrize("by", [None, "slurm", "our own agent"])
def test_other_launchers_do_not_try_again_or_count_for_themselves(by, tmp_path, monkeypatch):
    if by == "our own agent":
        monkeypatch.setenv("GAN_AGENT", f"agent host {tmp_path / 'a'}")
    monkeypatch.setenv(ERROR, str(tmp_path / "a" / "b" / "c" / "error.json"))
    there = by and place("slurm" if by == "slurm" else "torchrun")
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
