"""What a person typed, made fit for a parser: the run first, underscores in options, and options by their own names."""

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from gan.files.errors import UserError
from gan.runs import find, full_name


def arguments(argv: Sequence[str] | None = None) -> list[str]:
    """What a person typed, with underscores in options. torch.distributed.launch puts the local rank before it.

    The environment says that number too, also under the other launchers.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and re.fullmatch(r"--local[-_]rank=\d+", argv[0]):
        argv = argv[1:]
    return [underscores(argument) for argument in argv]


def run_first(argv: list[str]) -> list[str]:
    """The arguments with `--run` before a run that is the first word.

    torchrun takes `--run` for its own `--run-path`, unless `--` stands before the program. settings.yaml has `run`.
    """
    if not argv or argv[0].startswith("-"):
        return argv
    if any(argument.partition("=")[0] == "--run" for argument in argv):
        raise UserError(f"the run is named twice, by '{argv[0]}' and by --run; leave --run out")
    return ["--run", *argv]


def renamed(argv: Sequence[str]) -> list[str]:
    """Options that a run's argument cannot be called: `--from` is a word of Python, `--config` names a file too.

    `--config paper256` is the argument `config_` of a run that has one, and so is HiFi-GAN's `--config config.json`;
    `--config settings.yaml`, or what else is a file, has settings.
    """
    words = [re.sub(r"^--from(?==|$)", "--from_", word) for word in argv]
    run = early(words, run=None).run

    def is_published(value: str) -> bool:
        if run is not None and "config_" not in parameters(full_name(run)):
            return False
        there = Path(value).exists() if run is None else Path(value).is_file()  # a folder may have the same name
        return value.endswith(".json") or (bool(re.fullmatch(r"\w[\w-]*", value)) and not there)

    for at, (word, value) in enumerate(pairwise([*words, ""])):
        name, given, config = word.partition("=")
        if name == "--config" and is_published(config if given else value):
            words[at] = f"--config_{given}{config}"
    return words


def early(argv: list[str], **defaults: Any) -> argparse.Namespace:
    """The values of some options, read before it is known which run's settings are options too. A list has all."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in defaults.items():
        how: dict[str, Any] = {"action": "append"} if default == [] else {"const": default}
        how["nargs"] = "?"  # if nothing follows, the next parser says so
        parser.add_argument(f"--{name}", default=default, **how)
    return parser.parse_known_args(argv)[0]


def underscores(argument: str) -> str:
    """Write an option with underscores, so that `--max-steps` and `--max_steps` are the same."""
    return re.sub(r"^--[\w-]+", lambda match: "--" + match[0][2:].replace("-", "_"), argument)


def without(argv: Sequence[str], options: Collection[str]) -> list[str]:
    kept, left_out = [], False
    for word in argv:
        if word.startswith("--"):
            left_out = underscores(word).partition("=")[0] in options
        if not left_out:
            kept.append(word)
    return kept


@cache  # a command asks several times, and jsonargparse reads the source of functions for it
def parameters(run: str) -> frozenset[str]:
    """The names of the run's own settings, also those that it passes to another function."""
    found = ArgumentParser().add_function_arguments(find(run), as_positional=False, fail_untyped=":" not in run)
    return frozenset(found)
