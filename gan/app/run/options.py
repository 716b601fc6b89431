"""What is typed: the options of `python -m gan.fit` and of other commands, and the settings of the chosen run."""

import argparse
import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_string_type

from gan.app.run import folder, settings_file
from gan.app.run.command_line import arguments, early, parameters, renamed, run_first
from gan.app.run.parser import Parser, listed
from gan.app.run.settings_file import plain
from gan.files.errors import UserError, reason
from gan.runs import find, full_name, short_name
from gan.runs.run import Unchosen
from strategies.policies import ALIASES, POLICIES
from strategies.policies.choice import OPTIONS
from strategies.processes import slurm

DEFAULT_RUN = "sean-faces"
RUN = "what to train: see --list-runs, or FILE.py:FUNCTION of your own"
ACCELERATOR = "what to compute on: auto, cpu, gpu, mps, or another of Lightning's names"
KINDS = "csv, tensorboard, wandb or mlflow, or several with commas"
Loggers = listed("Loggers", "csv|tensorboard|wandb|mlflow", KINDS)
Indices = restricted_string_type("Indices", r"^\d+,(\d+(,\d+)*)?$", docstring="numbers of GPUs, such as 0,2")
Note = restricted_string_type("Note", r"^[\w.=+-]+$", docstring="letters, digits and . = + - _, such as lr-2")
Devices = PositiveInt | Literal["auto"] | Indices
HOSTS_OWN = {"config", "slurm", "submit", "list_runs", "devices", "nodes", "rendezvous", "restarts", "accelerator"}
HOSTS_OWN |= {"resume", "out", "workers", "logger"}

INCEPTION = "FID's network: torch-fidelity (downloaded once), or a file of that or NVIDIA's"

EXAMPLES = """examples:
  python -m gan.fit                                   the built-in run, on all GPUs or on two CPU processes
  python -m gan.fit stylegan2 --data PATH             on pictures of yours; also r3gan, sean, spade
  python -m gan.fit --batch-size 32 --max-steps 5000 --precision bf16-mixed
  python -m gan.fit r3gan-faces --help                the settings of that run
  python -m gan.fit my_game.py:my_run                 a run of your own: a function in a file or a module
  python -m gan.fit --resume auto                     continue the newest run
  python -m gan.fit r3gan-faces --devices 0,2         on these two GPUs
  torchrun --nproc-per-node 4 -m gan.fit r3gan-faces
  python -m gan.fit --slurm --nodes 2 --devices 8 > job.sh   the script of a Slurm job
"""


def parse(argv: list[str] | None = None) -> tuple[Namespace, tuple[folder.RunFolder, Path] | None]:
    """The settings, and the run and checkpoint to resume from: None without `--resume`, or if `auto` found no run
    and one is typed, which then begins: the script of a job may be the same each time.
    """
    argv = renamed(run_first(arguments(argv)))
    lengths = dict(kimg=None, epochs=None, falling_epochs=None, max_steps=None)
    known = early(argv, run=None, resume=None, out="runs", config=[], **lengths)
    _refuse_idle_out(argv, known.resume, ", or resume a copy of the run's folder")
    typed = None if known.run is None else full_name(known.run)
    files = [Path(file) for file in known.config if file]

    # A resumed run starts from the settings it was trained with; what is typed overrides them.
    try:
        resumed = folder.find(known.resume, Path(known.out), typed) if known.resume else None
    except OSError as error:
        raise UserError(f"cannot look for a run to resume: {reason(error)}") from error
    if resumed is not None:
        files.insert(0, resumed[0].settings)
        run = _saved_run(resumed[0].settings, typed)
    elif known.resume and not (typed or files):
        raise UserError(
            f"no run with a checkpoint in '{known.out}'; type --resume and a run's folder, or --out and the folder in "
            "which your runs are"
        )
    else:
        configured = [name for name in map(folder.run_in, files) if name is not None]
        run = full_name(typed or (configured or [DEFAULT_RUN])[-1])
    parser, saved = _parser(run), None
    for file in files:
        saved = _settings_in(file, parser, run, saved)
    other = known.kimg or known.epochs or known.falling_epochs  # a length in another unit, which a saved one would hide
    if saved is not None and other and "max_steps" in saved and parser.get_default("max_steps") is None:
        saved.max_steps = None
    settings = parser.parse_args(argv, saved)
    settings.run = run
    if known.max_steps and (known.epochs or known.falling_epochs):
        raise UserError("--epochs and --max-steps are two lengths of one training; type one of them")
    if settings.resume != known.resume:
        raise UserError(
            f"'{files[-1]}' says resume: {settings.resume}, and what to resume is typed: --resume {settings.resume}"
        )
    if settings.note and settings.resume not in (None, "auto"):
        raise UserError(f"--note is for a new run's folder, and {settings.resume} is there; leave --note out")
    if settings.new_data and not settings.resume:
        raise UserError("--new-data is for a run that goes on; type --resume and the run, too")
    return settings, resumed


def _saved_run(settings: Path, typed: str | None) -> str:
    """The run that a file of settings names. For an own run `typed` is where and what it is called now."""
    saved = folder.run_in(settings)
    if saved is None:
        raise UserError(f"cannot read settings from '{settings}': it names no run")
    if typed is None or typed == saved:
        return saved
    if ":" in saved and ":" in typed:
        return typed  # whose networks are compared with the checkpoint's
    raise UserError(f"'{settings.parent}' is a run of {saved}, not of {typed}; leave --run out")


def of_all_ranks(settings: Namespace) -> dict[str, str]:
    """The settings that must be the same on all hosts, as text. Each host may have its files elsewhere."""
    kept = {name: str(value) for name, value in settings.as_dict().items() if name not in HOSTS_OWN}
    return {f"--{name.rstrip('_').replace('_', '-')}": value for name, value in kept.items() if os.sep not in value}


def load(path: Path, run: str | None = None, **overrides: Any) -> Namespace:
    """Read settings as `dump` writes them, with `overrides` in their place. Refuses what this version does not know.

    `run` is where an own run is now, if its file has moved.
    """
    run = _saved_run(path, run and full_name(run))
    return _settings_in(path, _parser(run), run, **overrides)


def _settings_in(path: Path, parser: Parser, run: str, before: Namespace | None = None, **overrides: Any) -> Namespace:
    """The settings of a file in place of those `before` it, and `overrides` in their place."""
    found = {**settings_file.read(path), **overrides, "run": run}
    parser.exit_on_error = False
    try:
        _check_kinds(found, parser)
        settings, free = parser.parse_object(found, before), (before or parser.get_defaults()).get("batch_size")
        if isinstance(free, Unchosen) and "batch_size" not in found:
            settings.batch_size = free
        return settings
    except argparse.ArgumentError as error:
        reason = " ".join(str(error).split())[:300]
        name, right = parser.wanted(reason)
        if name:
            raise UserError(f"'{path}' says {name}: {str(found[name])[:100]!r}; write {right}") from error
        unknown = re.match(r"Option '(\w+)' is not accepted", reason)
        close = difflib.get_close_matches(unknown[1], [each.dest for each in parser._actions], 1) if unknown else []
        advice = f"another version may have made it, see python -m gan.fit {run} --help"
        if close or (unknown and ":" in run):
            advice = (
                f"did you mean {close[0]}?" if close else f"take it out of the file, or back into {short_name(run)}"
            )
        raise UserError(f"'{path}' and run {run} do not fit together: {reason}; {advice}") from error
    finally:
        parser.exit_on_error = True


def _check_kinds(found: dict[str, Any], parser: Parser) -> None:
    """Refuse what jsonargparse would take from a file: null where there must be a value, and no bool for a flag."""
    for action in parser._actions:
        if action.dest not in found:
            continue
        value, kind = found[action.dest], getattr(action, "_typehint", Any)
        if action.nargs == 0 and not isinstance(value, bool):
            raise argparse.ArgumentError(None, f"{action.dest} is {value!r}; it must be true or false")
        if value is None and kind is not Any and type(None) not in get_args(kind):
            raise argparse.ArgumentError(None, f"{action.dest} is null; it needs a value")


def run_settings(settings: Namespace) -> dict[str, Any]:
    names = parameters(settings.run)
    found = {name: value for name, value in settings.as_dict().items() if name in names}
    return {name: value if isinstance(value, Unchosen) else plain(value) for name, value in found.items()}


def _parser(run: str) -> Parser:
    parser = run_parser(
        run,
        _add_own,
        prog="python -m gan.fit",
        usage="[RUN] [--strategy POLICY] [--devices N] [options]",
        description="Train a game of several networks: pictures, curves and checkpoints come out in runs/.",
        epilog=f"{EXAMPLES}\n{_strategies()}",
    )
    cpus = slurm.cpus()
    if cpus is not None and "workers" in parameters(run) and type(parser.get_default("workers")) in (int, type(None)):
        parser.set_defaults(workers=cpus - 1)
    return parser


def _add_own(parser: Parser) -> None:
    add, flag = parser.option, parser.flag
    add("--config", str, "take settings from a YAML file, such as the settings.yaml of a run")
    flag("--list_runs", "list all runs and stop")
    add("--strategy", str, "how players are trained on several devices, see below", "ddp")
    what = "processes per node; auto: all GPUs, or two processes on CPU; 0,2 (and 2, alone): these GPUs"
    add("--devices", Devices, what, "auto")
    add("--nodes --num_nodes", str | int, "number of hosts, or LEAST:MOST", 1)
    add("--rendezvous", str, "where several hosts meet: HOST:PORT or file:PATH")
    add("--restarts", NonNegativeInt, "how often lost ranks are started again, from their last checkpoint", 3)
    add("--accelerator", str, ACCELERATOR, "auto")
    what = "gloo, nccl or mpi, by which ranks communicate; default: nccl between GPUs"
    add("--backend", Literal["gloo", "nccl", "mpi"], what)
    kinds = Literal["32-true", "bf16-mixed", "16-mixed", "64-true"]
    add("--precision", kinds, "number format in which the networks compute", "32-true")
    add("--out", str, "folder in which the run's folder is made", "runs")
    add("--note", Note, "words at the end of the folder's name: 001-stylegan2-NOTE")
    add("--resume", str, "continue: auto (the run with the highest number), a run, or a checkpoint")
    what = "with --resume: go on though pictures were added, removed or renamed, in another order"
    add("--new_data", bool, what, False)
    add(
        "--sample_every", PositiveInt, "steps between grids and validations; default: 4 to 10 a run, or 200,000 samples"
    )
    add("--save_every", PositiveInt, "steps between checkpoints; default: as --sample-every")
    what = "train on while a checkpoint is written; needs host memory for a copy of what each rank writes"
    add("--save_in_background", bool, what, True)
    add("--keep", PositiveInt, "how many of the newest checkpoints to keep", 2, metavar="COUNT")
    add("--keep_best", NonNegativeInt, "how many of the best ones to keep as well", 0, metavar="COUNT")
    what = "the score that tells which are best, such as fid; default: the run's first score"
    add("--keep_best_by", str, what, metavar="NAME")
    add("--score_every", PositiveInt, "steps between FID, KID, precision and recall; default: none", metavar="STEPS")
    what = "pictures made for a score; default: as many as are trained on, 50,000 at most"
    add("--score_count", PositiveInt, what, metavar="COUNT")
    add("--inception", str, INCEPTION, metavar="FILE")
    add("--log_every", PositiveInt, "steps between rows of metrics.csv", 10)
    what = "where to log beside the run's files, such as wandb, or tensorboard,mlflow; csv is metrics.csv, always there"
    add("--logger", Loggers, what, metavar="LIST")
    flag("--dry_run", "print and save settings, networks, phases; draw reals.png; train nothing")
    flag("--slurm", "print the script of a Slurm job that trains this, and stop")
    flag("--submit", "submit that script, by sbatch")
    add_checks(parser)


def add_saved_run(parser: Parser, weights: bool = False) -> None:
    """Add the options of a command that opens a saved run: which one, where its parts are, and which `weights`."""
    add, what = parser.option, "a run's folder, a checkpoint inside one, or auto: the run with the highest number"
    parser.add_argument("which", metavar="RUN", nargs="?", default="auto", help=what)
    what = "auto is the last run of this name; for a run of your own: where it is, if it has moved"
    add("--run", str, what, metavar="NAME")
    add("--data", str, "where the run's pictures are now, if they have moved", metavar="FOLDER")
    add("--out", Path, "where to look for the newest run", Path("runs"), metavar="FOLDER")
    if weights:
        add("--weights", Literal["ema", "raw"], "averaged ones where a player has them, or raw", "ema")


def add_device(parser: Parser) -> None:
    parser.option("--device", str, "what to compute on: auto, cpu, cuda or another device here", "auto")


def parse_saved_run(parser: Parser, argv: Sequence[str]) -> Namespace:
    """What is typed for a command with `add_saved_run`. For a run that is named `--out` would do nothing: refused."""
    settings = parser.parse_args(argv)
    if not settings.get("inputs"):  # whose translations go there
        ways = {"--to": ", or type --to FOLDER", "--file": ", or type -o FILE"}
        other = "".join(way for option, way in ways.items() if option in parser._option_string_actions)
        _refuse_idle_out(argv, settings.which, other)
    return settings


def _refuse_idle_out(argv: Sequence[str], which: str | None, other: str) -> None:
    """Refuse `--out` where a run is named. `other` says what to type in its place."""
    if which and which != "auto" and any(word.partition("=")[0] == "--out" for word in argv):
        raise UserError(f"--out is where to look for the newest run, and {which} is named; leave --out out{other}")


def add_checks(parser: Parser) -> None:
    parser.option("--check", bool, "try the first step on all ranks and on one, and compare", True)
    parser.flag("--debug", "slower: be deterministic, find NaNs, compare ranks, try each phase more often")


def run_parser(
    run: str,
    add_own: Callable[[Parser], None],
    default: str = DEFAULT_RUN,
    what: str = RUN,
    without: Collection[str] = (),
    **texts: str,
) -> Parser:
    """The parser of a command that plays a run: `--run`, the command's own options, and the run's settings.

    `without` names the run's settings that the command sets itself; `what` and `texts` are for its help.
    """
    find(run)  # refuse an unknown one first
    parser = Parser(**texts)
    parser.option("--run", str, f"{what}; the same as RUN in first place", default)
    add_own(parser)
    clash = sorted((parameters(run) - set(without)) & {action.dest for action in parser._actions})
    if clash:
        raise UserError(
            f"{run} has an argument '{clash[0]}', which is an option of {parser.prog} itself; rename the argument"
        )
    parser.add_function_arguments(find(run), as_positional=False, fail_untyped=":" not in run, skip=set(without))
    if ":" not in run and isinstance(batch := parser.get_defaults().get("batch_size"), int):
        parser.set_defaults(batch_size=Unchosen(batch))
    named = {action.dest: action for action in parser._actions}
    if {"config", "config_"} <= named.keys():  # both are typed --config, see renamed
        named["config_"].help = f"{named['config_'].help} Or a YAML file of settings, such as a run's settings.yaml."
        named["config"].help = argparse.SUPPRESS
    return parser


def parse_run(
    argv: Sequence[str] | None,
    add_own: Callable[[Parser], None],
    *,
    default: str = DEFAULT_RUN,
    saved: Mapping[str, Any] | None = None,
    **texts: Any,
) -> Namespace:
    """The settings of gan.plan, gan.verify and gan.bench, of which `saved` count where nothing else is typed.

    `add_own` adds the options of the command itself; for `texts` see `run_parser`.
    """
    argv = renamed(run_first(arguments(argv)))
    run = full_name(early(argv, run=default).run)
    parser = run_parser(run, add_own, default, **texts)
    parser.set_defaults(dict(saved or {}))
    settings = parser.parse_args(argv)
    settings.run = run
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


def _strategies() -> str:
    """The part of the help that lists what can be typed after --strategy."""
    known = ", ".join(name for name in POLICIES if name not in ALIASES)
    others = ", ".join(f"{name} = {policy}" for name, policy in ALIASES.items())
    return "\n".join(
        [
            f"strategies: auto, {known}",
            f"  for all players, or each: generator=zero3+offload,teacher=zero3@2-3,*=ddp (@: own ranks; {others})",
            *(f"  +{name:10}{option.help}" for name, option in OPTIONS.items()),
        ]
    )


def nodes(text: str) -> tuple[int, int]:
    """The least and the most number of hosts, of what is typed: N or LEAST:MOST."""
    least, _, most = str(text).partition(":")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least)):
        raise UserError(f"--nodes {text}: type how many hosts there are, such as --nodes 2, or --nodes 1:4")
    return int(least), int(most or least)
