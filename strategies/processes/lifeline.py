"""The lifeline: a connection from every rank to rank 0. Through it all ranks learn at once which rank is lost.

It is written by hand, for two reasons. torch's watchdog has only a time limit, and does not know for which rank a
collective waits. And torchrun ends the processes that it started without a message. The lifeline costs nothing in a
step, because nothing is sent until a rank leaves.

[Note: who is gone]
When a process ends, in any way, the kernel closes its connections. The kernel also checks by itself whether a silent
host still answers. So no thread has to send signs of life, and a rank that computes for minutes, or that a debugger has
stopped, does not count as lost. A rank that leaves sends a message first, with the reason if there is one. A rank whose
connection ends without a message is lost.
"""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

SILENCE = 20  # seconds without an answer after which a host counts as lost
HELLO = 10  # seconds for a rank to reach rank 0
LONGEST = 1 << 16  # the most bytes of a message
GONE = "is gone without a word: killed, or out of memory?"


@dataclass(frozen=True)
class End:
    """How and why a rank left training too early."""

    rank: int
    process: int
    host: str
    why: str
    lost: bool = False  # it sent no message itself
    whole: bool = False  # `why` is the complete message to print: that of a UserError

    def __str__(self) -> str:
        return self.why if self.whole else f"rank {self.rank} (process {self.process} on {self.host}) {self.why}"


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens, and the token that a rank must send there."""

    hosts: tuple[str, ...]
    port: int
    token: str
    process: int
    host: str


@dataclass(eq=False)
class _Peer:
    """The other end of a connection. Its rank is unknown until it has sent the right token."""

    socket: socket.socket
    rank: int | None = None
    process: int = 0
    host: str = ""
    unread: bytes = b""
    here: bool = True


class Lifeline:
    """One rank's side of the lifeline. Rank 0 listens, and forwards the first `End` that it receives to all ranks.

    One thread sends and receives everything. `listen` and `join` start it, and `leave` ends it. When this rank gets the
    first `End`, `learned` is called with it, once, in a thread of its own.
    """

    def __init__(self, rank: int, learned: Callable[[End], None]) -> None:
        self.rank, self.process, self.host = rank, os.getpid(), socket.gethostname()
        self._learned = learned
        self._end: End | None = None
        self._peers: list[_Peer] = []
        self._listener: socket.socket | None = None
        self._token = ""
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._last_words: dict[str, Any] = {"bye": True}
        self._thread = threading.Thread(target=self._listen, name="lifeline", daemon=True)
        self._left = False
        _OPEN.add(self)

    # ---- connecting ----

    def listen(self, hosts: Iterable[str]) -> Address:
        """For rank 0: listen for the others, which will try these host names and this host's own name."""
        self._token = secrets.token_hex(16)
        self._listener = _listener()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        names = tuple(dict.fromkeys((*hosts, self.host)))
        return Address(names, self._listener.getsockname()[1], self._token, self.process, self.host)

    def join(self, address: Address) -> str | None:
        """For the other ranks: connect to rank 0. Returns None, or why it failed."""
        problems = []
        for host in address.hosts:
            try:
                connection = socket.create_connection((host, address.port), timeout=HELLO)
            except OSError as error:
                problems.append(f"{host} port {address.port}: {error}")
                continue
            try:
                hello = {"token": address.token, "rank": self.rank, "process": self.process, "host": self.host}
                connection.sendall(_line(hello))
                if _first_line(connection) != _line({"welcome": self.rank}):
                    raise OSError("another program answers there")
            except OSError as error:
                problems.append(f"{host} port {address.port}: {error}")
                connection.close()
                continue
            self._add(_Peer(connection, 0, address.process, address.host))
            self._thread.start()
            return None
        return "; ".join(problems)

    # ---- leaving ----

    def leave(self, end: End | None = None) -> None:
        """Send good-bye, or why this rank leaves too early, and close everything. A second call does nothing."""
        if self._left:
            return
        self._left = True
        if end is not None:
            self._last_words = {"end": asdict(end)}
        if self._thread.is_alive():
            self._waker.send(b"!")
            if threading.current_thread() is not self._thread:
                self._thread.join()
        else:
            self._close()

    # ---- the thread ----

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    self._tell(self._last_words)
                    return self._close()
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data.here:
                    self._hear(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the other side has closed the connection already
            return
        self._add(_Peer(connection))

    def _add(self, peer: _Peer) -> None:
        _watchful(peer.socket)
        self._peers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> None:
        try:
            heard = peer.socket.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError as error:
            return self._lose(peer, error)
        if not heard:
            return self._lose(peer, None)
        *lines, peer.unread = (peer.unread + heard).split(b"\n")
        for line in lines:
            if peer.here:
                self._take(peer, line)
        if len(peer.unread) > LONGEST:
            self._drop(peer)

    def _take(self, peer: _Peer, line: bytes) -> None:
        try:
            message = json.loads(line)
            if peer.rank is None:
                self._greet(peer, **message)
            elif "end" in message:
                end = End(**message["end"])
                if end.rank == peer.rank:
                    self._drop(peer)
                self._learn(end)
            elif "bye" in message:
                self._drop(peer)
        except (ValueError, TypeError, AttributeError):  # a program that is not a rank
            self._drop(peer)

    def _greet(self, peer: _Peer, token: str, rank: int, process: int, host: str) -> None:
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return self._drop(peer)
        peer.rank, peer.process, peer.host = int(rank), int(process), str(host)
        _send(peer, {"welcome": peer.rank})
        if self._end is not None:
            _send(peer, {"end": asdict(self._end)})

    def _lose(self, peer: _Peer, error: OSError | None) -> None:
        self._drop(peer)
        if peer.rank is None:
            return
        dark = isinstance(error, OSError) and not isinstance(error, ConnectionError)  # timed out, or unreachable
        why = (
            f"has not been heard of for {SILENCE} seconds: is its host switched off, or the network down?"
            if dark
            else GONE
        )
        self._learn(End(peer.rank, peer.process, peer.host, why, lost=True))

    def _learn(self, end: End) -> None:
        """Only the first end counts, because it causes the later ones."""
        if self._end is not None:
            return
        self._end = end
        if self.rank == 0:
            self._tell({"end": asdict(end)})
        threading.Thread(target=self._learned, args=(end,), name="lifeline-end", daemon=True).start()

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            if peer.rank is not None:
                _send(peer, message)

    def _drop(self, peer: _Peer) -> None:
        peer.here = False
        self._peers.remove(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _sockets(self) -> list[socket.socket]:
        ours = [self._waker, self._wake, *(peer.socket for peer in self._peers)]
        return ours if self._listener is None else [*ours, self._listener]

    def _close(self) -> None:
        self._selector.close()
        for each in self._sockets():
            each.close()


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _first_line(connection: socket.socket) -> bytes:
    """Read one line, and nothing after it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST:
        byte = connection.recv(1)
        if not byte:
            raise OSError("it closed the connection")
        line += byte
    return line


def _send(peer: _Peer, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # this peer is gone too, and the thread will notice it
        peer.socket.send(_line(message))  # much smaller than the kernel's buffer, so it is sent at once


def _listener() -> socket.socket:
    """A listening socket on a free port, for IPv4 and, if the machine has it, IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError:  # the system supports IPv6, but it is switched off
            pass
    return socket.create_server(("", 0), backlog=1024)


def _watchful(connection: socket.socket) -> None:
    """Let the kernel probe the other host every few seconds, and close the connection if it does not answer."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": SILENCE // 4,
        "TCP_KEEPALIVE": SILENCE // 4,  # the same on macOS
        "TCP_KEEPINTVL": SILENCE // 4,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * SILENCE,
    }
    for name, value in wanted.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_OPEN: "weakref.WeakSet[Lifeline]" = weakref.WeakSet()


def _let_go() -> None:
    """Close the connections in a forked process. A loader's worker would keep them open after its rank is killed."""
    for lifeline in list(_OPEN):
        lifeline._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
