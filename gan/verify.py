"""`python -m gan.verify`: does a run train under several strategies as it trains on one device?"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from datasets.batches import check_divides
from gan.app.command import command, working
from gan.app.outputs import run, say
from gan.app.run.resumed import to_resume
from gan.app.verifying import options
from gan.runs import short_name

if TYPE_CHECKING:
    from gan.app.verifying.verification import OneDevice, Row, Verification

NOT_EXACT = 1
CASTS = "a phase casts float64 to float32 by hand, which rounds all that follows: type --precision 32"
WORDS = """distance: how far the last weights, buffers and averages are from those of one device, as a part of their
size (of 1, if they are smaller). exact: none is further than this, and no loss or norm of a gradient was:"""


@command
def main(argv: list[str]) -> int:
    """Train and compare. Returns the exit status: 0 where all is exact, else 1; 2 if nothing could be compared."""
    settings = options.parse(argv)
    with working():
        from gan.app.verifying.verification import Verification
        from strategies import PhaseStrategy

    for strategy in settings.strategy:
        PhaseStrategy(strategy)  # refuses what it cannot read, before anything is trained
    for devices in settings.devices if settings.get("batch_size") is not None else ():
        check_divides(settings.batch_size, devices, "--batch-size ")
    start = None
    if settings.found is not None:
        found, checkpoint = settings.found
        start = to_resume(settings.from_checkpoint, found, checkpoint, say, "--from-checkpoint ")
    with tempfile.TemporaryDirectory() as folder:
        return _verify(settings, Verification(argv, settings.limit, Path(folder), settings.precision, start))


def _verify(settings: Namespace, verification: "Verification") -> int:
    batch = f" of {settings.batch_size} sample{'s' * (settings.batch_size != 1)}" if settings.get("batch_size") else ""
    start = f" from {verification.start}" if verification.start else ""
    where = f"in float{settings.precision}, on ranks of this computer's CPU"
    say(f"{short_name(settings.run)}: {settings.steps} steps{batch}{start} {where}")
    one = verification.one(settings.precision)
    say(f"one device: {one.record.seconds:.1f} s", *([CASTS] if one.record.cast else []), "")

    width = max(len(word) for word in (*settings.strategy, "strategy"))
    say(f"{'strategy':{width}}  ranks{'distance':>20}")
    rows: list[Row] = []
    for strategy in settings.strategy:
        for devices in settings.devices:
            print(f"{strategy:{width}}{devices:7}", end="", flush=True)
            row = verification.row(strategy, devices)
            rows.append(row)
            say(f"{row.far:>20}  {row.words}", *(f"{'':{width + 29}}{line}" for line in row.more))
    return _conclude(rows, verification.known, settings.allow_refused)


def _conclude(rows: "Sequence[Row]", known: "Mapping[str, OneDevice]", allow_refused: bool) -> int:
    """Print what the words mean and what to do. Returns the exit status."""
    from gan.app.verifying.records import SPREAD
    from gan.app.verifying.verification import ADVICE

    say("", WORDS)
    for precision, one in known.items():
        tolerance = one.tolerance
        if tolerance.coarse:
            least = f"{tolerance.exact / SPREAD:.0e} at least"
            say(f"  {SPREAD:.0f} x rounding in float32: what the last bits of weights do to one device, {least}")
            continue
        above, total, most = tolerance.above, len(tolerance.ends), max(tolerance.ends.values(), default=0.0)
        more = f"; {above} of {total} tensors may be off by more, as rounding moves them by up to {most:.0e}"
        say(f"  {tolerance.exact:.0e} in float{precision}{more if above else ''}")
    say(*dict.fromkeys(ADVICE[kind] for row in rows for kind in row.advice))
    exact, refused = (sum(getattr(row, kind) for row in rows) for kind in ("exact", "refused"))
    say(f"{exact} of {len(rows)} exact" + (f", {refused} refused" if refused else ""))
    passed = exact + sum(row.refused and not row.wrong for row in rows if allow_refused)
    return 0 if passed == len(rows) and exact else NOT_EXACT


if __name__ == "__main__":
    run(main)
