"""Whoever goes without a word is named to all others, and whoever says good-bye is not."""

import json
import multiprocessing as mp
import os
import queue
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

import pytest

from strategies.processes import lifeline
from strategies.processes.lifeline import Address, End, Lifeline

pytestmark = pytest.mark.alone
SOON = 20  # what comes at once, on a machine that is busy
NEVER = 0.3  # what must not come has come by then, as a rule


class Line(Lifeline):
    """Puts what it learns into a queue."""

    def __init__(self, rank):
        self.ends = queue.Queue()
        super().__init__(rank, self.ends.put)

    def listen(self, hosts):
        self.address = super().listen(hosts)
        return self.address

    def learns(self):
        return self.ends.get(timeout=SOON)


def quiet(*lines):
    """Nobody has learned anything, and nobody does for a while."""
    time.sleep(NEVER)
    return all(line.ends.empty() for line in lines)


@contextmanager
def world(size):
    """That many lifelines, tied."""
    lines = [Line(rank) for rank in range(size)]
    address = lines[0].listen(["127.0.0.1"])
    assert [line.join(address) for line in lines[1:]] == [None] * (size - 1)
    try:
        yield lines
    finally:
        for line in lines:
            line.leave()


@contextmanager
def someone(address, **hello):
    """A connection by hand; what it says first, and a file of what it hears."""
    place = ("127.0.0.1", address.port)
    with socket.create_connection(place, timeout=SOON) as connection, connection.makefile("rb") as hears:
        if hello:
            connection.sendall(json.dumps(hello).encode() + b"\n")
        yield connection, hears


def hello(address, rank):
    return {"token": address.token, "rank": rank, "process": 4321, "host": "far"}


def test_who_goes_without_a_word_is_named_to_all_others():
    with world(3) as lines:
        address = lines[0].address
        with someone(address, **hello(address, 3)) as (_, hears):
            assert json.loads(hears.readline()) == {"welcome": 3}
        for line in lines:
            end = line.learns()
            assert (end.rank, end.process, end.host, end.lost, end.whole) == (3, 4321, "far", True, False)
            assert str(end) == "rank 3 (process 4321 on far) is gone without a word: killed, or out of memory?"


def test_a_killed_rank_0_is_named_by_all():
    ours, theirs = mp.Pipe()

    def first():
        line = Line(0)
        theirs.send(line.listen(["127.0.0.1"]))
        time.sleep(10 * SOON)

    process = mp.get_context("fork").Process(target=first, daemon=True)
    process.start()
    address = ours.recv()
    lines = [Line(rank) for rank in (1, 2)]
    assert [line.join(address) for line in lines] == [None, None]
    assert quiet(*lines)
    os.kill(process.pid, signal.SIGKILL)
    for line in lines:
        end = line.learns()
        assert (end.rank, end.process, end.host, end.lost) == (0, process.pid, socket.gethostname(), True)
        line.leave()
    process.join()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_good_bye_is_no_alarm_in_any_order(order):
    with world(3) as lines:
        for rank in order:
            lines[rank].leave()
        assert quiet(*lines)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_reason_reaches_the_others_and_not_oneself(rank):
    with world(3) as lines:
        end = End(rank, 7, "here", "batch 5 is not divisible", whole=True)
        lines[rank].leave(end)
        others = [line for line in lines if line.rank != rank]
        assert [line.learns() for line in others] == [end, end]
        assert quiet(lines[rank])
        assert str(end) == "batch 5 is not divisible"


def test_the_first_end_counts_and_late_comers_hear_of_it():
    with world(4) as lines:
        first, second = End(3, 7, "here", "ended with ValueError: a"), End(2, 8, "here", "ended with OSError: b")
        lines[3].leave(first)
        assert lines[1].learns() == first
        lines[2].leave(second)
        assert lines[0].learns() == first
        assert quiet(*lines[:2])
        address = lines[0].address
        with someone(address, **hello(address, 5)) as (_, hears):
            assert json.loads(hears.readline()) == {"welcome": 5}
            assert json.loads(hears.readline()) == {"end": asdict(first)}


STRANGERS = (
    b'{"token": "guessed", "rank": 1, "process": 1, "host": "x"}\n',
    b'{"token": 7, "rank": 1, "process": 1, "host": "x"}\n',
    b'{"rank": 1}\n',
    b"GET / HTTP/1.1\r\n\r\n",
    b"[]\n",
    b"\xff\xfe\n",
    b"x" * (2 << 16),
    b"",
)


def test_strangers_are_shown_the_door_and_raise_no_alarm():
    with world(2) as lines:
        for words in STRANGERS:
            with someone(lines[0].address) as (connection, hears), suppress(ConnectionError):
                connection.sendall(words)
                assert not words or hears.read() == b"", words  # closed, or reset
        assert quiet(*lines)
        late = Line(5)
        assert late.join(lines[0].address) is None
        late.leave()


def test_who_cannot_be_reached_is_named():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        line = Line(1)
        problem = line.join(Address(("127.0.0.1", "no-such-host.invalid"), port, "token", 1, "far"))
    assert f"127.0.0.1 port {port}: " in problem
    assert f"no-such-host.invalid port {port}: " in problem
    line.leave()


def test_the_next_name_is_tried_where_somebody_else_answers(monkeypatch):
    monkeypatch.setattr(lifeline, "HELLO", 1)
    with world(1) as (first,), socket.create_server(("127.0.0.2", 0)) as other:
        # The other server says nothing, and stands where the first name leads to.
        reached = []

        def connect(place, timeout, create=socket.create_connection):
            reached.append(place[0])
            where = other.getsockname() if place[0] == "wrong" else ("127.0.0.1", place[1])
            return create(where, timeout=timeout)

        monkeypatch.setattr(socket, "create_connection", connect)
        line = Line(1)
        assert line.join(replace(first.address, hosts=("wrong", "right"))) is None
        assert reached == ["wrong", "right"]
        line.leave()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_both_kinds_of_address_lead_to_rank_0(host):
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with world(1) as (first,):
        line = Line(1)
        assert line.join(replace(first.address, hosts=(host,))) is None
        line.leave()
        assert quiet(first)


def _has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_without_ipv6_there_is_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    create = socket.create_server

    def switched_off(place, *, family=socket.AF_INET, **options):
        if family == socket.AF_INET6:
            raise OSError("Cannot assign requested address")
        return create(place, family=family, **options)

    monkeypatch.setattr(socket, "create_server", switched_off)
    with world(2) as lines:
        assert quiet(*lines)


def test_the_kernel_asks_after_a_silent_host():
    with world(2) as lines:
        for line in lines:
            (peer,) = line._peers
            asks = peer.socket.getsockopt
            assert asks(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            tcp = {
                name: asks(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            }
            assert tcp["TCP_KEEPIDLE"] + tcp["TCP_KEEPINTVL"] * tcp["TCP_KEEPCNT"] <= 20
            assert tcp["TCP_USER_TIMEOUT"] <= 20_000


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(110, "Connection timed out"), "has not been heard of for 20 seconds: is its host switched off"),
        (OSError(113, "No route to host"), "has not been heard of for 20 seconds: is its host switched off"),
        (ConnectionResetError(104, "Connection reset by peer"), "is gone without a word: killed"),
    ],
)
def test_a_dark_host_is_told_from_a_killed_process(error, words):
    with world(2) as lines:
        (peer,) = lines[0]._peers

        class Gone:
            def recv(self, size, real=peer.socket):
                raise error

            def __getattr__(self, name, real=peer.socket):
                return getattr(real, name)

        peer.socket = Gone()
        lines[1]._peers[0].socket.send(b"?")  # wakes the other end
        end = lines[0].learns()
        assert words in str(end)
        assert end.lost


def test_a_forked_worker_does_not_hold_the_connection_of_a_killed_rank():
    ours, theirs = mp.Pipe()
    fork = mp.get_context("fork")

    def rank(address):
        line = Line(1)
        assert line.join(address) is None
        pid = os.fork()  # as a loader's worker, that outlives its rank for a while
        if pid == 0:
            time.sleep(10 * SOON)
            os._exit(0)
        theirs.send(pid)
        time.sleep(10 * SOON)

    with world(1) as (first,):
        process = fork.Process(target=rank, args=(first.address,), daemon=True)
        process.start()
        worker = ours.recv()
        assert quiet(first)
        os.kill(process.pid, signal.SIGKILL)
        try:
            assert first.learns().rank == 1
            os.kill(worker, 0)  # it is still there
        finally:
            os.kill(worker, signal.SIGKILL)
        process.join()


def test_nothing_is_left_open():
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with world(4) as lines:
            lines[2].leave(End(2, 1, "here", "ended with ValueError: x"))
            assert lines[3].learns().rank == 2
    Line(0).leave()  # one that nobody has joined
    deadline = time.monotonic() + SOON
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
