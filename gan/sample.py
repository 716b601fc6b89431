"""`python -m gan.sample`: draw what a run's networks make, and take styles from one picture to another."""

from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from gan.app.command import command, working
from gan.app.outputs import run, say
from gan.app.run import options
from gan.app.run.parser import Parser
from gan.files.errors import UserError

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
  python -m gan.sample ffhq.pkl --seeds 0-63 --truncation 0.7    a published file of StyleGAN2 or R3GAN
"""
ACTIONS = {
    "show": "Draw the grid that training draws, and write its sounds; for any game.",
    "reconstruct": "Paint pictures again from their own label maps and styles.",
    "transfer": "Paint some pictures in the styles of others, or in those of some regions only.",
    "interpolate": "Go from the styles of one picture to those of another in equal steps.",
    "repaint": "Paint a picture again after its label map was edited.",
    "mean-styles": "Take the mean of each region's styles over training pictures, and paint held-out label maps in it.",
    "save-styles": "Write the styles of a picture to a file, to be used wherever styles are asked for.",
    "save-labels": "Write the label map of a picture as a palette PNG to paint on, and what its colours mean.",
}

Frames = restricted_number_type("Frames", int, [(">=", 2)])


@command
def main(argv: list[str]) -> None:
    """Open the run, do one thing with its networks, and name the files that were written."""
    if argv and argv[0].lower().endswith(".pkl"):
        settings = parse_seeds(argv)
        with working():
            from gan.app.painting import seeds

        say(*seeds.draw(settings))
        return
    settings = parse(argv)
    with working():
        from gan.app.painting import actions
        from gan.app.painting.painter import has_styles
        from gan.app.painting.reopen import open_run

    opened = open_run(settings.which, settings.out, settings.device, settings.data, settings.run)
    if settings.action is None:
        settings.action, settings.picture = ("reconstruct" if has_styles(opened) else "show"), None
    say(f"{opened.folder.path}, step {opened.step}")
    say(*(f"  {path}" for path in actions.ACTIONS[settings.action](opened, settings)))


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


def parse_seeds(argv: list[str]) -> Namespace:
    """Read the command line for a file of published networks."""
    parser = Parser(
        prog="python -m gan.sample",
        usage="python -m gan.sample FILE.pkl [--seeds 0-63] [options]",
        description="Draw the pictures of seeds from a published file of StyleGAN2 or R3GAN.",
    )
    add = parser.add_argument
    add("networks", metavar="FILE.pkl", type=str, help="the file; no code in it is run")
    add("--seeds", metavar="LIST", type=str, default="0-63", help="e.g. 0-63 or 1,5,8-10, as in the published code")
    what = "below 1, pictures are nearer to the average and differ less; StyleGAN2 only"
    add("--truncation", metavar="PSI", type=float, default=1.0, help=what)
    what = "the class to draw, by its number; default: each in turn"
    add("--class", dest="label", metavar="N", type=NonNegativeInt | None, default=None, help=what)
    add("--singles", action="store_true", help="also write each picture by itself")
    add("-o", "--file", metavar="FILE", type=str | None, default=None, help="where to write; default FILE-seeds.png")
    add("--device", type=str, default="auto", help="what to compute on: auto, cpu, cuda or another device here")
    return parser.parse_args(argv)


Option = tuple[str, dict[str, Any]]  # its name, and the other arguments of add_argument


def _several(name: str, metavar: str, help: str) -> Option:
    return name, {"metavar": metavar, "nargs": "+", "type": str, "default": None, "help": help}


def _missing(*ways: str) -> Option:
    own = ", the painted picture's own" if "own" in ways else ""
    what = f"styles of regions that a picture lacks: the mean of training pictures{own}, or none"
    # pyrefly: ignore[not-a-type] - jsonargparse reads this type when the program runs
    return "--missing", {"type": Literal[ways], "default": "mean", "help": what}


def _number(name: str, kind: type, default: int, help: str) -> Option:
    return name, {"metavar": "N", "type": kind, "default": default, "help": help}


COUNT = _number("--count", PositiveInt, 8, "how many held-out pictures")
MEAN_OF = _number("--mean-of", PositiveInt, 1000, "how many training pictures the mean styles are of")
PICTURE = ("--picture", {"type": str, "default": "0", "help": "the picture; default the first held-out one"})
REGION = _several("--region", "NAME", "only these regions' styles, by name or number")
EACH = ("--each", {"action": "store_true", "help": "each region by itself, a row each; for one picture's styles"})
LABEL = "the edited label map: a PNG of numbers or of save-labels' colours"
GRID = (
    ("--singles", {"action": "store_true", "help": "also write each picture by itself, in its own size"}),
    _number("--seed", NonNegativeInt, 0, "decides the noise, which is the same in all pictures"),
)
OPTIONS: dict[str | None, tuple[Option, ...]] = {
    None: (COUNT, *GRID),
    "show": (COUNT, *GRID),
    "reconstruct": (
        COUNT,
        _several("--picture", "PICTURE...", "these pictures; default the first --count held-out ones"),
        *GRID,
    ),
    "transfer": (
        _several("--from", "STYLES", "the styles; default the first five held-out pictures"),
        _several("--to", "PICTURE", "the pictures to paint; default the first five held-out ones"),
        *(REGION, EACH, _missing("mean", "own", "zero"), MEAN_OF, *GRID),
    ),
    "interpolate": (
        _several("--between", "STYLES", "two styles; default those of held-out pictures 0 and 1"),
        _several("--on", "PICTURE...", "the pictures to paint; default the first of the two"),
        _number("--frames", Frames, 8, "how many pictures, the two ends among them"),
        *(REGION, _missing("mean", "own", "zero"), MEAN_OF, *GRID),
    ),
    "repaint": (
        PICTURE,
        ("--label", {"metavar": "FILE", "type": str, "default": None, "help": LABEL}),
        *(_missing("mean", "zero"), MEAN_OF, *GRID),
    ),
    "mean-styles": (COUNT, MEAN_OF, *GRID),
    "save-styles": (PICTURE,),
    "save-labels": (PICTURE,),
}


def _parser(action: str | None) -> Parser:
    described = "\n".join(f"  {name:13}{what}" for name, what in ACTIONS.items())
    parser = Parser(
        prog="python -m gan.sample",
        usage=f"python -m gan.sample [RUN [{action or 'ACTION'}]] [options]",
        description=ACTIONS[action] if action else "Look at what a run's networks make.",
        epilog=EXAMPLES.format(actions=described),
    )
    options.add_saved_run(parser)
    add = parser.add_argument
    add("action", nargs="?", default=None, help="what to do, see below; by default a grid of held-out pictures")
    for name, how in OPTIONS[action]:
        add(name, **how)
    where = "where to write; default in the run's samples/"
    add("-o", "--file", metavar="FILE", type=str | None, default=None, help=where)
    add("--device", type=str, default="auto", help="what to compute on: auto, cpu, cuda or another device here")
    return parser


if __name__ == "__main__":
    run(main)
