"""Whoever goes without a word is named to all others, and whoever says good-bye is not."""

import asyncio
import errno
import json
import multiprocessing as mp
import os
import queue
import signal
import socket
import sys
import threading
import time
from asyncio import log
from contextlib import ExitStack, closing, contextmanager, suppress
from unittest.mock import Mock, patch

import pytest

from strategies.processes import lifeline
from strategies.processes.failure import LOST, REFUSED, Failure
from strategies.processes.lifeline import Lifeline
from tests.support.commands import until

pytestmark = pytest.mark.alone
SOON = 20  # what comes at once, on a machine that is busy
TURNS = 5  # of each lifeline's loop, in which what was sent to it is read and told to the others
HERE = "127.0.0.1"


class Line(Lifeline):
    """Puts what it learns into a queue."""

    def __init__(self, rank):
        self.ends = queue.Queue()
        super().__init__(rank, self.ends.put)

    def learns(self):
        return self.ends.get(timeout=SOON)


def quiet(*lines):
    """Nobody has learned anything, also when each has read what was sent to it. However busy the machine is."""
    for line in TURNS * lines:
        if line._thread.is_alive():
            line._call(asyncio.sleep(0.01))
    for thread in threading.enumerate():
        if thread.name == "lifeline-end":
            thread.join(SOON)
    return all(line.ends.empty() for line in lines)


@contextmanager
def world(size, where=HERE):
    """That many lifelines, tied, and where rank 0 listens."""
    lines = [Line(rank) for rank in range(size)]
    place = lines[0].listen(where)
    for line in lines[1:]:
        line.join(HERE, *place)
    try:
        yield lines, place
    finally:
        for line in lines:
            line.leave()


@contextmanager
def someone(port, says=b""):
    """A connection by hand, and a file of what it hears."""
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as connection, connection.makefile("rb") as hears:
        with suppress(ConnectionError):
            connection.sendall(says)
        yield hears


def joins(*place):
    """A rank gets in, and leaves."""
    line = Line(1)
    line.join(*place)
    line.leave()


def hello(token, rank):
    lost = {"rank": rank, "process": 4321, "host": "far", "why": lifeline.GONE, "kind": LOST}
    return f"{token} {json.dumps(lost)}\n".encode()


def killed(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_who_goes_without_a_word_is_named_to_all_others():
    """The control too: a lost rank is never quiet."""
    with world(3) as (lines, (port, token)):
        with someone(port, hello(token, 3)) as hears:
            assert json.loads(hears.readline())["process"] == os.getpid()  # rank 0 has answered
            assert quiet(*lines)
        assert not quiet(*lines)
        assert [line.ends.qsize() for line in lines] == [1, 1, 1]
        for line in lines:
            assert str(line.learns()) == f"rank 3 (process 4321 on far) {lifeline.GONE}"


def test_a_killed_rank_0_is_named_by_all():
    ours, theirs = mp.Pipe()

    def first():
        theirs.send(Line(0).listen(HERE))
        time.sleep(10 * SOON)

    process = mp.get_context("fork").Process(target=first, daemon=True)
    process.start()
    place = ours.recv()
    lines = [Line(rank) for rank in (1, 2)]
    for line in lines:
        line.join(HERE, *place)
    assert quiet(*lines)
    killed(process)
    for line in lines:
        assert line.learns() == Failure(0, process.pid, socket.gethostname(), lifeline.GONE, LOST)
        line.leave()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_good_bye_is_no_alarm_in_any_order(order):
    with world(3) as (lines, _):
        for rank in order:
            lines[rank].leave()
        assert quiet(*lines)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_reason_reaches_the_others_and_not_oneself(rank):
    with world(3) as (lines, _):
        end = Failure(rank, 7, "here", "batch 5 is not divisible", REFUSED)
        lines[rank].leave(end)
        assert [line.learns() for line in lines if line.obituary.rank != rank] == [end, end]
        assert quiet(*lines) and str(end) == "batch 5 is not divisible"


def test_the_first_end_counts_and_late_comers_hear_of_it():
    with world(4) as (lines, (port, token)):
        first = Failure(3, 7, "here", "ended with ValueError: a")
        lines[3].leave(first)
        assert lines[1].learns() == first
        lines[2].leave(Failure(2, 8, "here", "ended with OSError: b"))
        assert lines[0].learns() == first
        assert quiet(*lines[:2])
        late = Line(5)
        late.join(HERE, port, token)
        assert late.learns() == first
        late.leave()


@pytest.mark.promise(
    "strangers at the port by which ranks name each other",
    "it listens where ranks talk; a stranger has seconds and few bytes; nothing that is sent ends it",
)
def test_ranks_of_one_host_meet_on_loopback_and_others_at_the_address_that_they_are_told():
    with world(2) as ((first, _), _):
        assert first._listener.getsockname()[0] == HERE
    with world(2, "localhost") as ((first, _), _):  # on another host a name may lead to another address
        assert first._listener.getsockname()[0] in ("::", "0.0.0.0")


NO_MESSAGES = (
    *(b"[" * 1000 + b"\n", b"[]\n", b"{}\n", b"\xff\n", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * (2 << 16)),
    hello("", 3).replace(b"4321", b"[]").lstrip(),
)


@pytest.mark.promise("strangers at the port by which ranks name each other")
def test_nothing_that_is_sent_ends_it_or_raises_an_alarm(monkeypatch):
    """Neither before the token, nor with it, nor after it."""
    monkeypatch.setattr(log.logger, "handle", (alarms := []).append)
    with world(2) as (lines, (port, token)):
        for says in NO_MESSAGES:
            for greeting in (says, token.encode() + b" " + says, hello("guessed", 1)):
                with someone(port, greeting) as hears, suppress(ConnectionError):
                    assert hears.read() == b"", greeting  # closed, or reset
        with someone(port), someone(port, token.encode()):  # they say nothing, or too little, and go
            assert quiet(*lines)
        assert quiet(*lines)
        with socket.create_connection((HERE, port), timeout=SOON) as connection:
            connection.sendall(hello(token, 3))
            assert json.loads(connection.recv(4096))["process"] == os.getpid()
            connection.sendall(b"".join(NO_MESSAGES))
            assert quiet(*lines)
        assert [line.learns().rank for line in lines] == [3, 3]  # it went without a word
    assert alarms == []  # asyncio has nothing to complain of


@pytest.mark.promise("strangers at the port by which ranks name each other")
def test_a_stranger_has_a_few_seconds_and_bytes(monkeypatch):
    monkeypatch.setattr(lifeline, "STRANGE", 0.2)
    with world(2) as (lines, (port, _)):
        for says in (b"", b"x" * (1 << 18)):
            with someone(port, says) as hears, suppress(ConnectionError):
                assert hears.read() == b""
        assert quiet(*lines)
        assert not lines[0]._strangers


@pytest.mark.promise("strangers at the port by which ranks name each other")
def test_a_rank_gets_in_among_any_number_of_strangers():
    """They take no more file handles than a few, and not the rank's turn."""
    with world(1) as ((first,), place), ExitStack() as strangers:
        for _ in range(3 * lifeline.STRANGERS):
            strangers.enter_context(someone(place[0]))
        joins(HERE, *place)
        assert len(first._strangers) <= lifeline.STRANGERS


def test_a_rank_that_is_sent_away_comes_again(monkeypatch):
    """As one that was slow to speak among many strangers."""
    with world(1) as (_, place), monkeypatch.context() as patched:
        known, refuses = lifeline.from_json, [ValueError]

        def busy(said):
            if refuses:
                raise refuses.pop()
            return known(said)

        patched.setattr(lifeline, "from_json", busy)
        joins(HERE, *place)
        assert not refuses


def test_without_file_handles_it_waits_for_some(monkeypatch):
    with world(1) as (_, place):
        accept, fails = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 2

        def none_left(listener):
            if fails:
                raise fails.pop()
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", none_left)
        monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.1)
        joins(HERE, *place)
        assert not fails


@pytest.mark.promise("strangers at the port by which ranks name each other")
def test_it_says_so_if_its_thread_has_failed():
    with (
        world(2) as (lines, _),
        pytest.warns(UserWarning, match=r"^rank 0 does not hear of lost ranks .* SystemExit\(9\)"),
    ):
        lines[0]._loop.call_soon_threadsafe(sys.exit, 9)
        lines[0]._thread.join(SOON)
        assert not lines[0]._thread.is_alive()
        assert quiet(*lines)  # it is not taken for lost


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400\r\n", b"[]\n"])
def test_another_program_is_not_taken_for_rank_0(answer, monkeypatch):
    monkeypatch.setattr(lifeline, "HELLO", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answers():
            connection, _ = other.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(1 << 16)
                assert connection.recv(1 << 16) == b""  # the rank has gone

        thread = threading.Thread(target=answers)
        thread.start()
        line = Line(1)
        with pytest.raises(OSError, match="rank 0 does not answer there"):
            line.join(HERE, other.getsockname()[1], "token")
        thread.join()
        assert quiet(line)
        line.leave()


def test_both_kinds_of_address_lead_to_rank_0():
    with world(1, "localhost") as ((first,), place):  # a name, which may lead elsewhere on another host
        for host in (HERE, "localhost", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            joins(host, *place)
        assert quiet(first)


def test_without_ipv6_there_is_ipv4(monkeypatch):
    create = socket.create_server

    def switched_off(place, *, family=socket.AF_INET, **options):
        if family == socket.AF_INET6:
            raise OSError("Cannot assign requested address")
        return create(place, family=family, **options)

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    monkeypatch.setattr(socket, "create_server", switched_off)
    with world(2, "localhost") as (lines, _):
        assert quiet(*lines)


@pytest.mark.promise(
    "the network to a host is cut",
    "each side names the other within 30 s, and goes on when it is joined",
)
def test_the_kernel_asks_after_a_silent_host():
    """tests/system/test_two_hosts.py cuts the cable; this looks at both ends."""
    with world(2) as (lines, _):
        for line in lines:
            line._call(asyncio.sleep(0))  # what it does at a new connection has begun by then
            (peer,) = line._peers
            asks = peer.get_extra_info("socket").getsockopt
            assert asks(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert asks(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * lifeline.SILENCE <= 15_000
            assert asks(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 4 >= asks(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(110, "Connection timed out"), "has not been heard of for 15 seconds: is its host switched off"),
        (OSError(113, "No route to host"), "has not been heard of for 15 seconds: is its host switched off"),
        (ConnectionResetError(104, "Connection reset by peer"), "is gone without a word: killed"),
    ],
)
def test_a_dark_host_is_told_from_a_killed_process(error, words):
    with world(1) as ((first,), _):
        reader = asyncio.StreamReader(loop=first._loop)
        reader.set_exception(error)
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with closing(ours), closing(theirs), patch.object(lifeline, "_watch"):
            first._call(
                first._follow(reader, Mock(get_extra_info=lambda _: ours), Failure(1, 7, "far", lifeline.GONE, LOST))
            )
        end = first.learns()
        assert str(end).startswith(f"rank 1 (process 7 on far) {words}")
        assert end.lost


def test_a_forked_worker_does_not_hold_the_connection_of_a_killed_rank():
    ours, theirs = mp.Pipe()

    def rank(place):
        line = Line(1)
        line.join(HERE, *place)
        worker = os.fork()  # as a loader's worker, that outlives its rank for a while
        if worker == 0:
            line.leave()  # whatever it does with what it has inherited
            theirs.send(sorted(os.listdir("/proc/self/fd")))
            time.sleep(10 * SOON)
            os._exit(0)
        theirs.send(worker)
        time.sleep(10 * SOON)

    with world(1) as ((first,), place):
        process = mp.get_context("fork").Process(target=rank, args=(place,), daemon=True)
        process.start()
        (worker,) = (each for each in (ours.recv(), ours.recv()) if isinstance(each, int))
        assert quiet(first)
        killed(process)
        try:
            assert first.learns().lost
            os.kill(worker, 0)  # it is still there
        finally:
            os.kill(worker, signal.SIGKILL)


def test_nothing_is_left_open():
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with world(4) as (lines, (port, _)), someone(port):
            lines[2].leave(Failure(2, 1, "here", "ended with ValueError: x"))
            assert lines[3].learns().rank == 2
    Line(0).leave()  # one that nobody has joined
    assert until(lambda: set(threading.enumerate()) <= threads, SOON)
    assert len(os.listdir("/proc/self/fd")) <= files
