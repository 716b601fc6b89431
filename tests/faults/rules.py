"""What must hold after every command. A rule looks at what was seen, and says what is wrong, in a line each."""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.faults.child import Ended

Files = dict[str, str]  # what is in a folder: a path, and what tells one content from another
CACHES = ("*gan-cache/*", "*.lock", "*/lock")  # what any command may write anew
TRAINED = ("*.yaml", "*.txt", "*.csv", "*.png", "*.json", "samples/*", "checkpoints/step-[0-9]*[0-9].ckpt/*")
MAY_WRITE = {  # of the files that are there before
    "fit": (),
    "resume": tuple(f"runs/*/{name}" for name in TRAINED),
    "sample": ("runs/*/samples/*", "runs/*/styles/*"),
    "edit": ("runs/*/samples/*",),
    "evaluate": ("runs/*/evaluation-*.json",),
    "export": ("runs/*/export/*",),
    "plan": (),
    "verify": (),
}
STATUSES = {"plan": (0, 1, 2), "verify": (0, 1, 2)}  # 1: it does not fit, or is not exact
KEEP = "keep"  # in the names of files that no run wrote
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")


@dataclass(frozen=True)
class Seen:
    """A command's end, and the files before and after. `refusable`: by status 2 it says that it has done nothing."""

    what: str  # a key of MAY_WRITE
    words: tuple[str, ...]
    ended: Ended
    before: Files
    after: Files
    refusable: bool = True
    signals: tuple[int, ...] = ()  # that it was sent
    damaged: str = ""  # a pattern of what the case itself has damaged meanwhile
    taken: tuple[str, ...] = ()  # what a kind of case has found to be silently taken, or lost


def the_status(seen: Seen) -> Iterator[str]:
    allowed = (*STATUSES.get(seen.what, (0, 2)), *(-signal for signal in seen.signals))
    if not seen.ended.hung and seen.ended.status not in allowed:
        yield f"the exit status is {seen.ended.status}"


def no_traceback(seen: Seen) -> Iterator[str]:
    if "Traceback (most recent call last)" in seen.ended.said:
        lines = [
            line for line in seen.ended.said.splitlines() if re.match(r"\w[\w.]*(Error|Exception|Interrupt)\b", line)
        ]
        yield f"a traceback: {lines[-1][:300] if lines else '?'}"


def no_hang(seen: Seen) -> Iterator[str]:
    if seen.ended.hung:
        first = re.split(r"^(?:Current t|T)hread .*$", seen.ended.hung, flags=re.MULTILINE)[-1]  # the main thread
        frames = re.findall(r'File "(?:.*/)?([^/"]+/[^/"]+)", line (\d+) in (\w+)', first)
        yield f"no end within {seen.ended.seconds:.0f} s: {' < '.join(':'.join(frame) for frame in frames[:6])}"


def nobody_left(seen: Seen) -> Iterator[str]:
    yield from (f"still runs: {name}" for name in seen.ended.left)


def the_reason(seen: Seen) -> Iterator[str]:
    """Who refuses says why, in a line that a terminal can show."""
    if seen.ended.status == 2 and not re.search(r"^(.*: )?error: \S", seen.ended.err, re.MULTILINE):
        yield f"status 2 without an error line: {seen.ended.err[-200:]!r}"
    if (found := CONTROL.search(seen.ended.said)) is not None:
        around = seen.ended.said[max(0, found.start() - 60) : found.end() + 20]
        yield f"the control character {found[0]!r} in {around!r}"


def nothing_lost(seen: Seen) -> Iterator[str]:
    """What no run wrote stays. What a run wrote changes only where the command may write, and not if it refuses."""
    refused = seen.refusable and seen.ended.status == 2
    resumes = seen.what == "fit" and any(word.startswith("--resume") for word in seen.words)
    allowed = CACHES if refused else (*CACHES, *MAY_WRITE["resume" if resumes else seen.what])
    if "--dry-run" in seen.words or "--dry_run" in seen.words:
        allowed = CACHES
    for path, content in seen.before.items():
        if seen.after.get(path) == content or fnmatch(path, seen.damaged):
            continue
        if KEEP in path or not any(fnmatch(path, pattern) for pattern in allowed):
            yield f"{path} is {'changed' if path in seen.after else 'gone'}"


def nothing_half_written(seen: Seen) -> Iterator[str]:
    """After a command there is no part of a file or of a checkpoint."""
    for path in seen.after.keys() - seen.before.keys():
        if re.search(r"\.part(/|$)", path) and not seen.ended.hung and seen.ended.status >= 0:
            yield f"{path} remains"


def nothing_taken(seen: Seen) -> Iterator[str]:
    """A damaged checkpoint that was accepted has given the right weights; see kinds/checkpoints.py."""
    yield from seen.taken


RULES: tuple[Callable[[Seen], Iterator[str]], ...] = (
    the_status,
    no_traceback,
    no_hang,
    nobody_left,
    the_reason,
    nothing_lost,
    nothing_half_written,
    nothing_taken,
)


def broken(seen: Seen) -> list[str]:
    """What is wrong, with the rule's name."""
    return [f"{rule.__name__.replace('_', ' ')}: {line}" for rule in RULES for line in rule(seen)]


def files(folder: Path) -> Files:
    """All files in a folder, and links as such."""
    found: Files = {}
    for place, folders, names in os.walk(folder):
        for name in (*names, *(each for each in folders if os.path.islink(os.path.join(place, each)))):
            path = Path(place, name)
            found[str(path.relative_to(folder))] = content(path)
    return found


def content(path: Path) -> str:
    about = path.lstat()
    if stat.S_ISREG(about.st_mode):
        return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
    return os.readlink(path) if stat.S_ISLNK(about.st_mode) else f"kind {stat.S_IFMT(about.st_mode)}"
