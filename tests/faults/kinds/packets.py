"""What strangers send to the ports of a training: whatever it is, a killed rank is named afterwards.

Only ports that our own code opens are tried: those of sockets that Python listens on. torch's store and gloo listen
too. They trust whoever reaches them, and what is sent to them is torch's matter.
"""

import contextlib
import json
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from unittest import mock

from tests.faults.case import Case
from tests.support import crashes

STEPS = ("--max-steps", "400", "--save-every", "400", "--check", "false", "--strategy", "ddp")
WAIT = 2.0  # seconds for a packet to be taken
HANDLES = 400  # files that each rank may open
Place = tuple[str, int]


def packets(case: Case) -> None:
    """Send packets to a training of two ranks, then kill one of them."""
    victim = case.chance.choice((0, 1))
    ports, tokens = Notes("ports"), Notes("tokens")
    held: list[socket.socket] = []
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (HANDLES, most))  # for the ranks, which are forks of this process

    def kill(pipe: Connection) -> bool:
        if not crashes.after(0, crashes.STEP)(pipe):
            return False
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if not ports.read():
            case.result.wrong.append("the case itself: no rank listens on a port")
        for host, port in map(str.split, ports.read()):
            for _ in range(case.chance.choice((1, 1, 3))):
                name = case.chance.choice(list(PACKETS))
                case.say(f"to a port of the ranks: {name}")
                held.extend(PACKETS[name]((host, int(port)), tokens.read()[0].encode(), case.chance))
        time.sleep(0.2)
        for each in held if case.chance.random() < 0.5 else ():  # else they stay open until the end
            each.close()
        return True

    with contextlib.ExitStack() as stack:
        stack.enter_context(_noted(socket.socket, "listen", lambda own, _: ports.add(*_reached(own.getsockname()))))
        stack.enter_context(_noted(secrets, "token_hex", lambda _, token: tokens.add(token)))
        ended = crashes.train(Path("run"), 2, *STEPS, victim=victim, kill=kill, method="fork")
    for each in held:
        each.close()
    case.say(f"rank {victim} was killed; statuses {ended.statuses}, after {ended.seconds:.0f} s")
    if any("Traceback" in said for said in ended.said):
        case.result.wrong.append(f"no traceback: {ended.said}"[:2500])
        return  # which `assert_named` would call not named
    try:
        crashes.assert_named(ended, victim)
    except AssertionError as error:
        case.result.wrong.append(f"a killed rank is named: {error}"[:2500])


class Notes:
    """Lines in a file, to which the ranks add."""

    def __init__(self, name: str) -> None:
        self.path = Path(name).absolute()

    def add(self, *words: object) -> None:
        with self.path.open("a") as file:
            print(*words, file=file)

    def read(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


def _noted(owner: object, name: str, note: Callable[..., None]) -> contextlib.AbstractContextManager:
    """Inside the `with`, what comes of a function is noted in all ranks, which are forks of this process."""
    function = getattr(owner, name)

    def noted(*args: object, **kwargs: object) -> object:
        result = function(*args, **kwargs)
        note(args[0] if args else None, result)
        return result

    return mock.patch.object(owner, name, noted)


def _reached(name: tuple) -> Place:
    """Where a socket of this name is reached from here."""
    return ("127.0.0.1" if name[0] in ("0.0.0.0", "::") else name[0]), name[1]


# ---- packets: each gives the connections that stay open ----


def _say(place: Place, *parts: bytes, reset: bool = False) -> list[socket.socket]:
    """What a stranger says. It may be refused or hung up on."""
    with contextlib.suppress(OSError):
        connection = socket.create_connection(place, timeout=WAIT)
        with contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
        if not reset:
            return [connection]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    return []


def _many(place: Place, number: int, word: bytes = b"") -> list[socket.socket]:
    return [connection for _ in range(number) for connection in _say(place, word)]


def _end(**values: object) -> bytes:
    lost = {"rank": 1, "process": 1, "host": "x", "why": "y", "kind": "lost"}
    return json.dumps({**lost, **values}).encode()


Packet = Callable[[Place, bytes, Random], list[socket.socket]]
PACKETS: dict[str, Packet] = {
    "nothing": lambda place, token, chance: _say(place),
    "random bytes": lambda place, token, chance: _say(place, chance.randbytes(chance.randrange(1, 5000))),
    "random bytes, and a reset": lambda place, token, chance: _say(place, chance.randbytes(100), reset=True),
    "an empty line": lambda place, token, chance: _say(place, b"\n"),
    "a good-bye": lambda place, token, chance: _say(place, b"bye\n"),
    "a request of HTTP": lambda place, token, chance: _say(place, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a wrong token": lambda place, token, chance: _say(place, b"0" * len(token) + b" " + _end() + b"\n"),
    "a token with letters beyond ASCII": lambda place, token, chance: _say(place, "é".encode() * 16 + b" {}\n"),
    "a part of the token": lambda place, token, chance: _say(place, token[: chance.randrange(len(token))]),
    "the token without an end": lambda place, token, chance: _say(place, token),
    "the token and nothing": lambda place, token, chance: _say(place, token + b"\n"),
    "the token and random bytes": lambda place, token, chance: _say(
        place, token + b" " + chance.randbytes(200).replace(b"\n", b"") + b"\n"
    ),
    "the token and deep lists": lambda place, token, chance: _say(
        place, token + b" " + b"[" * chance.choice((1000, 20_000)) + b"\n"
    ),
    "deep lists": lambda place, token, chance: _say(place, b"[" * chance.choice((1000, 100_000)) + b"\n"),
    "the token and other JSON": lambda place, token, chance: _say(
        place, token + b" " + chance.choice((b"{}", b"[]", b"null", b"3", b'"x"', b'{"rank": 1}', _end(more=1))) + b"\n"
    ),
    "the token and a line without end": lambda place, token, chance: _say(place, token + b" ", *[b"x" * 65536] * 40),
    "a line without end": lambda place, token, chance: _say(place, *[b"x" * 65536] * 100),
    "many connections": lambda place, token, chance: _many(place, chance.choice((50, 300))),
    "many connections that say something": lambda place, token, chance: _many(place, 300, b"x"),
    "more connections than it has file handles": lambda place, token, chance: _many(place, HANDLES + 100),
    "many tokens in part": lambda place, token, chance: _many(place, 100, token[:-1]),
}
