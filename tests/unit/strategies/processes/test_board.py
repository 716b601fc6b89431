"""The memory that the ranks of a host have in common, where each says where it is."""

import os
import secrets
import threading
from unittest import mock

import pytest

from gan.files.errors import UserError
from strategies.processes import board
from strategies.processes.board import NEVER, VARIABLE, Board, Entry, shared_board


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
