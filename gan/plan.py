"""`python -m gan.plan`: what a run would need and move on many devices, found out without them."""

import re

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from gan.app.command import command, working
from gan.app.outputs import run
from gan.app.run import options
from gan.app.run.parser import Parser
from gan.files.errors import UserError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
LEAST = 10**6  # bytes of a device; less is a number whose unit is missing

EXAMPLES = """examples:
  python -m gan.plan r3gan-faces --strategy zero3 --devices 8
  python -m gan.plan my_game.py:my_run --nodes 4 --devices 8 --memory 80G --batch-size 256
  python -m gan.plan my_game.py:my_run --strategy generator=zero3+hybrid,*=ddp --nodes 4 --devices 8
  python -m gan.plan samples/distillation.py:distillation --billions 14 --nodes 8 --devices 8
  python -m gan.plan stylegan2 --data my-pictures --kimg 25000 --speed 120 --devices 8     also the hours
  python -m gan.plan samples/distillation.py:distillation --json
  python -m gan.plan r3gan-faces --help           the settings of that run

It needs none of the devices: the game is played once without values, on torch's meta device, with the batch of one
rank. Every policy says what it would hold and move meanwhile. Counted are the tensors, in 32-bit numbers. A tenth of
the memory is left for what is not a tensor: libraries, buffers of collectives, and gaps. "activations" are all other
tensors: the batch, what backward needs, and gradients before a weight has all of its own.

exit status: 0 the strategy fits; 1 it does not; 2 it could not be planned
"""


@command
def main(argv: list[str]) -> int:
    settings = parse(argv)
    with working():
        from gan.app.planning.planned import plan
        from gan.export import take_from_run

    take_from_run(settings, argv)
    return plan(argv, settings)


def parse(argv: list[str] | None = None) -> Namespace:
    """The settings. `memory` is a number of bytes."""
    settings = options.parse_run(
        argv,
        _add_own,
        prog="python -m gan.plan",
        usage="[RUN] [--strategy POLICY] [--nodes N] [--devices N] [--memory 80G] [options]",
        description="Plan a run on many devices without them: memory of a rank, bytes on each link, and what fits.",
        epilog=EXAMPLES,
    )
    settings.memory = _bytes(settings.memory)
    return settings


def _bytes(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip().upper())
    memory = float(found[1]) * UNITS[found[2]] if found else 0
    if memory < LEAST:
        raise UserError(f"cannot read --memory '{text}'; type the memory of one device and its unit: 80G, or 512M")
    return memory


def _add_own(parser: Parser) -> None:
    add = parser.option
    add("--strategy", str, "as for gan.fit, also auto", "ddp")
    add("--nodes", PositiveInt, "number of hosts", 1)
    add("--devices", PositiveInt, "devices on each host", 8)
    add("--memory", str, "the memory of one device, with its unit", "80G")
    what = "samples a second of one device, as gan.fit prints them while it trains there: tells the hours"
    add("--speed", PositiveFloat, what, metavar="SAMPLES")
    parser.flag("--json", "print one JSON object, in bytes, for programs")


if __name__ == "__main__":
    run(main)
