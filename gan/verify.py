"""`python -m gan.verify`: does a run train under several strategies as it trains on one device?"""

import tempfile
from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from datasets.batches import check_divides
from gan.app.command import command, working
from gan.app.outputs import run, say
from gan.app.run import command_line, options, settings_file
from gan.app.run.parser import Numbers, Parser, items
from gan.app.run.resumed import to_resume
from gan.files.errors import UserError
from gan.runs import short_name
from gan.runs.run import Unchosen, made_to, shared

if TYPE_CHECKING:
    from gan.app.verifying.verification import OneDevice, Row, Verification

CASTS = "a phase casts float64 to float32 by hand, which rounds all that follows: type --precision 32"
WORDS = """distance: how far the last weights, buffers and averages are from those of one device, as a part of their
size (of 1, if they are smaller). exact: none is further than this, and no loss or norm of a gradient was:"""

EXAMPLES = """examples:
  python -m gan.verify my_game.py:my_run
  python -m gan.verify sean-faces --size 32 --faces 64 --strategy ddp,zero3 --devices 2
  python -m gan.verify sean-faces --strategy ddp zero3+offload 'generator=zero3,*=ddp' 'generator=zero1,*=zero2'
  python -m gan.verify --from-checkpoint runs/004-vqgan-faces/checkpoints/step-030000.ckpt
  python -m gan.verify r3gan-faces --help          the settings of that run

Names for all players may stand in one word, with commas. Pairs player=policy in one word are one strategy.
Choose a small size: on each number of ranks, every strategy trains the run once, on CPU processes.

exit status: 0 all exact; 1 something is not exact, refused, or fails; 2 nothing could be compared
"""


@command
def main(argv: list[str]) -> int:
    """Train and compare. Returns the exit status: 0 where all is exact, else 1; 2 if nothing could be compared."""
    settings = parse(argv)
    with working():
        from gan.app.verifying.verification import Verification
        from gan.export import take_from_run
        from strategies import PhaseStrategy

    take_from_run(settings, argv)
    for strategy in settings.strategy:
        PhaseStrategy(strategy)  # refuses what it cannot read, before anything is trained
    batch = settings.get("batch_size")
    if isinstance(batch, Unchosen):
        with made_to("train", ranks=lcm(*settings.devices)):
            settings.batch_size = shared(batch)
    for devices in settings.devices if batch is not None else ():
        check_divides(settings.batch_size, devices, "--batch-size ")
    start = settings.found and to_resume(
        settings.from_checkpoint, *settings.found, say=say, option="--from-checkpoint "
    )
    with tempfile.TemporaryDirectory() as folder:
        return _verify(settings, Verification(settings, Path(folder), start))


def parse(argv: list[str] | None = None) -> Namespace:
    """`strategy` and `devices` are lists. `found` is the run and the checkpoint that `--from-checkpoint` means."""
    known = command_line.early(command_line.run_first(command_line.arguments(argv)), run=None, from_checkpoint=None)
    run, saved, found = options.DEFAULT_RUN, {}, None
    if known.from_checkpoint:
        typed = ["--run", known.run] if known.run else []
        resumed, found = options.parse(["--resume", known.from_checkpoint, *typed])
        run, saved = resumed.run, options.run_settings(resumed)
        if found is None:
            raise UserError("no run with a checkpoint in 'runs'; type the folder of a run after --from-checkpoint")
    settings = options.parse_run(
        argv,
        _add_own,
        default=run,
        saved=saved,
        prog="python -m gan.verify",
        usage="[RUN] [--strategy POLICY...] [--devices N,N] [--steps N] [options]",
        description="Train a run on one device and under strategies on several ranks, and compare.",
        epilog=EXAMPLES,
    )
    settings_file.dump(settings, settings.run)  # refuses a setting that gan.fit refuses, and no rank can be given
    settings.found = found
    settings.strategy = options.strategies(settings.strategy)
    settings.devices = list(map(int, items(settings.devices)))
    return settings


def _add_own(parser: Parser) -> None:
    add, what = parser.option, "strategies, as for gan.fit, with commas or spaces between them"
    add("--strategy", str, what, ["ddp", "zero1", "zero2", "zero3"], nargs="+")
    add("--devices", Numbers, "numbers of ranks", "2,4")
    add("--steps", PositiveInt, "how many steps to train", 10)
    what = "begin there: a checkpoint, a run's folder, or auto (the newest run); its run and settings need not be typed"
    add("--from_checkpoint", str, what)
    what = "32 for networks that cast to float32 by hand; then distances are in units of what rounding does"
    add("--precision", Literal["64", "32"], what, "64")
    options.add_checks(parser)
    parser.flag("--allow_refused", "a strategy that refuses the run is no failure")
    add("--limit", PositiveFloat, "seconds after which a training is said to hang", 600.0)


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
    return 0 if passed == len(rows) and exact else 1


if __name__ == "__main__":
    run(main)
