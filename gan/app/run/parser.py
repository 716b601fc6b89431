"""The argument parsers of all commands. They refuse abbreviated options and empty values."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from shutil import get_terminal_size
from typing import Any, Literal, NoReturn, get_args, get_origin
from unittest import mock

import jsonargparse
from jsonargparse import SUPPRESS, DefaultHelpFormatter
from jsonargparse.typing import restricted_string_type

from gan.app.run.settings_file import limit_typed_values
from gan.files.errors import UserError, printable
from gan.runs import RUNS

limit_typed_values()

# Options of ours, with what other trainers call them. A run has only some of ours.
OF_OTHER_TRAINERS = {
    "--augment-target": "target",
    "--batch-size": "batch batch-gpu",
    "--blocks": "netg",
    "--channels": "input-nc output-nc",
    "--classes": "cond n-classes",
    "--codes": "n-embed",
    "--config": "base cfg cut-mode",
    "--count": "num-test n-samples",
    "--crop": "preprocess no-crop",
    "--cycle": "lambda-a lambda-b",
    "--data": "dataroot dataset input-wavs-dir",
    "--devices": "gpus gpu-ids parallel",
    "--epochs": "n-epochs num-epochs training-epochs",
    "--falling-epochs": "n-epochs-decay lr-policy",
    "--file": "results-dir",
    "--fit": "preprocess preprocess-mode",
    "--flip": "mirror no-flip",
    "--from": "ckpt load-weights",
    "--generator-rate": "lr glr g-lr",
    "--hertz": "sampling-rate",
    "--identity": "lambda-identity",
    "--inputs": "input-mels-dir input-wavs-dir dataroot",
    "--judge": "netd",
    "--judge-rate": "dlr d-lr",
    "--judge-steps": "num-d-steps",
    "--judge-width": "ndf d-ch",
    "--kimg": "epochs n-epochs num-epochs",
    "--latent": "dim-z",
    "--layers": "n-layers-d",
    "--load-size": "preprocess",
    "--log-every": "print-freq stdout-interval summary-interval",
    "--logger": "wandb use-wandb display-id",
    "--loss": "gan-mode",
    "--max-steps": "epochs training-epochs",
    "--mels": "fine-tuning input-mels-dir",
    "--micro-batches": "num-g-accumulations num-d-accumulations accumulate-grad-batches",
    "--nce": "lambda-nce",
    "--network": "netg which-model-netg",
    "--out": "outdir checkpoints-dir checkpoint-path name experiment-name logdir",
    "--pixels": "lambda-l1",
    "--pool": "pool-size",
    "--precision": "fp32",
    "--rate": "lr glr g-lr",
    "--resume": "ckpt continue-train resume-from-checkpoint",
    "--sample-every": "display-freq",
    "--save-every": "snap save-epoch-freq checkpoint-interval",
    "--score-every": "metrics validation-interval test-every",
    "--size": "resolution load-size crop-size",
    "--truncation": "psi",
    "--width": "ngf g-ch",
    "--workers": "num-threads num-workers",
}
CLOSE = 0.75  # how alike an option must be to be meant, from 0 to 1
BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}


class Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Short help: options with hyphens, no type where the default shows it, and no default that is null or False."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(110, get_terminal_size((110, 24)).columns))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = re.sub(r"--\w+", lambda match: _hyphens(match[0]), ", ".join(action.option_strings))
        if action.nargs == 0:
            return name
        (value,) = self._metavar_formatter(action, action.dest.strip("_").rpartition("_")[2].upper())(1)
        return f"{name} {value if value.startswith('{') else value.rpartition('_')[2]}"

    def _expand_help(self, action: argparse.Action) -> str:
        text = re.sub(r"\(type: .*?, default: ", "(default: ", super()._expand_help(action))
        return re.sub(r" \(default: (null|False)\)", "", text)


class Parser(jsonargparse.ArgumentParser):
    """A parser that refuses abbreviations and empty values. For an unknown option it suggests the closest one.

    An abbreviation may mean another option after a new option is added. And gan.fit parses the command line twice, for
    --resume, with two lists of options, so an abbreviation could be known to one parser and not to the other.

    An empty path usually comes from a shell variable that is not set. It would mean "none" or the current folder, and
    a run would start from the beginning instead of being resumed.
    """

    _typed: Sequence[str] = ()

    def __init__(self, prog: str, usage: str = "", description: str = "", epilog: str = "") -> None:
        """`usage` is what may stand behind the name of the command."""
        texts = (usage and f"{prog} {usage}") or None, description, epilog or None
        super().__init__(prog, *texts, formatter_class=Help, print_config=None, allow_abbrev=False)

    def option(self, names: str, kind: Any, help: str, default: Any = None, **more: Any) -> None:
        """Add an option. One that has no default and is not typed is None."""
        kind = kind | None if default is None and "nargs" not in more else kind
        self.add_argument(*names.split(), type=kind, default=default, help=help, **more)

    def flag(self, name: str, help: str) -> None:
        self.add_argument(name, action="store_true", help=help)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        """Refuse empty values, then parse. Without `args` it parses the command line."""
        self._typed = args = sys.argv[1:] if args is None else args
        option = None
        for arg in args:
            name, given, value = arg.partition("=")
            if arg.startswith("-"):
                option = name
            if not (value if given and arg.startswith("-") else arg).strip():
                self._refuse_empty(option)
        try:
            return super().parse_args(self._said_yes(args), *more, **kwargs)
        finally:
            self._typed = ()

    def _said_yes(self, args: Sequence[str]) -> list[str]:
        """The arguments, in which `--flip` alone is `--flip=true`."""
        options = self._option_string_actions.items()
        alone = {name for name, each in options if _values(getattr(each, "_typehint", None)) == ["true", "false"]}
        return [
            f"{one}=true" if one in alone and then.startswith("-") else one for one, then in pairwise([*args, "--"])
        ]

    def _refuse_empty(self, option: str | None) -> None:
        fits = (
            each for each in self._actions if (option in each.option_strings if option else not each.option_strings)
        )
        action = next(fits, None)
        if action is None or action.default == "":
            return  # an unknown option, which is reported later, or one that is empty by default
        name = _hyphens(option) if option else action.metavar or action.dest.upper()
        about = f" ({action.help})" if action.help not in (None, SUPPRESS) else ""
        raise UserError(f"{name} is empty; type a value, or leave {name} out{about}")

    def wanted(self, message: str) -> tuple[str, str]:
        """Of an error about a value: the name of its option, and what is right there. Empty for other errors."""
        match = re.match(r'(?:Parser key "|argument --)(\w+)', message)
        name = match[1] if match else ""
        action = next((each for each in self._actions if each.dest == name), None)
        *values, last = _values(getattr(action, "_typehint", None)) or [""]
        return (name, ", ".join(values) + " or " * bool(values) + last) if last else ("", "")

    def error(self, message: str, *more: Any) -> NoReturn:
        """Say what may have been meant: the closest known option to an unknown one, or the run; or which value."""
        option, right = self.wanted(message)
        if right == "text" and "expected one argument" in message:
            self._refuse_empty(f"--{option}")
        for word, value in pairwise([*self._typed, ""]):
            name, given, own = word.partition("=")
            if option and name.replace("-", "_") == f"__{option}":
                message = f"{_hyphens(name)} {own if given else value}".strip() + f": type {right}"
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        options = {name: each.help for name, each in self._option_string_actions.items() if name.startswith("--")}
        known = [_hyphens(name) for name, help in options.items() if help != SUPPRESS]
        if unknown:
            typed = _hyphens(unknown[1])
            others = {name: OF_OTHER_TRAINERS.get(name, "").split() for name in known}
            close = [name for name in known if typed[2:].lower() in others[name] or name.startswith(typed)]
            close = close or difflib.get_close_matches(typed, known, 1, CLOSE)
            if typed == "--data" and "--run" in known:
                message = "--data belongs to a run that takes files: name that first: gan.fit stylegan2 --data DIR"
            else:
                meant = f"did you mean {' or '.join(close)}?" if close else "see --help"
                message = f"unknown option {typed}; {meant}"
        word = re.match(r"unrecognized arguments: ([^\s-]\S*)", message)
        first = [str(action.metavar or action.dest).upper() for action in self._actions if not action.option_strings]
        before = next((one for one, then in pairwise(self._typed) if word and then == word[1]), "")
        if word and word[1].lower() in ("true", "false") and before in options:
            message = f"{_hyphens(before)} takes no value; type {_hyphens(before)} alone, or leave it out"
        elif word and (first or "--run" in known):
            words = list(takewhile(lambda each: not each.startswith("-"), self._typed))
            named = len(words) >= len(first) if first else "--run" in self._typed
            advice = " and ".join(first or ["the run's name"]) + " must come before all options"
            if named:
                advice = "type its option before it, and a name with spaces in quotes"
            message = f"'{word[1]}' belongs to no option; {advice}"
        elif "--run" in known and not first and "--run" not in self._typed:
            run = next((each for each in self._typed if each in RUNS or ".py:" in each), "")
            message += f"; the run comes first: {self.prog} {run}, and then all options" * bool(run)
        run = [then for one, then in pairwise(self._typed) if one == "--run" and not first][:1]
        with mock.patch.object(self, "prog", printable(" ".join([self.prog, *run]))):  # a tip says prog --help
            return super().error(printable(message), *more)


def _values(kind: Any) -> list[str]:
    """What a value of this type may be, in words; nothing for a type that has none here, or needs none."""
    if get_origin(kind) in (list, tuple):
        return ["a list, in quotes: '[A,B]'"]
    if get_origin(kind) is Literal or not isinstance(kind, type):
        parts = ([each] if isinstance(each, str) else _values(each) for each in get_args(kind))
        return [word for part in parts for word in part]
    if kind is bool:
        return ["true", "false"]
    if issubclass(kind, int | float):
        bounds = [f"{BOUNDS[how.__name__]} {bound}" for how, bound in getattr(kind, "_restrictions", ())]
        return [" ".join(["a whole number" if issubclass(kind, int) else "a number", " and ".join(bounds)]).strip()]
    return ["text"] if kind is str else [kind.__doc__ or ""] if hasattr(kind, "_regex") else []


def listed(name: str, each: str, words: str) -> Any:
    """A type of options: a list with commas, of what a pattern says of `each`. `words` say what is right."""
    return restricted_string_type(name, rf"^\s*({each})(\s*,\s*({each}))*\s*$", docstring=words)


Numbers = listed("Numbers", r"[1-9]\d*", "numbers with commas, such as 2,4")


def items(text: str) -> list[str]:
    """What is typed with commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _hyphens(option: str) -> str:
    """An option as a person types it: `--from_` is `--from`, which Python's arguments cannot be called."""
    return option.rstrip("_").replace("_", "-")
