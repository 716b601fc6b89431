"""The memory that the ranks of a host have in common, where each says where it is."""

from unittest import mock

import pytest

from gan.files.errors import UserError
from strategies.processes import board
from strategies.processes.board import NEVER, VARIABLE, Board, Entry, shared_board


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Nobody has given a board, and one is made here."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(board, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def two():
    """The boards of two ranks of a host: the second one comes where the first one waits for it."""
    others = []
    one = shared_board(2, 6, "run", lambda: others.append(shared_board(2, 6, "run", bool)))
    return one, *others


def test_each_reads_what_the_other_wrote_and_no_file_is_left(place):
    one, other = two()
    assert not list(place.iterdir())
    one.write(6, Entry(7, 2**32 - 1, 3, True, "jüge"))
    other.write(7, Entry(8, 5, 4, False, "x" * 500))
    assert one.read() == other.read() == {6: Entry(7, 2**32 - 1, 3, True, "jüge"), 7: Entry(8, 5, 4, False, "x" * 127)}


def test_who_has_started_the_ranks_reads_their_steps(place, monkeypatch):
    path = place / "board"
    monkeypatch.setenv(VARIABLE, str(path))
    theirs = Board.new(path, 3)
    assert theirs.furthest() == NEVER
    for rank, step in ((0, 2), (2, 70_000_000_000)):
        shared_board(3, 0, "run", bool).write(rank, Entry(step=step))
    assert [entry.step for entry in theirs.read().values()] == [2, NEVER, 70_000_000_000]
    assert theirs.furthest() == 70_000_000_000
    assert Board.new(path, 3).furthest() == NEVER


def test_without_a_place_for_it_nothing_is_known(place, monkeypatch):
    with mock.patch.object(board, "gettempdir", return_value=str(place / "missing")):
        assert two() == (None, None)
    monkeypatch.setenv(VARIABLE, str(place / "gone"))  # as who has started the ranks is
    assert shared_board(1, 0, "run", bool) is None
    monkeypatch.setenv(VARIABLE, str(place))
    with pytest.raises(UserError, match=f"GAN_BOARD is '{place}', which cannot be written to .*; unset it"):
        shared_board(2, 0, "run", bool)


def test_a_place_in_words():
    places = Entry(), Entry(step=0), Entry(1, 0, 0, True, "judge"), Entry(1, 0, 0, False, "judge")
    assert [*map(str, places)] == [
        "has played no phase yet",
        "begins step 0",
        "plays phase 'judge' of step 0",
        "has ended step 0 and begins no other",
    ]
