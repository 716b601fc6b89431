"""The options of `python -m gan.bench grid`: its own, and the settings of the run that is played."""

import argparse
import os
import re

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from gan.errors import UserError
from gan.fit.options import Help, add_run_options, arguments, parameters, run_first
from gan.fit.parser import Parser
from gan.runs import find, full_name
from gan.verify.options import strategies

BLOCKS = "gan.bench.grid.game:blocks"
BATCH_SIZE = "batch_size"
POLICIES = ("ddp", "zero3", "fsdp", "generator=pipeline,*=ddp", "pipeline")
RUN = "what is played: a run of gan.fit --list-runs, or FILE.py:FUNCTION of your own; the same as RUN in first place"

EXAMPLES = """examples:
  python -m gan.bench grid                                           a few minutes; a game of alike blocks
  python -m gan.bench grid --policies ddp 'generator=pipeline,*=ddp' --chunks 1,2,4,8 --batch-sizes 8,32
  python -m gan.bench grid --processes 2,4 --stages 2,4 --policies pipeline+recompute
  python -m gan.bench grid --width 256 --generator-blocks 4          larger blocks
  python -m gan.bench grid r3gan-faces --policies ddp generator=pipeline,discriminator=zero3
  python -m gan.bench grid r3gan-faces --help                        the settings of that run

Each cell is trained in processes of its own, of one thread on a CPU. Cells take turns, round by round. One process is
always measured. A cell that is impossible says why.
"""


def parse(argv: list[str]) -> Namespace:
    """The settings; lists of numbers are lists, and `policies` is a list of strategies."""
    argv = run_first(arguments(argv))
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--run", default=BLOCKS)
    run = full_name(early.parse_known_args(argv)[0].run)
    settings = _parser(run).parse_args(argv)
    settings.run = run
    settings.policies = strategies(settings.policies)
    for name in ("processes", "chunks", "batch_sizes"):
        settings[name] = numbers(name, settings[name])
    settings.stages = [None] if settings.stages is None else numbers("stages", settings.stages)
    return settings


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers with commas between them, each once."""
    if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", text):
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"cannot read {option} '{text}'; type numbers with commas, such as {option} 2,4")
    return list(dict.fromkeys(map(int, text.split(","))))


def _parser(run: str) -> Parser:
    function = find(run)  # refuse an unknown one first
    parser = Parser(
        prog="python -m gan.bench grid",
        usage="python -m gan.bench grid [RUN] [--policies POLICY...] [--processes N,N] [--chunks N,N] [options]",
        description="Train the same work under policies x processes x stages x chunks x batch sizes, and compare.",
        epilog=EXAMPLES,
        formatter_class=Help,
        print_config=None,
    )
    add = parser.add_argument
    add("--run", type=str, default=BLOCKS, help=RUN)
    what = "policies, as for gan.fit --strategy, with commas or spaces between them"
    add("--policies", nargs="+", type=str, default=list(POLICIES), help=what)
    ranks = "2" if (os.cpu_count() or 1) < 4 else "2,4"
    add("--processes", type=str, default=ranks, help="numbers of ranks, beside one process")
    add("--stages", type=str | None, default=None, help="numbers of stages of a pipeline; default: as many as ranks")
    what = "in how many parts a pipeline takes its samples; other strategies play as many micro-batches"
    add("--chunks", type=str, default="1,4", help=what)
    add("--batch_sizes", type=str, default="32", help="samples a step, of all ranks together")
    add("--rounds", type=PositiveInt, default=3, help="how often each cell is trained")
    add("--steps", type=PositiveInt, default=8, help="steps that are timed in each training")
    add("--warm", type=PositiveInt, default=3, help="steps before them")
    add("--limit", type=PositiveFloat, default=300.0, help="seconds after which a training is said to hang")
    add("--out", type=str, default="grid", help="folder for grid.csv and grid.png")
    add_run_options(parser, run, without={BATCH_SIZE})
    if BATCH_SIZE not in parameters(run):
        raise UserError(
            f"{run} has no argument '{BATCH_SIZE}', which the grid varies; write def {function.__name__}("
            f"{BATCH_SIZE}: int = 32, ...)"
        )
    return parser
