"""Command lines: every option that a command has, with valid and invalid values, misspelt, cut, and repeated."""

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from gan import edit as edit
from gan import evaluate as evaluate
from gan import export as export
from gan import plan as plan
from gan import sample as sample
from gan import verify as verify
from gan.app.run import options as fit
from gan.app.run.parser import Parser
from tests.faults.case import Case
from tests.faults.known import ONE, SMALL


def _each(words: str) -> list[str]:
    return words.split()


# No word may be an absolute path or lead out of the case's folder: some options name a place to write to.
JUNK = _each("- -- = : , a=b -1 0 1 2 07 1.5 1e3 1e309 nan -inf 1_0 0x10 ٣ é 日本 %s%n null true yes {a:1} { *x &x")
JUNK += _each("auto ~ runs data keep ddp all none @file $HOME step --help -h --seed [1,2] \udcff \x1b[31mred")
JUNK += ["", " ", "9" * 25, "-" + "9" * 25, "a\nb", "a\tb", "x" * 3000, "!!python/object/apply:os.getcwd []"]
NUMBERS = [*_each("0 1 1 2 2 3 4 8 16 17 32 -1 0.5 1.0 1e-3 1e3 1e18 1e309 nan 1000000"), "9" * 25]
STRATEGIES = _each("""ddp zero3 generator=zero3,*=ddp zero3+offload zero3@0-1 generator=, *= =ddp ddp+ nobody=ddp fsdp
    auto dp pipeline+stages:0 pipeline+stages:x zero3+offload+offload ddp,zero3 single generator=zero3@1-0,*=ddp@0
    deepspeed9 zero3@99999999999999999999 ddp+hybrid""")
PLACES = ["out", "out/a/b", "new é", "y" * 300, "RUN", "keep", "."]
RUNS = _each("""RUN auto RUN/checkpoints/step-000001.ckpt runs keep data RUN/checkpoints
    RUN/checkpoints/step-000009.ckpt nothing.ckpt .ckpt RUN/settings.yaml RUN/ ./runs/../RUN""")
NAMES = _each("""r3gan-faces sean-faces wgan-gp-faces nothing file.py: :f a.py:f keep:f keep/notes.txt:f a:b ..:x .:f
    os:getcwd tests.faults.known:make json:loads data/images/0.png:f keep.:f""")
FILES = _each("keep/notes.txt data/images/0.png data nothing.pt RUN/settings.yaml keep")
PICTURES = _each("0 1 train:1 99 train:99 keep/notes.txt a:b mean data/images/0.png:data/labels/0.png")
BY_NAME = {
    "strategy": STRATEGIES,
    "out": [*PLACES, "data/images/0.png", "RUN/settings.yaml"],
    "to": [*PLACES, *PICTURES, "data/images/0.png", "RUN/settings.yaml"],
    "file": [*PLACES, "out/a.png", "out/a.PNG", "out/a.jpg", "out/a.pt", "out/\x1b[2J.png"],
    "which": RUNS,
    "resume": RUNS,
    "run": NAMES,
    "config": [*FILES, "RUN/settings.yaml"],
    "data": FILES,
    "inception": FILES,
    "segmenter": FILES,
    "label": [*FILES, "data/labels/0.png"],
    "picture": PICTURES,
    "from": PICTURES,
    "on": PICTURES,
    "between": PICTURES,
    "scores": ["ssim", "ssim,psnr", "fid", "all", "mel_error", "nothing"],
    "nodes": ["1", "2:1", "1:2", "0:0", ":", "1:"],
    "devices": ["1", "2", "auto", "0,1", "0,", ",", "0,0"],
    "memory": ["80G", "1K", "0G", "1.5.5G", "9" * 400 + "G", "80 G", "1e3"],
    "accelerator": ["cpu", "gpu"],
    "device": ["cpu", "cuda", "cuda:99", "meta", "xla", "mps", "cpu:7"],
    "backend": ["gloo", "nccl", "mpi"],
    "logger": ["tensorboard", "csv", "csv,tensorboard", "visdom", "csv,"],
}
SMALL_ONLY = _each("workers blocks held_out limit steps mapping frames count")  # more is valid, and takes long
QUICK = ("--workers", "0")
TAILS = {  # repeated at the end, so that what is accepted is quickly done
    "fit": ([*SMALL, *QUICK, "--dry-run"], ["--dry-run"], [*SMALL, *QUICK, *ONE, "--nodes", "1", "--max-steps", "1"]),
    "resume": (["--dry-run"], [*ONE, *QUICK, "--nodes", "1", "--max-steps", "3"]),
    "sample": ([],),
    "edit": (["--repeat", "edit.json"],),
    "evaluate": (["--devices", "1", "--accelerator", "cpu"],),
    "export": ([],),
    "plan": ([*SMALL, "--batch-size", "8"], []),
    "verify": ([*SMALL, *QUICK, "--steps", "1", "--devices", "1", "--strategy", "ddp", "--limit", "40"],),
}
SHARES = {"fit": 30, "resume": 14, "sample": 18, "edit": 4, "evaluate": 10, "export": 10, "plan": 8, "verify": 6}


def command_lines(case: Case) -> None:
    """Some options of a command, by dice, in a folder with a run."""
    what = case.chance.choices(list(SHARES), SHARES.values())[0]
    pictures = what == "evaluate" or (what == "sample" and case.chance.random() < 0.5)
    run = case.copy("folder" if pictures else "faces")
    words = _first(what, case.chance)
    if what == "edit":
        Path("edit.json").write_text(case.chance.choice(('{"seed": 3}', "{}", "[1", '{"seed": "a"}')))
    for _ in range(case.chance.choice((0, 1, 1, 2, 3, 6))):
        words += _option(what, words, case.chance)
    tail = case.chance.choice(TAILS[what])
    words = [*_mutated(words, case.chance), *tail]
    case.run(what, *(word.replace("RUN", str(run)) for word in words))


def _first(what: str, chance: Random) -> list[str]:
    """The words that name the run."""
    odd = chance.random() < 0.1
    if what in ("fit", "plan", "verify"):
        return [chance.choice(JUNK + NAMES) if odd else "r3gan-faces"] if chance.random() < 0.9 else []
    which = chance.choice(JUNK + RUNS) if odd else chance.choice(RUNS[:3])
    if what == "resume":
        return ["--resume", which]
    actions = [*sample.ACTIONS, "nothing"] if odd else [*sample.ACTIONS]
    return [which, *([chance.choice(actions)] if what == "sample" and chance.random() < 0.7 else [])]


def _option(what: str, words: list[str], chance: Random) -> list[str]:
    actions = _actions(what, words[1] if what == "sample" and len(words) > 1 else None)
    action = chance.choice(actions)
    name = chance.choice(action.option_strings)
    name = name.replace("_", "-") if chance.random() < 0.7 else name
    if action.nargs == 0 and chance.random() < 0.9:
        return [name]
    values = [_value(action, chance) for _ in range(chance.choice((1, 1, 1, 2)) if action.nargs == "+" else 1)]
    return [f"{name}={values[0]}"] if chance.random() < 0.3 else [name, *values]


def _value(action: argparse.Action, chance: Random) -> str:
    own = BY_NAME.get(action.dest, [])
    if isinstance(action.choices, list | tuple):
        own = [*own, *map(str, action.choices)]
    if own and chance.random() < 0.7:
        return chance.choice(own)
    fits = [str(action.default)]
    if isinstance(action.default, bool):
        fits += ["true", "false"]
    elif isinstance(action.default, int | float) or "count" in action.dest or action.dest.endswith("_every"):
        fits += NUMBERS
    word = chance.choice(fits if chance.random() < 0.75 else JUNK)
    return word if action.dest not in SMALL_ONLY or len(word) < 4 else "1"


def _mutated(words: list[str], chance: Random) -> list[str]:
    """Most often the same, else cut, repeated, without a value, in another order or with junk."""
    words = list(words)
    where = chance.randrange(len(words)) if words else 0
    match chance.choice(("",) * 9 + ("cut", "repeat", "drop", "junk", "turn")):
        case "cut" if words:
            words[where] = words[where][: chance.randrange(len(words[where]) + 1)]
        case "repeat" if words:
            words += words[where:]
        case "drop" if words:
            del words[where]
        case "junk":
            words.insert(where, chance.choice(JUNK))
        case "turn":
            words = words[where:] + words[:where]
    return words


class _Parsing(Exception):
    """Carries a command's parser out of it."""


@cache
def _actions(what: str, action: str | None = None) -> list[argparse.Action]:
    """The options of a command, as its own parser knows them. `--submit` and what ends at once is left out."""
    parse: dict[str, Callable[[], Any]] = {
        "sample": lambda: sample._parser(action if action in sample.ACTIONS else None).parse_args([]),
        "edit": lambda: edit.parse([]),
        "evaluate": lambda: evaluate.parse([]),
        "export": lambda: export.parse([]),
        "plan": lambda: plan.parse(["r3gan-faces"]),
        "verify": lambda: verify.parse(["r3gan-faces"]),
    }

    def caught(parser: Parser, *_: Any, **__: Any) -> None:
        raise _Parsing(parser)

    with mock.patch.object(Parser, "parse_args", caught):
        try:
            parse.get(what, lambda: fit.parse(["r3gan-faces"]))()
        except _Parsing as found:
            parser = found.args[0]
    return [each for each in parser._actions if each.option_strings]
