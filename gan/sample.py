"""`python -m gan.sample`: draw what a run's networks make, and take styles from one picture to another."""

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from gan.app.command import command
from gan.app.outputs import run
from gan.app.painting.actions import ACTIONS
from gan.app.painting.painter import has_styles
from gan.app.painting.reopen import open_run
from gan.app.run import options
from gan.app.run.parser import Parser
from gan.files.errors import UserError, printable

EXAMPLES = """actions:
{actions}

A picture is the number of a held-out one, train:NUMBER, or files of yours as picture.jpg:labels.png.
Styles are those of a picture, a file of saved styles (.pt), or mean: the mean of each region over training pictures.

examples:
  python -m gan.sample                                           the newest run, its action by default
  python -m gan.sample auto transfer --from 3 --to 1 2 4         three pictures in the styles of a fourth
  python -m gan.sample auto transfer --from 3 --to 1 --region hair
  python -m gan.sample auto transfer --from 3 --to 1 2 --each    a row for each region by itself
  python -m gan.sample auto interpolate --between 3 5 --on 1 --frames 10
  python -m gan.sample auto save-labels --picture 3 -o mine.png  then paint on it, and
  python -m gan.sample auto repaint --picture 3 --label mine.png
  python -m gan.sample auto save-styles --picture me.jpg:mine.png -o me.pt
  python -m gan.sample auto transfer --from me.pt --to 0 1 2
  python -m gan.sample runs/001-sean-faces transfer --help       the options of an action
"""
Frames = restricted_number_type("Frames", int, [(">=", 2)])


@command
def main(argv: list[str]) -> None:
    """Open the run, do one thing with its networks, and name the files that were written."""
    settings = parse(argv)
    opened = open_run(settings.which, settings.out, settings.device, settings.data, settings.run)
    if settings.action is None:
        settings.action, settings.picture = ("reconstruct" if has_styles(opened) else "show"), None
    print(printable(f"{opened.folder.path}, step {opened.step}"), flush=True)
    for path in ACTIONS[settings.action](opened, settings):
        print(printable(f"  {path}"))


def parse(argv: list[str]) -> Namespace:
    """Read the command line: the run, the action and its options. Without an action, `main` chooses it by the game."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))[:2]
    action = words[1] if len(words) > 1 else None
    if action is not None and action not in ACTIONS:
        raise UserError(f"unknown action '{action}'; known: {', '.join(ACTIONS)}")
    if words and words[0] in ACTIONS and not Path(words[0]).exists():
        raise UserError(f"say which run comes first: python -m gan.sample auto {' '.join(argv)}")
    settings = _parser(action).parse_args(argv)
    if settings.action != action:
        raise UserError("the run and the action come first: python -m gan.sample RUN ACTION [options]")
    return settings


def _count_option(add: Callable[..., Any]) -> None:
    add("--count", metavar="N", type=PositiveInt, default=8, help="how many held-out pictures")


def _picture_option(add: Callable[..., Any]) -> None:
    add("--picture", type=str, default="0", help="the picture; default the first held-out one")


def _list_option(add: Callable[..., Any], name: str, metavar: str, help: str) -> None:
    add(name, metavar=metavar, nargs="+", type=str, default=None, help=help)


def _region_option(add: Callable[..., Any]) -> None:
    _list_option(add, "--region", "NAME", "only these regions' styles, by name or number")


def _missing_option(add: Callable[..., Any], *more: str) -> None:
    own = ", the painted picture's own" if more else ""
    add(
        "--missing",
        type=Literal[("mean", *more, "zero")],
        default="mean",
        help=f"styles of regions that a picture lacks: the mean of training pictures{own}, or none",
    )


def _reconstruct_options(add: Callable[..., Any]) -> None:
    _count_option(add)
    _list_option(add, "--picture", "PICTURE...", "these pictures; default the first --count held-out ones")


def _transfer_options(add: Callable[..., Any]) -> None:
    _list_option(add, "--from", "STYLES", "the styles; default the first five held-out pictures")
    _list_option(add, "--to", "PICTURE", "the pictures to paint; default the first five held-out ones")
    _region_option(add)
    add("--each", action="store_true", help="each region by itself, a row each; for one picture's styles")
    _missing_option(add, "own")


def _interpolate_options(add: Callable[..., Any]) -> None:
    _list_option(add, "--between", "STYLES", "two styles; default those of held-out pictures 0 and 1")
    _list_option(add, "--on", "PICTURE...", "the pictures to paint; default the first of the two")
    add("--frames", metavar="N", type=Frames, default=8, help="how many pictures, the two ends among them")
    _region_option(add)
    _missing_option(add, "own")


def _repaint_options(add: Callable[..., Any]) -> None:
    _picture_option(add)
    what = "the edited label map: a PNG of numbers or of save-labels' colours"
    add("--label", metavar="FILE", type=str, default=None, help=what)
    _missing_option(add)


_OPTIONS: dict[str | None, Callable[[Callable[..., Any]], None]] = {
    None: _count_option,
    "show": _count_option,
    "reconstruct": _reconstruct_options,
    "transfer": _transfer_options,
    "interpolate": _interpolate_options,
    "repaint": _repaint_options,
    "mean-styles": _count_option,
    "save-styles": _picture_option,
    "save-labels": _picture_option,
}


def _parser(action: str | None) -> Parser:
    described = "\n".join(f"  {name:13}{function.__doc__.splitlines()[0]}" for name, function in ACTIONS.items())
    parser = Parser(
        prog="python -m gan.sample",
        usage=f"python -m gan.sample [RUN [{action or 'ACTION'}]] [options]",
        description=ACTIONS[action].__doc__ if action else "Look at what a run's networks make.",
        epilog=EXAMPLES.format(actions=described),
    )
    options.add_saved_run(parser)
    add = parser.add_argument
    add("action", nargs="?", default=None, help="what to do, see below; by default a grid of held-out pictures")
    _OPTIONS[action](add)
    if action in ("transfer", "interpolate", "repaint", "mean-styles"):
        what = "how many training pictures the mean styles are of"
        add("--mean-of", metavar="N", type=PositiveInt, default=1000, help=what)
    if action not in ("save-styles", "save-labels"):
        add("--singles", action="store_true", help="also write each picture by itself, in its own size")
        what = "decides the noise, which is the same in all pictures"
        add("--seed", metavar="N", type=NonNegativeInt, default=0, help=what)
    where = "where to write; default in the run's samples/"
    add("-o", "--file", metavar="FILE", type=str | None, default=None, help=where)
    add("--device", type=str, default="auto", help="what to compute on: auto, cpu, cuda or another device here")
    return parser


if __name__ == "__main__":
    run(main)
