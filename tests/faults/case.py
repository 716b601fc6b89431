"""A case: a folder and dice of its own, and the commands that it runs, each of which is held to the rules."""

import contextlib
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gan.edit import main as edit
from gan.evaluate import main as evaluate
from gan.export import main as export
from gan.fit import main as fit
from gan.plan import main as plan
from gan.sample import main as sample
from gan.verify import main as verify
from tests.faults import rules
from tests.faults.child import LIMIT, Ended, Main, Running, adopt, end_with_parent
from tests.faults.rules import Files, Seen

COMMANDS: dict[str, Main] = {
    "fit": fit,
    "resume": fit,
    "sample": sample,
    "edit": edit,
    "evaluate": evaluate,
    "export": export,
    "plan": plan,
    "verify": verify,
}
Check = Callable[[Ended], Iterable[str]]


@dataclass
class Result:
    """What came of a case: its commands, and what was wrong."""

    kind: str
    number: int
    story: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Case:
    """What a kind of case gets. `known` is the folder of runs that were trained before, to `copy` from."""

    def __init__(self, place: Path, known: Path, chance: random.Random, result: Result) -> None:
        self.known, self.chance, self.result = known, chance, result
        self.folder, self._beside = place / "here", place / "beside"
        self.folder.mkdir()
        os.chdir(self.folder)

    def copy(self, name: str) -> Path:
        """Copy one of the known folders into this case's. The result is relative to it, as a person would type it."""
        shutil.copytree(self.known / name, self.folder, symlinks=True, dirs_exist_ok=True)
        return next(Path("runs").glob("001-*")) if Path("runs").is_dir() else Path()

    def say(self, *what: object) -> None:
        """Note what the case has done, for the report of a failure."""
        self.result.story.append(" ".join(map(str, what)))

    def run(self, what: str, *words: object, main: Main | None = None, limit: float = LIMIT, **about: Any) -> Ended:
        """Run a command to its end, and hold the rules. `what` is a key of COMMANDS; the rest is for `judge`."""
        return self.judge(*self.start(what, *words, main=main, limit=limit), **about)

    def start(
        self, what: str, *words: object, main: Main | None = None, limit: float = LIMIT
    ) -> tuple[str, list[str], Files, Running]:
        """Run a command, and do not wait for it. `judge` does."""
        typed = [str(word) for word in words]
        self.say("$ gan." + what.replace("resume", "fit"), shlex.join(typed))
        before = rules.files(self.folder)
        return what, typed, before, Running(main or COMMANDS[what], typed, self.folder, self._beside, limit)

    def judge(
        self,
        what: str,
        typed: list[str],
        before: Files,
        running: Running,
        check: Check | None = None,
        **about: Any,
    ) -> Ended:
        """Wait for a command, and note what is wrong. `check` may find more that is; `about` goes to `Seen`."""
        ended = running.wait()
        taken = tuple(check(ended)) if check is not None and not ended.hung else ()
        after = rules.files(self.folder)
        seen = Seen(what, tuple(typed), ended, before, after, taken=taken, **about)
        if wrong := rules.broken(seen):
            self.result.wrong += wrong
            self.say(f"  status {ended.status}; it said last: {ended.said[-600:]!r}")
        return ended


Kind = Callable[[Case], None]


def dice(seed: int, number: int, kind: str = "") -> random.Random:
    return random.Random(f"{seed} {number} {kind}")


def play(kind: Kind, name: str, seed: int, number: int, known: Path) -> Result:
    """Play one case in this process."""
    result, began = Result(name, number), time.monotonic()
    adopt()
    place = Path(tempfile.mkdtemp(prefix="gan-faults-", dir=known.parent))
    try:
        kind(Case(place, known, dice(seed, number, name), result))
    except BaseException:  # noqa: BLE001 - a fault of the case itself, which is a failure too
        result.wrong.append(f"the case itself: {traceback.format_exc()}")
    finally:
        os.chdir("/")
        shutil.rmtree(place, ignore_errors=True)
    result.seconds = time.monotonic() - began
    return result


class Player:
    """A case in a process of its own, which is a fork of this one."""

    def __init__(self, kind: Kind, name: str, seed: int, number: int, known: Path) -> None:
        self.result = Result(name, number)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self.pipe: Connection = ours
        self.process = os.fork()
        if self.process == 0:
            with contextlib.suppress(BaseException):
                end_with_parent()
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                theirs.send(play(kind, name, seed, number, known))
            os._exit(0)
        theirs.close()

    def end(self) -> Result:
        """What came of it. It waits."""
        with contextlib.suppress(EOFError):
            self.result = self.pipe.recv()
            os.waitpid(self.process, 0)
            return self.result
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self.result.wrong.append(f"the case itself: its process ended with {status}")
        return self.result

    def stop(self) -> None:
        """End it and its commands."""
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
