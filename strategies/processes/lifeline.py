"""The lifeline: a connection from every rank to rank 0. Through it all ranks learn at once which rank is lost.

It is written by hand, because nothing else tells the other ranks. torch's watchdog has only a time limit, and does not
know for which rank a collective waits. torch's elastic agent (torchrun) sees the ranks of its own host only. srun,
mpirun and Lightning end the others without a message, or not at all. The lifeline costs nothing in a step, because
nothing is sent until a rank leaves.

[Note: who is gone]
When a process ends, in any way, the kernel closes its connections. The kernel also checks by itself whether a silent
host still answers. So no thread has to send signs of life, and a rank that computes for minutes, or that a debugger has
stopped, does not count as lost. A rank that leaves says so first, with the reason if there is one. A rank whose
connection ends without a word is lost.

[Note: what is sent]
A message is a line. A rank begins with rank 0's token and a `Failure`: what is to be said of it if it is lost. Rank 0
answers with its own. After that a rank sends only BYE, or the `Failure` that it has heard. A line that is no
message is passed over.

[Note: strangers]
Anybody who reaches the port may connect. Whoever has not shown the token is a stranger, and gets a few seconds and 64
kilobytes. If there are too many of them the oldest one goes. A rank speaks at once, so it is heard before it is the
oldest, and if not it comes again. So strangers can neither end the lifeline nor keep a rank out.
"""

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
import warnings
import weakref
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from ipaddress import ip_address
from typing import Any

from gan.files.system import LINUX, after_fork
from strategies.processes.failure import LOST, UNLIKE, Failure, as_json, from_json

SILENCE = 15  # seconds without an answer after which a host counts as lost
HELLO = 10  # seconds for a rank to reach rank 0
AGAIN = 0.2  # seconds until something that may work again is tried again
STRANGERS = 64  # so many at a time; see [Note: strangers]
STRANGE = 5  # seconds that each of them has
WAITING = 1024  # connections that the kernel holds until they are accepted
BYE = b"bye\n"
GONE = f"is gone without a word: killed, or out of memory? But {UNLIKE}"
DARK = "has not been heard of for {} seconds: is its host switched off, or the network down?"


class Lifeline:
    """One rank's side of the lifeline. Rank 0 listens, and forwards the first `Failure` that it receives to all ranks.

    One thread, which lives until `leave`, sends and receives everything. When this rank gets the first `Failure`,
    `heard` is called with it, once, in a thread of its own.
    """

    def __init__(self, rank: int, heard: Callable[[Failure], None]) -> None:
        self.obituary = Failure(rank, os.getpid(), socket.gethostname(), GONE, LOST)  # what others say if this rank is
        self._heard = heard
        self._end: Failure | None = None
        self._token = secrets.token_hex(16)
        self._peers: dict[StreamWriter, asyncio.Task] = {}  # which the loop alone would forget
        self._listener: socket.socket | None = None
        self._strangers: dict[StreamWriter, asyncio.Task] = {}  # the oldest first
        self._left, self._last_words = asyncio.Event(), BYE
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="lifeline", daemon=True)
        self._thread.start()
        _OPEN.add(self)

    # ---- called by the rank ----

    def listen(self, host: str) -> tuple[int, str]:
        """Rank 0 listens for ranks that look for this `host`. Returns the port, and the token that they must send."""
        self._listener = _listener(host)
        self._call(self._serve(self._listener))
        return self._listener.getsockname()[1], self._token

    def join(self, host: str, port: int, token: str) -> None:
        """For the other ranks: connect to rank 0. An OSError says why it failed."""
        until = time.monotonic() + HELLO
        while True:
            try:
                return self._call(self._hello(host, port, token, max(AGAIN, until - time.monotonic())))
            except OSError:
                if time.monotonic() + AGAIN > until:
                    raise
            time.sleep(AGAIN)

    def leave(self, end: Failure | None = None) -> None:
        """Say good-bye, or why this rank leaves too early, and close everything. A second call does nothing."""
        if self._thread.is_alive():
            self._last_words = BYE if end is None else _line(end)
            self._loop.call_soon_threadsafe(self._left.set)
            self._thread.join()

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(2 * HELLO)

    # ---- the thread ----

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._until_left())
            except BaseException as error:  # noqa: BLE001 - whatever it is, it must not be silent
                self._tell(BYE)  # it is not lost
                warnings.warn(
                    f"rank {self.obituary.rank} does not hear of lost ranks any more, because its lifeline has failed: "
                    f"{error!r}; if one is lost, the run ends only after torch's time limit",
                    stacklevel=1,
                )
        if self._listener is not None:
            self._listener.close()

    async def _until_left(self) -> None:
        await self._left.wait()
        self._tell(self._last_words)

    async def _serve(self, listener: socket.socket) -> None:
        # One is accepted in each turn of the loop, so that what it has sent is read before many others are there.
        await asyncio.start_server(self._connected, sock=listener, backlog=1)
        listener.listen(WAITING)

    def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._strangers[writer] = asyncio.create_task(self._greet(reader, writer))
        if len(self._strangers) > STRANGERS:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).cancel()
            oldest.close()

    async def _greet(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Somebody has connected. It is a rank if it knows the token. See [Note: strangers]."""
        try:
            async with asyncio.timeout(STRANGE):
                token, _, lost = (await reader.readline()).partition(b" ")
            if not hmac.compare_digest(token, self._token.encode()):
                raise ValueError("it does not know the token")
            rank = from_json(lost)
        except (OSError, ValueError, asyncio.CancelledError):  # a stranger may say anything
            self._strangers.pop(writer, None)
            writer.close()
            return
        self._peers[writer] = self._strangers.pop(writer)
        writer.write(_line(self.obituary))
        if self._end is not None:
            writer.write(_line(self._end))
        await self._follow(reader, writer, rank)

    async def _hello(self, host: str, port: int, token: str, patience: float) -> None:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"{token} ".encode() + _line(self.obituary))  # at once: see [Note: strangers]
                first = from_json(await reader.readline())
            except (OSError, ValueError, asyncio.CancelledError) as error:
                writer.close()
                raise OSError("rank 0 does not answer there") from error
        self._peers[writer] = asyncio.create_task(self._follow(reader, writer, first))

    async def _follow(self, reader: StreamReader, writer: StreamWriter, lost: Failure) -> None:
        """Hear a rank until it leaves. If it goes without a word it is `lost`."""
        _watch(writer.get_extra_info("socket"))
        try:
            line = None
            while line not in (b"", BYE):
                with contextlib.suppress(ValueError):  # no message, as BYE is none, or too long to be one
                    line = await reader.readline()
                    self._hear(lost if not line else from_json(line))
        except ConnectionError:
            self._hear(lost)
        except OSError:  # timed out, or unreachable
            self._hear(replace(lost, why=DARK.format(SILENCE)))
        finally:
            self._peers.pop(writer, None)
            writer.close()

    def _hear(self, end: Failure) -> None:
        """Only the first end counts, because it causes the later ones."""
        if self._end is None:
            self._end = end
            self._tell(_line(end))
            threading.Thread(target=self._heard, args=(end,), name="lifeline-end", daemon=True).start()

    def _tell(self, line: bytes) -> None:
        for peer in self._peers:
            peer.write(line)  # much smaller than the kernel's buffer, so it is sent at once


def _line(found: Failure) -> bytes:
    return as_json(found).encode(errors="replace") + b"\n"


def _listener(host: str) -> socket.socket:
    """A listening socket on a free port of this host: at its address, if `host` is one.

    On another host a name may lead to another address than here, where it often is that of loopback. So for a name it
    listens at all addresses, for IPv4 and, if the machine has it, IPv6.
    """
    with contextlib.suppress(ValueError, OSError):  # a name, or an address that only the others see
        family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=WAITING)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the system supports IPv6, but it is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=WAITING, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=WAITING)


def _watch(connection: socket.socket) -> None:
    """Let the kernel probe the other host every few seconds, and end the connection if it does not answer."""
    if not LINUX:  # all ranks are on this host
        return
    often = -(-SILENCE // 4)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, often)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, often)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE)  # also of the probes


_OPEN: "weakref.WeakSet[Lifeline]" = weakref.WeakSet()


def _let_go() -> None:
    """Let go of the connections in a forked process. A loader's worker would keep them after its rank is killed.

    They are replaced, not closed, so that their numbers stay taken: an object that remains may close its number again.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for lifeline in list(_OPEN):
        connections = (each.get_extra_info("socket") for each in (*lifeline._peers, *lifeline._strangers))
        for each in (*connections, lifeline._listener):
            if each is not None and each.fileno() >= 0:  # it is not closed
                os.dup2(nothing, each.fileno(), inheritable=False)
    os.close(nothing)


after_fork(_let_go)
