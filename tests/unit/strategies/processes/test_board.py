"""What ranks of one host write for each other, in memory that outlives them."""

import os
import secrets
import threading
from unittest import mock

from strategies.processes import places
from strategies.processes.places import Board, Entry


def boards(size):
    """Those of some ranks, made at the same time."""
    run, meet, made = secrets.token_hex(8), threading.Barrier(size), {}

    def make(rank):
        made[rank] = Board(rank, size, run, meet.wait)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(size)]


def test_each_reads_what_the_others_wrote_and_no_file_is_left(tmp_path):
    with mock.patch.object(places, "gettempdir", return_value=str(tmp_path)):
        one, two, three = boards(3)
    assert not os.listdir(tmp_path)
    two.write(7, 2**32 - 1, 3, True, "jüge".encode())
    three.write(8, 5, 4, False, b"x" * 500)
    assert one.read(0) is None
    assert one.read(1) == Entry(7, 2**32 - 1, 3, True, "jüge".encode()) == three.read(1)
    assert two.read(2) == Entry(8, 5, 4, False, b"x" * 127)


def test_without_a_place_for_it_nothing_is_known(tmp_path):
    with mock.patch.object(places, "gettempdir", return_value=str(tmp_path / "missing")):
        one, two = boards(2)
    two.write(1, 1, 0, True, b"judge")
    assert one.read(1) is None


def test_a_rank_of_its_own_has_none():
    one = Board()
    one.write(1, 1, 0, True, b"judge")
    assert one.memory is None and one.read(0) is None
