"""The parsers of the commands: an option is typed in full, and a value that is typed is one."""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jsonargparse

from gan.errors import UserError

WHERE = "auto, a run's folder or a checkpoint in it"
TYPE = {
    "RUN": WHERE,
    "run": "the name of one, see --list-runs",
    "resume": WHERE,
    "config": "a YAML file, such as the settings.yaml of a run",
    "out": "a folder, such as runs",
    "to": "a folder to write to",
    "file": "a file to write to",
    "data": "the folder of the pictures",
    "inception": "a file of weights",
    "segmenter": "a file of weights",
}


class Strict:
    """Takes no abbreviations and no empty values, and names the option that an unknown one is closest to.

    An abbreviation means another option as soon as one is added, and what reads the command line twice, as gan.fit
    does for --resume, may know it in one place and not in the other. An empty path comes of a shell variable that is
    not set: it would mean "none" or the folder one stands in, and a run would start from zero in place of going on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        """Refuse an empty value first; without arguments, those of the command line are parsed."""
        args = sys.argv[1:] if args is None else args
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
            return  # unknown, which is said later, or empty by default
        name, of = (_hyphens(option), action.dest) if option else (action.dest.upper(),) * 2
        raise UserError(f"{name} is empty; type {TYPE.get(of, 'a value')}, or leave {name} out")

    def error(self, message: str, *more: Any) -> NoReturn:
        """What is wrong, and what may have been meant."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        known = [_hyphens(name) for name in self._option_string_actions if name.startswith("--")]
        if unknown:
            typed = _hyphens(unknown[1])
            close = [name for name in known if name.startswith(typed)] or difflib.get_close_matches(typed, known, 1)
            if close:
                message = f"unknown option {typed}; did you mean {' or '.join(close)}?"
        return super().error(message, *more)


class Parser(Strict, jsonargparse.ArgumentParser):
    """Of a command that takes settings."""


class PlainParser(Strict, argparse.ArgumentParser):
    """Of a command that takes a few numbers."""


def _hyphens(option: str) -> str:
    return option.replace("_", "-")
