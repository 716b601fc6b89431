"""The argument parsers of all commands. They refuse abbreviated options and empty values."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NoReturn, get_args, get_origin

import jsonargparse
from jsonargparse import SUPPRESS, DefaultHelpFormatter

from gan.app.run.settings_file import limit_typed_values
from gan.files.errors import UserError, printable

limit_typed_values()

# Options of other trainers, and ours for the same, of which a run may have only one.
OF_OTHER_TRAINERS = {
    "--mirror": "--flip",
    "--gpus": "--devices",
    "--snap": "--save-every",
    "--cond": "--classes",
    "--metrics": "--score-every",
    "--outdir": "--out",
    "--lr": "--rate --generator-rate",
    "--glr": "--rate --generator-rate",
    "--wandb": "--logger",
    "--resolution": "--size",
    "--target": "--augment-target",
    "--ckpt": "--resume --from",
    "--fp32": "--precision",
    "--psi": "--truncation",
    "--epochs": "--kimg --max-steps",
}
BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}


class Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Short help: options with hyphens, no type where the default shows it, and no default that is null or False."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)

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
        return super().parse_args(args, *more, **kwargs)

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
        for word, value in pairwise([*self._typed, ""]):
            name, given, own = word.partition("=")
            if option and name.replace("-", "_") == f"__{option}":
                message = f"{_hyphens(name)} {own if given else value}".strip() + f": type {right}"
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        known = [_hyphens(name) for name in self._option_string_actions if name.startswith("--")]
        if unknown:
            typed = _hyphens(unknown[1])
            others = OF_OTHER_TRAINERS.get(typed, "").split()
            close = [name for name in known if name in others or name.startswith(typed)]
            close = close or difflib.get_close_matches(typed, known, 1)
            if typed == "--data" and "--run" in known:
                message = "--data belongs to a run that takes files: name that first: gan.fit stylegan2 --data DIR"
            elif close:
                message = f"unknown option {typed}; did you mean {' or '.join(close)}?"
        word = re.match(r"unrecognized arguments: ([^\s-]\S*)", message)
        if word and "--run" in known and all(action.option_strings for action in self._actions):
            message = f"'{word[1]}' belongs to no option; a run is named by the first word, before all options"
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


def _hyphens(option: str) -> str:
    """An option as a person types it: `--from_` is `--from`, which Python's arguments cannot be called."""
    return option.rstrip("_").replace("_", "-")
