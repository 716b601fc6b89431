"""What a rank says and does when another one ends: in one process, with the hard end put aside."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist

from gan.files.errors import RankLost, UserError, refuse
from strategies.processes import lost_ranks as survivor
from strategies.processes.lifeline import GONE
from strategies.processes.lost_ranks import Survivor
from tests.support import commands

pytestmark = pytest.mark.alone
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40623"
SOON = 20
ADVICE = "python -m gan.fit --resume runs/007"


class Exited(BaseException):
    """What os._exit is here."""


class Agreed(Exception):
    agreed = True


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """An exit that can be seen, soon after a loss; times that tests wait out are theirs to shorten."""
    exits, others = [], threading.enumerate()

    def leave(status):
        exits.append(status)
        raise Exited

    monkeypatch.setattr(survivor.os, "_exit", leave)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    for name, seconds in dict(GRACE=SOON, PATIENCE=SOON, QUIET=0.2, LIMIT=0.5, LOOK=0.02).items():
        monkeypatch.setattr(survivor, name, seconds)
    yield exits
    for thread in threading.enumerate():
        if thread.name.startswith("lifeline") and thread not in others:
            thread.join(SOON)


@contextlib.contextmanager
def world(size, per_host=8, children=None, connected=True):
    """Survivors in one process, tied; rank 0 has the children."""
    store = dist.HashStore()
    ranks = [Survivor(rank, rank - rank % per_host, children if rank == 0 else None) for rank in range(size)]
    for each in ranks:
        each.tie(store, size, "127.0.0.1", ADVICE if each.rank == 0 else "")
    try:
        for each in ranks:  # a rank is tied a moment before its thread has put the connection where `vanish` looks
            until(lambda each=each: not connected or len(each.lifeline._peers) == (1 if each.rank else size - 1))
        yield ranks
    finally:
        for each in ranks:
            leave(each)


def leave(survivor):
    survivor._out.set()
    survivor.lifeline.leave()


def vanish(rank):
    """As the kernel ends the connections of a killed process, which then does nothing more."""
    rank.lifeline._hear = rank.lifeline._tell = lambda _: None
    for peer in list(rank.lifeline._peers):  # its thread takes them out meanwhile
        peer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def fails(error):
    return mock.Mock(side_effect=error)


def learns(rank, words, error=None):
    """What a rank says whose collective breaks, if it knows why."""
    with pytest.raises(RankLost, match=words) as caught:
        rank.run(fails(error or RuntimeError(GLOO)))
    return caught.value


def until(condition):
    assert commands.until(condition, SOON)


def test_a_collective_that_breaks_names_the_rank_that_was_lost(capfd):
    with world(3) as ranks:
        threading.Timer(0.1, vanish, [ranks[2]]).start()  # the main thread knows before the lifeline does
        lost = learns(ranks[0], "")
        assert str(lost) == (
            f"rank 2 (process {os.getpid()} on {socket.gethostname()}) {GONE}\n"
            f"All ranks end; go on from the last whole checkpoint with\n  {ADVICE}"
        )
        assert refuse(lost) == 2
        assert capfd.readouterr().err == f"\nerror: {lost}\n"  # once, by either thread
        assert "Connection closed" in str(lost.__cause__)


def test_before_the_first_checkpoint_there_is_nothing_to_go_on_from():
    with world(2) as ranks:
        ranks[0].saved = lambda: False
        vanish(ranks[1])
        lost = learns(ranks[0], r"and there is no checkpoint yet; type the same command again$")
        assert ADVICE not in str(lost)


@pytest.mark.promise("a second Ctrl-C")
def test_a_rank_that_a_person_ends_at_once_tells_the_others_why(quick):
    with world(2) as ranks:
        with pytest.raises(Exited):
            ranks[0].interrupt("ended at step 5 without saving", 130)
        assert quick == [130]
        learns(ranks[1], r"^ended at step 5 without saving$")


def test_the_others_say_that_they_end_as_well(capfd):
    with world(3) as ranks:
        vanish(ranks[2])
        since = time.monotonic()
        lost = learns(ranks[1], r"^rank 1 ends as well: rank 2 .process", dist.DistBackendError("NCCL error"))
        assert time.monotonic() - since >= survivor.QUIET
        assert "ends as well" not in capfd.readouterr().err
        assert refuse(lost) == 2
        assert capfd.readouterr().err == f"error: {lost}\n"


def test_of_the_first_rank_the_next_one_speaks_and_on_another_host_its_first():
    with world(5, per_host=3) as ranks:
        vanish(ranks[0])
        for rank in (1, 3):
            assert learns(ranks[rank], rf"^rank 0 (?s:.*)\n  {ADVICE}$").said
        for rank in (2, 4):
            learns(ranks[rank], rf"^rank {rank} ends as well: rank 0 ")


@pytest.mark.promise(
    "a collective never returns",
    "a lost rank ends it; ranks in different phases are named after the time limit",
)
def test_a_collective_that_never_returns_is_ended(quick, capfd, monkeypatch):
    monkeypatch.setattr(survivor, "GRACE", 0.2)
    with world(3) as ranks:
        vanish(ranks[2])
        until(lambda: quick == [2])  # rank 0
        assert capfd.readouterr().err.count("error: rank 2") == 1
        until(lambda: quick == [2, 2])  # rank 1, later
        assert capfd.readouterr().err.count("error: rank 1 ends as well: rank 2") == 1


def test_a_collective_that_never_returns_is_ended_though_nobody_listens(quick, monkeypatch):
    monkeypatch.setattr(survivor, "GRACE", 0.2)
    closed = mock.Mock(write=mock.Mock(side_effect=BrokenPipeError))
    with world(2) as ranks, mock.patch.object(sys, "stderr", closed):
        vanish(ranks[1])
        until(lambda: quick == [2])


def test_after_a_loss_no_program_lives_on(quick):
    with world(2) as ranks:
        vanish(ranks[1])
        learns(ranks[0], "")
        assert quick == []
        until(lambda: quick == [2])


def test_training_that_is_complete_is_left_alone(quick):
    with world(2) as ranks:

        def training():
            vanish(ranks[1])
            ranks[0]._known.wait(SOON)
            return "complete"

        assert ranks[0].run(training) == "complete"
        time.sleep(2 * survivor.LIMIT)
        assert quick == []


def test_a_mistake_on_one_rank_is_said_in_its_own_words():
    with world(3) as ranks:
        with pytest.raises(UserError, match=r"^images/3.png cannot be read$") as caught:
            ranks[2].run(fails(UserError("images/3.png cannot be read")))
        assert not isinstance(caught.value, RankLost)
        assert not learns(ranks[0], r"^images/3.png cannot be read$").said
        learns(ranks[1], r"^rank 1 ends as well: images/3.png cannot be read$")


def test_a_mistake_on_one_rank_is_said_where_the_others_wait_for_it(quick, capfd, monkeypatch):
    monkeypatch.setattr(survivor, "PATIENCE", 0.2)
    with world(2) as ranks:
        with pytest.raises(UserError):
            ranks[1].run(fails(UserError("images/3.png cannot be read")))
        until(lambda: quick == [2])
        assert capfd.readouterr().err == "\nerror: images/3.png cannot be read\n"


@pytest.mark.promise("a rank raises an error", "the others end with that error and the rank's name")
def test_an_error_on_one_rank_names_rank_and_error():
    with world(2) as ranks:
        with pytest.raises(SystemExit):
            ranks[1].run(fails(SystemExit(3)))
        first = f"rank 1 (process {os.getpid()} on {socket.gethostname()}) ended with SystemExit: 3\n"
        assert str(learns(ranks[0], "")).startswith(first)


def test_the_same_error_on_all_ranks_stays_what_it_is(quick):
    with world(3) as ranks:
        for rank in ranks:
            with pytest.raises(UserError, match=r"^batch 5$") as caught:
                rank.run(fails(UserError("batch 5")))
            assert not isinstance(caught.value, RankLost)
        time.sleep(2 * survivor.LIMIT)
        assert quick == []


@pytest.mark.parametrize("error", [Agreed(), None])
def test_an_end_that_all_have_agreed_on_alarms_nobody(error, quick, capfd, monkeypatch):
    monkeypatch.setattr(survivor, "PATIENCE", 0.2)
    with world(3) as ranks:
        for rank in (ranks[1], ranks[0]):
            with pytest.raises(Agreed) if error else contextlib.nullcontext():
                rank.run(fails(error) if error else lambda: None)
        time.sleep(2 * survivor.PATIENCE)  # the last one still writes a picture
        assert not any(rank._known.is_set() for rank in ranks)
        assert quick == []
        assert capfd.readouterr().err == ""


def test_a_collective_that_breaks_by_itself_is_this_ranks_own_error(monkeypatch):
    monkeypatch.setattr(survivor, "GRACE", 0.2)
    with world(2) as ranks:
        since = time.monotonic()
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            ranks[0].run(fails(RuntimeError(GLOO)))
        assert time.monotonic() - since >= survivor.GRACE  # it has waited for news
        monkeypatch.setattr(survivor, "GRACE", SOON)
        learns(ranks[1], r"rank 0 .* ended with RuntimeError: .*Connection closed by peer")


def test_an_error_that_was_made_of_a_broken_collective_is_no_cause():
    error = UserError("the checkpoint's networks are of other sizes")
    error.__cause__ = RuntimeError(GLOO)
    with world(2) as ranks:
        vanish(ranks[1])
        learns(ranks[0], r"^rank 1 .* is gone", error)


def test_after_a_loss_a_mistake_of_the_users_is_still_said():
    with world(2) as ranks:
        vanish(ranks[1])
        until(ranks[0]._known.is_set)
        with pytest.raises(UserError, match=r"^the disk is full$"):
            ranks[0].run(fails(UserError("the disk is full")))


def test_a_rank_that_cannot_reach_rank_0_trains_and_says_so(monkeypatch):
    monkeypatch.setattr(survivor.Lifeline, "join", mock.Mock(side_effect=TimeoutError("timed out")))
    words = r"rank 1 cannot reach rank 0 at 127.0.0.1 port \d+ .timed out.*torch's time limit"
    with pytest.warns(UserWarning, match=words), world(2, connected=False) as ranks:
        assert ranks[1].run(lambda: 3) == 3
        assert ranks[1].advice == ADVICE


def test_a_store_may_serve_several_trainings():
    store = dist.HashStore()
    for _ in range(2):
        ranks = [Survivor(rank) for rank in range(2)]
        for each in ranks:
            each.tie(store, 2, "127.0.0.1", ADVICE)
        assert ranks[0].run(lambda: 3) == 3
        vanish(ranks[1])
        leave(ranks[1])
    assert store.num_keys() == 3  # an address each, and their number


# ---- families, before there is a lifeline ----


def child(code="import time; time.sleep(60)"):
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.fixture
def impatient(monkeypatch):
    for name in ("GRACE", "PATIENCE"):
        monkeypatch.setattr(survivor, name, 0.2)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by signal 9 (Killed)"),
        ("raise SystemExit(0)", "ended with status 0; see what it said"),
    ],
)
def test_a_child_that_ends_before_training_is_named(code, words, quick, capfd, impatient):
    children = {1: child(), 2: child(code)}
    rank0 = Survivor(0, children=children)
    until(lambda: quick == [2])
    assert f"error: rank 2 (process {children[2].pid} on {socket.gethostname()}) {words}" in capfd.readouterr().err
    assert children[1].wait(SOON) == -signal.SIGKILL  # it ends with its parent
    leave(rank0)


def test_a_parent_that_is_gone_is_named(quick, capfd, impatient):
    rank1 = Survivor(1, parent=2**22 + 1)
    until(lambda: quick == [2])
    assert "error: rank 0 (process 4194305 on" in capfd.readouterr().err
    leave(rank1)


def test_a_killed_child_is_told_from_one_that_crashed():
    children = {1: child("import os; os.kill(os.getpid(), 11)")}
    children[1].wait()
    with world(2, children=children) as ranks:
        ranks[0].advice = ""
        vanish(ranks[1])
        learns(ranks[0], r"by signal 11 .Segmentation fault.$")


def test_a_loss_ends_the_children_and_a_failed_child_may_finish_what_it_says():
    children = {1: child(), 2: child("import time; time.sleep(0.5)")}
    with world(3, children=children) as ranks:
        with pytest.raises(ValueError, match=r"^x$"):
            ranks[2].run(fails(ValueError("x")))
        learns(ranks[0], "ended with ValueError: x")
    assert children[2].wait() == 0
    assert children[1].wait() == -signal.SIGKILL


@pytest.mark.parametrize(("error", "left"), [(ValueError("x"), False), (Agreed(), True)])
def test_children_end_with_a_parent_that_failed(error, left, monkeypatch):
    at_exit = []
    monkeypatch.setattr(survivor.atexit, "register", lambda *call: at_exit.append(call))
    children = {1: child()}
    rank0 = Survivor(0, children=children)
    with pytest.raises(type(error)):
        rank0.run(fails(error))
    assert children[1].poll() is None  # it ends after rank 0 has said the error
    for function, *arguments in at_exit:
        function(*arguments)
    with pytest.raises(subprocess.TimeoutExpired) if left else contextlib.nullcontext():
        assert children[1].wait(1 if left else SOON) == -signal.SIGKILL
    children[1].kill()
    children[1].wait()
