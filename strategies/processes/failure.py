"""How a rank has failed, as it tells the agent that has started it: in the file that torch's elastic agent names.

torchrun reads the same file, and shows its message in the table with which it ends.
"""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gan.files.errors import RankLost, UserError, WorkerLost, printable

FILE = "TORCHELASTIC_ERROR_FILE"  # torch's name for the variable
REFUSED, LOST, ERROR = "refused", "lost", "error"


@dataclass(frozen=True)
class Failure:
    """One rank's failure. `kind` is REFUSED for a mistake that no restart cures, and LOST if it follows another's."""

    rank: int
    process: int
    host: str
    status: int
    kind: str = ERROR
    message: str = ""

    @property
    def killed(self) -> bool:
        """Whether a signal has ended it."""
        return self.status < 0

    def __str__(self) -> str:
        if self.message and self.kind != ERROR:
            return self.message
        who = f"rank {self.rank} (process {self.process} on {self.host})"
        if self.message:
            return f"{who} ended with {self.message}"
        return f"{who} {how(self.status)}"


def how(status: int) -> str:
    """How a process has ended, by its exit status, as text."""
    if status >= 0:
        return f"ended with status {status}; see what it said"
    why = ": from outside, or out of memory?" if status == -signal.SIGKILL else ""
    return f"was ended by signal {-status} ({signal.strsignal(-status)}){why}"


def report(error: BaseException) -> None:
    """Write why this rank ends into the file that its agent reads. Without an agent it does nothing."""
    path = os.environ.get(FILE)
    if not path:
        return
    user = isinstance(error, UserError)
    again = isinstance(error, WorkerLost) or not user
    kind = LOST if isinstance(error, RankLost) else ERROR if again else REFUSED
    line = (str(error).strip().splitlines() or [""])[0]
    text = str(error).rpartition("UserError: ")[2].strip() if user else f"{type(error).__name__}: {line}".rstrip(": ")
    extra = {"timestamp": str(int(time.time())), "py_callstack": ""}
    part = Path(f"{path}.{threading.get_ident()}")  # another thread may end this process meanwhile
    part.write_text(json.dumps({"kind": kind, "message": {"message": printable(text), "extraInfo": extra}}), "utf-8")
    part.replace(path)


def read(rank: int, host: str, torchs: Any) -> Failure:
    """A Failure from torch's ProcessFailure."""
    said = torchs.error_file_data if isinstance(torchs.error_file_data.get("message"), dict) else {}
    kind, message = said.get("kind", ERROR), said.get("message", {}).get("message", "")
    return Failure(rank, torchs.pid, host, torchs.exitcode, kind, message)


def cause(failures: list[Failure]) -> Failure:
    """The failure that the others follow. torch lists those first that ended first."""
    return min(failures, key=lambda failure: failure.kind == LOST)
