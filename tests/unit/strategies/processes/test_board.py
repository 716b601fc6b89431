"""What the ranks of a host leave for others: where each is, how one has failed, which rows it has."""

import json
import os
import secrets
import socket
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gan.files.errors import RankLost, UserError, WorkerLost, printable
from strategies.processes import board, equal_rows, failure
from strategies.processes.board import NEVER, VARIABLE, Board, Entry, shared_board
from strategies.processes.equal_rows import EqualRows
from strategies.processes.failure import ERROR, FILE, FOLLOWS, LOST, REFUSED, Failure, cause
from strategies.processes.places import RanksDiverged

# ---- board ----


@pytest.fixture(autouse=True)
def nobody_has_given_one(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def boards(size, first=0):
    """Those of some ranks of a host, made at the same time."""
    run, meet, made = secrets.token_hex(8), threading.Barrier(size), {}

    def make(rank):
        made[rank] = shared_board(size, first, run, meet.wait)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(size)]


def test_each_reads_what_the_others_wrote_and_no_file_is_left(tmp_path):
    with mock.patch.object(board, "gettempdir", return_value=str(tmp_path)):
        one, two, three = boards(3, first=6)
    assert not os.listdir(tmp_path)
    two.write(7, Entry(7, 2**32 - 1, 3, True, "jüge"))
    three.write(8, Entry(8, 5, 4, False, "x" * 500))
    assert one.read() == {6: Entry(), 7: Entry(7, 2**32 - 1, 3, True, "jüge"), 8: Entry(8, 5, 4, False, "x" * 127)}
    assert one.furthest() == 4


def test_who_has_started_the_ranks_reads_their_steps(tmp_path, monkeypatch):
    path = tmp_path / "board"
    monkeypatch.setenv(VARIABLE, str(path))
    theirs = Board.new(path, 3)
    assert theirs.furthest() == NEVER
    for rank, step in ((0, 2), (2, 70_000_000_000)):
        shared_board(3, 0, "run", bool).write(rank, Entry(step=step))
    assert [entry.step for entry in theirs.read().values()] == [2, NEVER, 70_000_000_000]
    assert Board.new(path, 3).furthest() == NEVER


def test_without_a_place_for_it_nothing_is_known(tmp_path, monkeypatch):
    with mock.patch.object(board, "gettempdir", return_value=str(tmp_path / "missing")):
        assert boards(2) == [None, None]
    assert shared_board(1, 0, "run", bool) is None  # a rank of its own
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))  # as who has started the ranks is
    assert shared_board(1, 0, "run", bool) is None
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=f"GAN_BOARD is '{tmp_path}', which cannot be written to .*; unset it"):
        shared_board(2, 0, "run", bool)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Entry(), "has played no phase yet"),
        (Entry(step=0), "begins step 0"),
        (Entry(1, 0, 0, True, "judge"), "plays phase 'judge' of step 0"),
        (Entry(1, 0, 0, False, "judge"), "has ended step 0 and begins no other"),
    ],
)
def test_a_place_in_words(entry, words):
    assert str(entry) == words


# ---- failure ----


RANK_3 = f"rank 3 (process {os.getpid()} on {socket.gethostname()})"


def told(error, path, monkeypatch, status=1):
    """What the agent of rank 3 reads after an error."""
    monkeypatch.setenv(FILE, str(path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    failure.report(error)
    return failure.read(3, "host", ProcessFailure(0, 4711, status, str(path / "error.json")))


IN_A_WORKER = "Caught UserError in worker 0.\nTraceback: ...\ngan.errors.UserError: 3.png cannot be read"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UserError("type another batch"), REFUSED, "type another batch"),
        (RankLost("rank 1 is gone"), FOLLOWS, "rank 1 is gone"),
        (WorkerLost("a lost worker"), ERROR, f"{RANK_3} ended with a lost worker"),
        (UserError(IN_A_WORKER), REFUSED, "3.png cannot be read"),
        (UserError("no \x1b[2J.png"), REFUSED, "no \\x1b[2J.png"),
        (ValueError("no such label\nand more"), ERROR, f"{RANK_3} ended with ValueError: no such label"),
        (KeyError(), ERROR, f"{RANK_3} ended with KeyError"),
        (KeyboardInterrupt(), ERROR, f"{RANK_3} was interrupted"),
    ],
    ids=["refused", "lost", "worker", "in a worker", "escaped", "error", "without words", "interrupted"],
)
def test_the_agent_reads_what_a_rank_has_reported(error, kind, text, tmp_path, monkeypatch):
    found = told(error, tmp_path, monkeypatch)
    assert (found.kind, printable(str(found))) == (kind, text)
    if type(error) is ValueError:
        written = json.loads((tmp_path / "error.json").read_text())
        assert written["message"]["message"] == "ValueError: no such label"  # in torchrun's own table


def test_a_report_that_is_cut_off_is_not_there_for_the_agent(tmp_path, monkeypatch):
    """A process may be ended while it writes; torch's agent fails on half a file."""
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))

    def cut_off(path, text, encoding):
        path.touch()
        raise InterruptedError

    with mock.patch.object(Path, "write_text", cut_off), pytest.raises(InterruptedError):
        failure.report(ValueError("no"))
    monkeypatch.delenv(FILE)
    failure.report(ValueError("no"))  # without an agent nothing is written
    assert not (tmp_path / "error.json").exists()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-9, "was ended by signal 9 (Killed): from outside, or out of memory?"),
        (-11, "was ended by signal 11 (Segmentation fault)"),
        (3, "ended with status 3; see what it said"),
    ],
)
def test_a_rank_that_says_nothing_is_known_by_its_status(status, words, tmp_path):
    found = failure.read(1, "host", ProcessFailure(0, 4711, status, str(tmp_path / "none")))
    assert (str(found), found.kind) == (f"rank 1 (process 4711 on host) {words}", LOST if status == -9 else found.kind)


def test_the_cause_is_the_first_that_does_not_follow_another():
    follows, first, second, killed = (
        Failure(0, 1, "host", "why", kind, at=at)
        for kind, at in ((FOLLOWS, 1.0), (ERROR, 2.0), (REFUSED, 3.0), (LOST, 0.0))
    )
    assert cause([follows, second, first]) is first
    assert cause([follows, first, killed]) is killed
    assert cause([follows]) is follows


def test_ranks_that_go_different_ways_are_no_refusal():
    assert failure.failed(1, UserError("type ddp")).refused
    apart = failure.failed(1, RanksDiverged("rank 1 plays phase 'g' where rank 0 plays 'd'"))
    assert not apart.refused and str(apart).startswith("rank 1 plays")


# ---- equal rows ----


class Watched(HashStore):
    """A store that counts what is asked of it."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def check(self, keys):
        self.asked += 1
        return super().check(keys)


@pytest.fixture
def store():
    made = Watched()
    with mock.patch.object(equal_rows, "default_store", lambda: made):
        yield made


def three(*first):
    return [EqualRows(mock.Mock(size=3, rank=rank, gather=lambda _: list(first)), "run") for rank in range(3)]


def step(ranks, number, *sizes):
    """All ranks begin a step, then each checks. Returns who is told what."""
    for rank, size in zip(ranks, sizes, strict=True):
        rank.begin(torch.zeros(size))
    told = {}
    for who, rank in enumerate(ranks):
        try:
            rank.check("judge", number)
            rank.check("fool", number)
        except UserError as error:
            told[who] = str(error)
    return told


def test_the_first_step_is_compared_on_all_ranks_together(store):
    for rank in three(8, 8, 6):
        with pytest.raises(UserError, match=r"^rank 2's batch has 6 rows and rank 0's 8, .* drop_last=True"):
            rank.begin(torch.zeros(8))


def test_a_change_on_all_ranks_is_no_error_and_steps_of_one_size_ask_nothing_of_the_store(store):
    ranks = three(8, 8, 8)
    assert [step(ranks, number, 8, 8, 8) for number in range(5)] == [{}] * 5
    assert store.asked == 0
    sizes = (8, 4, 8, 8, 6, 5, 4, 3, 8)
    assert [step(ranks, number, size, size, size) for number, size in enumerate(sizes, 5)] == [{}] * len(sizes)
    assert store.num_keys() <= 2 * 3  # however often it changes


@pytest.mark.parametrize(
    ("sizes", "told", "message"),
    [
        ((8, 2, 8), {1}, "rank 1's batch has 2 rows and rank 0's 8"),
        ((2, 8, 8), {0}, "rank 1's batch has 8 rows and rank 0's 2"),
        ((4, 4, 8), {0, 1}, "rank 2's batch has 8 rows and rank 0's 4"),
        ((4, 5, 6), {0, 1, 2}, "rank 1's batch has 5 rows and rank 0's 4"),
    ],
)
def test_the_ranks_whose_size_has_changed_find_a_difference(sizes, told, message, store):
    ranks = three(8, 8, 8)
    for number, size in enumerate((8, 4, 8)):  # an equal change before, of which the store still has the traces
        assert step(ranks, number, size, size, size) == {}
    found = step(ranks, 3, *sizes)
    assert found.keys() == told
    for text in found.values():
        assert text.startswith(f"phase 'judge' of step 3: {message}, so the mean over ranks is not")


def test_a_fast_rank_that_has_begun_the_next_step_confuses_nobody(store):
    slow, fast, _ = ranks = three(8, 8, 8)
    assert step(ranks, 0, 8, 8, 8) == {}
    for rank in ranks:
        rank.begin(torch.zeros(4))
    fast.check("judge", 1)
    fast.begin(torch.zeros(6))
    slow.check("judge", 1)


def test_one_rank_compares_nothing_and_a_batch_without_rows_is_left_to_who_plays_it(store):
    alone = EqualRows()
    alone.begin(torch.zeros(8))
    alone.begin(torch.zeros(3))
    alone.check("judge", 1)
    for rank in three(0, 0, 0):
        rank.begin(None)
        rank.check("judge", 0)
