"""The options of `python -m gan.verify`: its own, and the settings of the chosen run."""

from typing import Literal

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from gan.app.run import options as fit
from gan.app.run.parser import Parser
from gan.files.errors import UserError

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


def parse(argv: list[str] | None = None) -> Namespace:
    """The settings. `strategy` is a list of strategies and `devices` a list of numbers.

    `found` is the run and the checkpoint that `--from-checkpoint` means.
    """
    known = fit.early(fit.run_first(fit.arguments(argv)), run=None, from_checkpoint=None)
    run, saved, found = fit.DEFAULT_RUN, {}, None
    if known.from_checkpoint:
        typed = ["--run", known.run] if known.run else []
        resumed, found = fit.parse(["--resume", known.from_checkpoint, *typed])
        run, saved = resumed.run, fit.run_settings(resumed)
        if found is None:
            raise UserError("no run with a checkpoint in 'runs'; type the folder of a run after --from-checkpoint")
    settings = fit.parse_run(
        argv,
        _add_own,
        default=run,
        saved=saved,
        prog="python -m gan.verify",
        usage="[RUN] [--strategy POLICY...] [--devices N,N] [--steps N] [options]",
        description="Train a run on one device and under strategies on several ranks, and compare.",
        epilog=EXAMPLES,
    )
    settings.found = found
    settings.strategy = fit.strategies(settings.strategy)
    settings.devices = fit.numbers("devices", settings.devices)
    return settings


def _add_own(parser: Parser) -> None:
    add, what = parser.option, "strategies, as for gan.fit, with commas or spaces between them"
    add("--strategy", str, what, ["ddp", "zero1", "zero2", "zero3"], nargs="+")
    add("--devices", str, "numbers of ranks", "2,4")
    add("--steps", PositiveInt, "how many steps to train", 10)
    what = "begin there: a checkpoint, a run's folder, or auto (the newest run); its run and settings need not be typed"
    add("--from_checkpoint", str, what)
    what = "32 for networks that cast to float32 by hand; then distances are in units of what rounding does"
    add("--precision", Literal["64", "32"], what, "64")
    fit.add_checks(parser)
    parser.flag("--allow_refused", "a strategy that refuses the run is no failure")
    add("--limit", PositiveFloat, "seconds after which a training is said to hang", 600.0)
