"""How a rank has failed, in the one form in which ranks tell each other and who has started them.

lifeline.py       a line to the other ranks
`report`          the file that torch's elastic agent names; torchrun shows its message in its last table
call_on_ranks.py  what a rank leaves in place of a result
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gan.files.errors import RankLost, UserError, WorkerLost, printable

FILE = "TORCHELASTIC_ERROR_FILE"  # torch's name for the variable
# The kinds: gone without a word; an error; a mistake that no restart cures; it follows the failure of another rank.
LOST, ERROR, REFUSED, FOLLOWS = "lost", "error", "refused", "follows"
# gloo ends a process after that line, by the signal SIGABRT.
UNLIKE = (
    "if a line above has 'op.preamble', ranks made unlike calls: let all of them call a network with batch norms, or "
    "call it after network.eval()"
)


@dataclass(frozen=True)
class Failure:
    """One rank's failure. `why` is what the rank did, or the complete message of one that is `whole`."""

    rank: int
    process: int
    host: str
    why: str
    kind: str = ERROR
    error: str = ""  # the type of the error
    traceback: str = ""
    at: float = 0.0  # when the rank has said so; 0 if it has not

    @property
    def lost(self) -> bool:
        return self.kind == LOST

    @property
    def whole(self) -> bool:
        return self.kind in (REFUSED, FOLLOWS)

    @property
    def refused(self) -> bool:
        """Whether this cannot be trained so. Ranks that diverge have come to that by what they have done."""
        return self.kind == REFUSED and self.error != "RanksDiverged"

    @property
    def what(self) -> str:
        """What has gone wrong, where the rank is known."""
        return self.why.removeprefix("ended with ")

    def __str__(self) -> str:
        return self.why if self.whole else f"rank {self.rank} (process {self.process} on {self.host}) {self.why}"


def failed(rank: int, error: BaseException, traceback: str = "") -> Failure:
    """How this process, which is that rank, fails by an error."""
    kind, why = ERROR, f"ended with {in_a_line(error)}"
    if isinstance(error, UserError):
        why = str(error).rpartition("UserError: ")[2].strip()  # a loader's worker gives its traceback too
        kind = FOLLOWS if isinstance(error, RankLost) and not error.refused else REFUSED
    if isinstance(error, WorkerLost):
        kind, why = ERROR, f"ended with {why}"
    if isinstance(error, KeyboardInterrupt):
        why = "was interrupted"
    return Failure(rank, os.getpid(), socket.gethostname(), why, kind, type(error).__name__, traceback, time.time())


def ended(rank: int, process: int, host: str, status: int) -> Failure:
    """A process has ended with this status, and has not said why."""
    if status >= 0:
        return Failure(rank, process, host, f"ended with status {status}; see what it said")
    known: dict[int, str] = {signal.SIGKILL: ": from outside, or out of memory?", signal.SIGABRT: f": {UNLIKE}"}
    why = known.get(-status, "")
    return Failure(rank, process, host, f"was ended by signal {-status} ({signal.strsignal(-status)}){why}", LOST)


def from_json(text: str | bytes) -> Failure:
    """A ValueError if the text is no failure."""
    try:
        found = Failure(**json.loads(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    for field in fields(Failure):
        if type(getattr(found, field.name)) is not field.type:
            raise ValueError(f"{field.name} is no {field.type}")
    return found


def as_json(found: Failure) -> str:
    return json.dumps(asdict(found), ensure_ascii=False)


def in_a_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def cause(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow. One of which nothing is said comes first: the others say what it caused."""
    return min(failures, key=lambda each: (each.kind == FOLLOWS, each.at))


def report(error: BaseException) -> None:
    """Write why this rank ends into the file that its agent reads. Without an agent it does nothing."""
    path = os.environ.get(FILE)
    if not path:
        return
    found = failed(int(os.environ.get("RANK", 0)), error)
    message = {"message": printable(found.what), "extraInfo": {"timestamp": str(int(found.at)), "py_callstack": ""}}
    part = Path(f"{path}.{threading.get_ident()}")  # another thread may end this process meanwhile
    part.write_text(json.dumps({"failure": as_json(found), "message": message}), "utf-8")
    part.replace(path)


def read(rank: int, host: str, torchs: Any) -> Failure:
    """A Failure from torch's ProcessFailure."""
    try:
        return from_json(torchs.error_file_data["failure"])
    except (KeyError, TypeError, ValueError):
        return ended(rank, torchs.pid, host, torchs.exitcode)
