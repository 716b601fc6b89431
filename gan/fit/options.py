"""The options of `python -m gan.fit`: those that every run has, and the settings of the chosen run."""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from jsonargparse.typing import PositiveInt

from gan.errors import UserError
from gan.fit import folder
from gan.fit.parser import Parser
from gan.runs import RUNS
from strategies.choice import OPTIONS
from strategies.strategy import POLICIES

DEFAULT_RUN = "sean-faces"
PASSING = ("resume", "dry_run", "list_runs", "debug", "config")

EXAMPLES = """examples:
  python -m gan.fit                                   the built-in run, on all GPUs or on two CPU processes
  python -m gan.fit --run cyclegan-faces --devices 1
  python -m gan.fit --run sean-celebamask --data PATH   the published training on your pictures
  python -m gan.fit --batch-size 32 --max-steps 5000 --precision bf16-mixed
  python -m gan.fit --run r3gan-faces --help          the settings of that run
  python -m gan.fit --resume auto                     continue the newest run
  torchrun --nproc-per-node 4 -m -- gan.fit --run r3gan-faces
"""


class Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Short help: options with hyphens, no type where the default shows it, and no default that is null or False."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = re.sub(r"--\w+", lambda match: match[0].replace("_", "-"), ", ".join(action.option_strings))
        if action.nargs == 0:
            return name
        (value,) = self._metavar_formatter(action, action.dest.rpartition("_")[2].upper())(1)
        return f"{name} {value if value.startswith('{') else value.rpartition('_')[2]}"

    def _expand_help(self, action: argparse.Action) -> str:
        text = re.sub(r"\(type: .*?, default: ", "(default: ", super()._expand_help(action))
        return re.sub(r" \(default: (null|False)\)", "", text)


def parse(argv: list[str] | None = None) -> tuple[Namespace, tuple[folder.RunFolder, Path] | None]:
    """The settings, and the run and checkpoint to resume from: None without `--resume`, or if `auto` found no run."""
    argv = [underscores(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (("run", None), ("resume", None), ("out", "runs"), ("config", None)):
        early.add_argument(f"--{name}", default=default)
    known, _ = early.parse_known_args(argv)

    # A resumed run starts from the settings it was trained with; what is typed overrides them.
    resumed = folder.find(known.resume, Path(known.out), known.run) if known.resume else None
    if resumed is not None:
        argv = ["--config", str(resumed[0].settings), *argv]
        saved = _run_in(resumed[0].settings)
        if known.run not in (None, saved):
            raise UserError(f"'{known.resume}' is a run of {saved}, not of {known.run}; leave --run out")
        run = saved
    else:
        configured = _run_in(Path(known.config)) if known.config else None
        run = known.run or configured or DEFAULT_RUN
    settings = _parser(run).parse_args(argv)
    if settings.resume != known.resume:
        raise UserError(
            f"'{known.config}' says resume: {settings.resume}, and what to resume is typed: --resume {settings.resume}"
        )
    return settings, resumed


def dump(settings: Namespace, run: str) -> str:
    """All settings as YAML, without those that belong to a single call of the command."""
    kept = {name: _plain(value) for name, value in settings.as_dict().items() if name not in PASSING}
    return yaml.safe_dump({**kept, "run": run}, sort_keys=False)


def load(path: Path, **overrides: Any) -> Namespace:
    """Read settings as `dump` writes them, with `overrides` in their place. Refuses what this version does not know."""
    run = _run_in(path)
    if run is None:
        raise UserError(f"cannot read settings from '{path}': it names no run")
    parser = _parser(run)
    parser.exit_on_error = False
    try:
        return parser.parse_object({**yaml.safe_load(path.read_text()), **overrides})
    except argparse.ArgumentError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"'{path}' and run {run} do not fit together: {reason}; another version may have made it, see "
            f"python -m gan.fit --run {run} --help"
        ) from error


def run_settings(settings: Namespace) -> dict[str, Any]:
    """The settings that are arguments of the run's function."""
    names = _parameters(settings.run)
    return {name: _plain(value) for name, value in settings.as_dict().items() if name in names}


def _parser(run: str) -> Parser:
    if run not in RUNS:
        raise UserError(f"unknown run '{run}'; known: {', '.join(RUNS)}")
    parser = Parser(
        prog="python -m gan.fit",
        usage="python -m gan.fit [--run NAME] [--strategy POLICY] [--devices N] [options]",
        description="Train a game of several networks: pictures, curves and checkpoints come out in runs/.",
        epilog=f"{EXAMPLES}\n{_strategies()}",
        formatter_class=Help,
        print_config=None,
    )
    add = parser.add_argument
    add("--config", action="config", help="take settings from a YAML file, such as the settings.yaml of a run")
    add("--run", type=str, default=DEFAULT_RUN, help="what to train: see --list-runs")
    add("--list_runs", action="store_true", help="list all runs and stop")
    add("--strategy", type=str, default="ddp", help="how players are trained on several devices, see below")
    add(
        "--devices",
        type=PositiveInt | Literal["auto"],
        default="auto",
        help="processes per node, or replicas under dp; auto: all GPUs, or two processes on CPU",
    )
    add("--num_nodes", type=PositiveInt, default=1, help="number of machines")
    add("--accelerator", type=Literal["auto", "cpu", "gpu"], default="auto", help="what to compute on")
    add(
        "--precision",
        type=Literal["32-true", "bf16-mixed", "16-mixed", "64-true"],
        default="32-true",
        help="number format in which the networks compute",
    )
    add("--out", type=str, default="runs", help="folder in which the run's folder is made")
    add("--resume", type=str | None, default=None, help="continue: auto (the newest run), a run, or a checkpoint")
    add(
        "--sample_every",
        type=PositiveInt | None,
        default=None,
        help="steps between grids and validations; default: a tenth of all steps",
    )
    add(
        "--save_every",
        type=PositiveInt | None,
        default=None,
        help="steps between checkpoints; default: as --sample-every",
    )
    add("--log_every", type=PositiveInt, default=10, help="steps between rows of metrics.csv")
    add("--logger", type=Literal["tensorboard", "wandb"] | None, default=None, help="also log to it; must be installed")
    add("--dry_run", action="store_true", help="print and save settings, networks and phases; train nothing")
    add("--check", type=bool, default=True, help="try the first step on all ranks and on one, and compare")
    add(
        "--debug",
        action="store_true",
        help="be deterministic, detect anomalies, compare all ranks after every phase",
    )
    parser.add_function_arguments(RUNS[run], fail_untyped=True)
    return parser


def _strategies() -> str:
    """The part of the help that lists what can be typed after --strategy."""
    known = ", ".join(dict.fromkeys(policy.name for policy in POLICIES.values()))
    others = ", ".join(f"{name} = {policy.name}" for name, policy in POLICIES.items() if name != policy.name)
    return "\n".join(
        [
            f"strategies: auto, {known}",
            f"  for all players, or for each: generator=zero3+offload,*=ddp ({others})",
            *(f"  +{name:10}{option.help}" for name, option in OPTIONS.items()),
        ]
    )


def _parameters(run: str) -> set[str]:
    """The names of the run's own settings, also those that it passes to another function."""
    return set(ArgumentParser().add_function_arguments(RUNS[run], fail_untyped=True))


def _run_in(path: Path) -> str | None:
    try:
        return yaml.safe_load(path.read_text()).get("run")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise UserError(f"cannot read settings from '{path}': {error}") from error


def underscores(argument: str) -> str:
    """Write an option with underscores, so that `--max-steps` and `--max_steps` are the same."""
    return re.sub(r"^--[\w-]+", lambda match: "--" + match[0][2:].replace("-", "_"), argument)


def _plain(value: Any) -> Any:
    """The value as a plain Python number. YAML does not know jsonargparse's types, such as PositiveInt."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


def launched_ranks() -> int | None:
    """How many ranks torchrun started on this node; None without torchrun."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
