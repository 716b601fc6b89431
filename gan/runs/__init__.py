"""The runs: each is a function that puts a game, its data and its settings together.

The command line offers every keyword of a run's function as an option, also those that it passes on to another
function with `**settings`. So a new run is a new function and a line in RUNS. A person's own run needs no line: it is
typed as `path/to/my_game.py:my_run` or `package.module:my_run`.
"""

import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from gan.files.errors import UserError
from gan.runs import biggan, faces, faces_from_noise, hifigan, own, pairs, r3gan, sides, stylegan2, vqgan
from gan.runs.run import HELD_OUT, Run, Unchosen, say, shared

__all__ = ["HELD_OUT", "RUNS", "Run", "build", "find", "full_name", "short_name"]

# By their names, in the order in which they are listed.
RUNS: dict[str, Callable[..., Run]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(faces.sean_faces, stylegan2.stylegan2, r3gan.r3gan, biggan.biggan, vqgan.vqgan, pairs.sean, pairs.spade),
        *(sides.pix2pix, sides.cyclegan, sides.cut, hifigan.hifigan),
        *(faces.spade_faces, faces.pix2pix_faces, faces.cyclegan_faces, faces.cut_faces),
        *(faces_from_noise.r3gan_faces, faces_from_noise.wgan_gp_faces, faces_from_noise.stylegan_faces),
        *(faces_from_noise.biggan_faces, faces_from_noise.dmd2_faces, faces_from_noise.dmd2_lora_faces),
        *(faces.vqgan_faces, faces.byol_faces, hifigan.hifigan_tones),
    )
}

# Names of before `sean --data PATH` found out which set lies there.
OLD_NAMES = {f"sean-{name}": "sean" for name in ("celebamask", "ade20k", "cityscapes", "coco", "facades", "folder")}
OLD_NAMES["spade-folder"] = "spade"


# What torch says of sizes beyond all memory. It has no error of its own for them.
_TOO_LARGE = re.compile(r"can't allocate memory|Overflow when unpacking|overflowed|integer multiplication overflow")


def find(name: str) -> Callable[..., Run]:
    """The function that makes the run of that name. For a person's own run it imports their module."""
    if ":" in name:
        return own.read(name).load()
    name = OLD_NAMES.get(name, name)
    if name not in RUNS:
        close = get_close_matches(name.lower(), RUNS, 1)
        known = f"known: {', '.join(RUNS)}; or your own: {own.FORM}"
        meant = f"did you mean {close[0]}? Or see --list-runs" if close else known
        if Path(name).is_dir():
            meant = f"a folder follows its option: stylegan2 --data {name}, or --resume {name} to go on with a run"
        raise UserError(f"unknown run '{name}'; {meant}")
    return RUNS[name]


@cache
def _say_new_name(old: str) -> None:
    say(f"{old} is {OLD_NAMES[old]} now, which finds out by itself what lies in --data")


def full_name(name: str) -> str:
    """The name by which the run is found from any folder."""
    return str(own.read(name)) if ":" in name else name


def short_name(name: str) -> str:
    """For folders and messages: the name of a built-in run, and that of the function of an own run."""
    return name.rpartition(":")[2]


def build(name: str, **settings: object) -> Run:
    function = find(name)
    if isinstance(batch := settings.get("batch_size"), Unchosen):
        settings["batch_size"] = shared(batch)
    if name in OLD_NAMES:
        _say_new_name(name)
    try:
        with own.looking_for_its_own():
            run = function(**settings)
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        if isinstance(error, RuntimeError | TypeError) and not _TOO_LARGE.search(str(error)):
            raise
        raise UserError(f"run '{short_name(name)}' is too large for this machine, with these settings") from error
    if not isinstance(run, Run):
        raise UserError(f"{name} returned a {type(run).__name__}; return gan.runs.Run(game, data, max_steps)")
    return run
