"""The options of `python -m gan.verify`: its own, and the settings of the chosen run."""

import argparse
import re

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from gan.errors import UserError
from gan.fit.options import DEFAULT_RUN, RUN, Help, add_run_options, arguments, run_first
from gan.fit.parser import Parser
from gan.runs import find, full_name

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
    argv = run_first(arguments(argv))
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--run", default=DEFAULT_RUN)
    run = full_name(early.parse_known_args(argv)[0].run)
    settings = _parser(run).parse_args(argv)
    settings.run = run
    settings.strategy = strategies(settings.strategy)
    settings.devices = _numbers(settings.devices)
    return settings


def strategies(words: list[str]) -> list[str]:
    """The strategies that are typed in these words: `ddp,zero3` are two, and `generator=zero3,*=ddp` is one."""
    found: list[str] = []
    for word in words:
        parts = [part.strip() for part in word.split(",")]
        if not all(parts):
            raise UserError(f"cannot read strategy '{word}'; type e.g. ddp,zero3 or generator=zero3,*=ddp")
        found += [part for part in parts if "=" not in part]
        pairs = [part for part in parts if "=" in part]
        found += [",".join(pairs)] if pairs else []
    return list(dict.fromkeys(found))


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", text):
        raise UserError(f"cannot read --devices '{text}'; type numbers of ranks with commas, such as 2,4")
    return list(dict.fromkeys(map(int, text.split(","))))


def _parser(run: str) -> Parser:
    find(run)  # refuse an unknown one first
    parser = Parser(
        prog="python -m gan.verify",
        usage="python -m gan.verify [RUN] [--strategy POLICY...] [--devices N,N] [--steps N] [options]",
        description="Train a run in float64 on one device and under strategies on several ranks, and compare.",
        epilog=EXAMPLES,
        formatter_class=Help,
        print_config=None,
    )
    add = parser.add_argument
    add("--run", type=str, default=DEFAULT_RUN, help=f"{RUN}; the same as RUN in first place")
    what = "strategies, as for gan.fit, with commas or spaces between them"
    add("--strategy", nargs="+", type=str, default=STRATEGIES.split(","), help=what)
    add("--devices", type=str, default="2,4", help="numbers of ranks")
    add("--steps", type=PositiveInt, default=10, help="how many steps to train")
    add("--allow_refused", action="store_true", help="a strategy that refuses the run is no failure")
    add("--limit", type=PositiveFloat, default=600.0, help="seconds after which a training is said to hang")
    add_run_options(parser, run)
    return parser
