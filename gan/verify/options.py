"""The options of `python -m gan.verify`: its own, and the settings of the chosen run."""

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from gan.fit import run_options
from gan.fit.parser import Parser

STRATEGIES = "ddp,zero1,zero2,zero3"

EXAMPLES = """examples:
  python -m gan.verify my_game.py:my_run
  python -m gan.verify sean-faces --size 32 --faces 64 --strategy ddp,zero3 --devices 2
  python -m gan.verify sean-faces --strategy ddp zero3+offload 'generator=zero3,*=ddp' 'generator=zero1,*=zero2'
  python -m gan.verify r3gan-faces --help          the settings of that run

Names for all players may stand in one word, with commas. Pairs player=policy in one word are one strategy.
Choose a small size: on each number of ranks, every strategy trains the run once, on CPU processes.

exit status: 0 all exact; 1 something is not exact, refused, or fails; 2 nothing could be compared
"""


def parse(argv: list[str] | None = None) -> Namespace:
    """The settings. `strategy` is a list of strategies and `devices` a list of numbers."""
    settings = run_options.parse(
        argv,
        _add_own,
        prog="python -m gan.verify",
        usage="python -m gan.verify [RUN] [--strategy POLICY...] [--devices N,N] [--steps N] [options]",
        description="Train a run in float64 on one device and under strategies on several ranks, and compare.",
        epilog=EXAMPLES,
    )
    settings.strategy = run_options.strategies(settings.strategy)
    settings.devices = run_options.numbers("devices", settings.devices)
    return settings


def _add_own(parser: Parser) -> None:
    add = parser.add_argument
    what = "strategies, as for gan.fit, with commas or spaces between them"
    add("--strategy", nargs="+", type=str, default=STRATEGIES.split(","), help=what)
    add("--devices", type=str, default="2,4", help="numbers of ranks")
    add("--steps", type=PositiveInt, default=10, help="how many steps to train")
    add("--allow_refused", action="store_true", help="a strategy that refuses the run is no failure")
    add("--limit", type=PositiveFloat, default=600.0, help="seconds after which a training is said to hang")
