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
A message is a line. A rank begins with rank 0's token and an `End`: what is to be said of this rank if it is lost.
Rank 0 answers with its own. After that a rank sends only BYE, or the `End` that it has learned.
"""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import weakref
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any

SILENCE = 15  # seconds without an answer after which a host counts as lost
HELLO = 10  # seconds for a rank to reach rank 0
BYE = b"bye\n"
GONE = "is gone without a word: killed, or out of memory?"
DARK = "has not been heard of for {} seconds: is its host switched off, or the network down?"


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


class Lifeline:
    """One rank's side of the lifeline. Rank 0 listens, and forwards the first `End` that it receives to all ranks.

    One thread, which lives until `leave`, sends and receives everything. When this rank gets the first `End`, `learned`
    is called with it, once, in a thread of its own.
    """

    def __init__(self, rank: int, learned: Callable[[End], None]) -> None:
        self.lost = End(rank, os.getpid(), socket.gethostname(), GONE, lost=True)  # what others say if this rank is
        self._learned = learned
        self._end: End | None = None
        self._token = secrets.token_hex(16)
        self._peers: set[StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()  # the loop alone would forget them
        self._left, self._last_words = asyncio.Event(), BYE
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="lifeline", daemon=True)
        self._thread.start()
        _OPEN.add(self)

    # ---- called by the rank ----

    def listen(self) -> tuple[int, str]:
        """For rank 0: listen for the others. Returns the port, and the token that they must send there."""
        listener = _listener()
        self._call(self._serve(listener))
        return listener.getsockname()[1], self._token

    def join(self, host: str, port: int, token: str) -> None:
        """For the other ranks: connect to rank 0. An OSError says why it failed."""
        connection = socket.create_connection((host, port), timeout=HELLO)
        self._call(self._hello(connection, token))

    def leave(self, end: End | None = None) -> None:
        """Say good-bye, or why this rank leaves too early, and close everything. A second call does nothing."""
        if self._thread.is_alive():
            self._last_words = BYE if end is None else _line(end)
            self._loop.call_soon_threadsafe(self._left.set)
            self._thread.join()

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ---- the thread ----

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_left())

    async def _until_left(self) -> None:
        await self._left.wait()
        self._tell(self._last_words)
        if self._server is not None:
            self._server.close()

    async def _serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(lambda *streams: self._keep(self._greet(*streams)), sock=listener)

    async def _greet(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Somebody has connected. It is a rank if it knows the token."""
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError):  # a stranger may say anything
            token, _, lost = (await reader.readline()).partition(b" ")
            if hmac.compare_digest(token, self._token.encode()):
                writer.write(_line(self.lost))
                if self._end is not None:
                    writer.write(_line(self._end))
                await self._follow(reader, writer, _end(lost))

    async def _hello(self, connection: socket.socket, token: str) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(f"{token} ".encode() + _line(self.lost))
        try:
            async with asyncio.timeout(HELLO):
                first = _end(await reader.readline())
        except (OSError, ValueError, TypeError) as error:
            writer.close()
            raise OSError("rank 0 does not answer there") from error
        self._keep(self._follow(reader, writer, first))

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, reader: StreamReader, writer: StreamWriter, lost: End) -> None:
        """Hear a rank until it leaves. If it goes without a word it is `lost`."""
        _watch(writer.get_extra_info("socket"))
        self._peers.add(writer)
        try:
            while (line := await reader.readline()) not in (b"", BYE):
                self._learn(_end(line))
            if not line:
                self._learn(lost)
        except ConnectionError:
            self._learn(lost)
        except OSError:  # timed out, or unreachable
            self._learn(replace(lost, why=DARK.format(SILENCE)))
        finally:
            self._peers.discard(writer)
            writer.close()

    def _learn(self, end: End) -> None:
        """Only the first end counts, because it causes the later ones."""
        if self._end is None:
            self._end = end
            self._tell(_line(end))
            threading.Thread(target=self._learned, args=(end,), name="lifeline-end", daemon=True).start()

    def _tell(self, line: bytes) -> None:
        for peer in self._peers:
            peer.write(line)  # much smaller than the kernel's buffer, so it is sent at once


def _line(end: End) -> bytes:
    return json.dumps(asdict(end)).encode() + b"\n"


def _end(line: bytes) -> End:
    return End(**json.loads(line))


def _listener() -> socket.socket:
    """A listening socket on a free port, for IPv4 and, if the machine has it, IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the system supports IPv6, but it is switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _watch(connection: socket.socket) -> None:
    """Let the kernel probe the other host every few seconds, and end the connection if it does not answer."""
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
        sockets = [peer.get_extra_info("socket") for peer in lifeline._peers]
        for each in (*sockets, *(lifeline._server.sockets if lifeline._server else ())):
            if each.fileno() >= 0:  # it is not closed
                os.dup2(nothing, each.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)
