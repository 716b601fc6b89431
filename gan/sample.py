"""`python -m gan.sample`: draw what a run's networks make, from seeds or in the styles of pictures."""

from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from gan.app.command import command, working
from gan.app.outputs import run, say
from gan.app.run import options
from gan.app.run.parser import Parser
from gan.files.errors import UserError

if TYPE_CHECKING:
    from gan.app.painting.actions import Shown

EXAMPLES = """actions of any run:
{any}

actions of a run that draws from noise, and of a published file of StyleGAN2 or R3GAN:
{seeds}

actions of a run of SEAN:
{styles}

Seeds are typed as 0-63 or 1,5,8-10. A picture is the number of a held-out one, train:NUMBER, or files of yours as
picture.jpg:labels.png. Styles are those of a picture, a file of saved styles (.pt), or mean: the mean of each region
over training pictures.

examples:
  python -m gan.sample                                           the newest run, its action by default
  python -m gan.sample auto --seeds 0-63 --truncation 0.7        of a run that draws from noise
  python -m gan.sample ffhq.pkl --seeds 0-63 --class 3           of a published file
  python -m gan.sample auto mix --rows 0-3 --columns 4-9 --layers 4-7
  python -m gan.sample auto interpolate --between 3 5 9 3 --frames 60 -o walk.mp4
  python -m gan.sample auto classes --seeds 0-7                  a row for each class
  python -m gan.sample auto files --count 50000 -o fakes.zip     for a program that computes FID
  python -m gan.sample auto transfer --from 3 --to 1 2 4         three pictures in the styles of a fourth
  python -m gan.sample auto transfer --from 3 --to 1 --region hair
  python -m gan.sample auto transfer --from 3 --to 1 2 --each    a row for each region by itself
  python -m gan.sample auto interpolate --between 3 5 --on 1 --frames 60 -o hair.gif
  python -m gan.sample auto save-labels --picture 3 -o mine.png  then paint on it, and
  python -m gan.sample auto repaint --picture 3 --label mine.png
  python -m gan.sample auto save-styles --picture me.jpg:mine.png -o me.pt
  python -m gan.sample auto transfer --from me.pt --to 0 1 2
  python -m gan.sample runs/001-sean-faces transfer --help       the options of an action
"""
ACTIONS = {
    "show": "Draw the grid that training draws, and write its sounds.",
    "draw": "Draw the pictures of seeds; what is done if no action is typed.",
    "mix": "Draw the pictures of some seeds (rows) with some layers' styles of others (columns); for StyleGAN2.",
    "interpolate": "Go from the styles of one picture to those of another, or from seed to seed, in equal steps.",
    "classes": "Draw the same seeds in each class.",
    "files": "Write the pictures of many seeds, each into a file, for a program that scores them.",
    "reconstruct": "Paint pictures again from their own label maps and styles; what is done if no action is typed.",
    "transfer": "Paint some pictures in the styles of others, or in those of some regions only.",
    "repaint": "Paint a picture again after its label map was edited.",
    "mean-styles": "Take the mean of each region's styles over training pictures, and paint held-out label maps in it.",
    "save-styles": "Write the styles of a picture to a file, to be used wherever styles are asked for.",
    "save-labels": "Write the label map of a picture as a palette PNG to paint on, and what its colours mean.",
}

Frames = restricted_number_type("Frames", int, [(">=", 2)])
Many = restricted_number_type("Many", int, [(">=", 1), ("<=", 10_000_000)])
Fps = restricted_number_type("Fps", int, [(">=", 1), ("<=", 240)])


@command
def main(argv: list[str]) -> None:
    """Open the run, do one thing with its networks, and name the files that were written."""
    settings = parse(argv)
    with working():
        from gan.app.drawing.opened import open

    where = {"out": settings.out, "data": settings.data, "name": settings.run}
    opened = open(settings.which, settings.device, **({} if settings.which.lower().endswith(".pkl") else where))
    say(opened.title)
    say(*(f"  {path}" for path in act(opened, settings, argv)))


def act(opened: "Shown", settings: Namespace, argv: list[str]) -> list[Path]:
    """Do what was typed, and write what it gives. Returns the files."""
    from gan.app.painting import video
    from gan.app.painting.sheet import Sheet

    action = settings.action or opened.default
    typed = _fitting(action, settings, argv, opened)
    made = getattr(opened, action.replace("-", "_"))(**typed)
    if not isinstance(made, Sheet):
        return made
    if made.suffix == ".gif" and not settings.file:
        say(video.ADVICE)
    path = settings.file or opened.path(made.name, made.suffix)
    return made.save(path, settings.singles, settings.get("fps", 30))


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


def _fitting(action: str, settings: Namespace, argv: list[str], opened: "Shown") -> dict[str, Any]:
    """The options as keywords of the action. An action or an option that this run does not have is refused."""
    known = ({} if opened.run is None else OPTIONS["any"]) | OPTIONS[opened.kind]
    if action not in known:
        raise UserError(f"{opened.title}: {opened.about}, so there is no '{action}'; type {', '.join(known)}")
    names = dict(known[action])
    everywhere = {"--device", "--file", *(() if opened.run is None else ("--run", "--data", "--out"))}
    typed = {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    if wrong := sorted(typed - everywhere - names.keys()):
        raise UserError(f"{opened.title}: {opened.about}, where {wrong[0]} does nothing; leave {wrong[0]} out")
    chosen = {how.get("dest", name[2:].replace("-", "_")) for name, how in names.items()} - {"singles", "fps"}
    if action in WRITERS:
        chosen.add("file")
    given = {name: settings[name] for name in chosen if settings[name] is not None}
    return {f"{name}_" if name == "from" else name: value for name, value in given.items()}


Option = tuple[str, dict[str, Any]]  # its name, and the other arguments of add_argument


def _several(name: str, metavar: str, help: str) -> Option:
    return name, {"metavar": metavar, "nargs": "+", "type": str, "default": None, "help": help}


def _missing(*ways: str) -> Option:
    own = ", the painted picture's own" if "own" in ways else ""
    what = f"styles of regions that a picture lacks: the mean of training pictures{own}, or none"
    # pyrefly: ignore[not-a-type] - jsonargparse reads this type when the program runs
    return "--missing", {"type": Literal[ways], "default": "mean", "help": what}


def _number(name: str, kind: type, default: int | None, help: str) -> Option:
    return name, {"metavar": "N", "type": kind, "default": default, "help": help}


def _list(name: str, default: str | None, help: str) -> Option:
    return name, {"metavar": "LIST", "type": str | None, "default": default, "help": help}


COUNT = _number("--count", PositiveInt, 8, "how many held-out pictures")
MEAN_OF = _number("--mean-of", PositiveInt, 1000, "how many training pictures the mean styles are of")
PICTURE = ("--picture", {"type": str, "default": "0", "help": "the picture; default the first held-out one"})
REGION = _several("--region", "NAME", "only these regions' styles, by name or number")
EACH = ("--each", {"action": "store_true", "help": "each region by itself, a row each; for one picture's styles"})
LABEL = "the edited label map: a PNG of numbers or of save-labels' colours"
SINGLES = ("--singles", {"action": "store_true", "help": "also write each picture by itself, in its own size"})
GRID = (SINGLES, _number("--seed", NonNegativeInt, 0, "decides SEAN's noise, which is the same in all pictures"))
BETWEEN = "two styles, or seeds one after the other; default held-out pictures 0 and 1, or seeds 0 1 2 3 0"
MOVING = (
    _several("--between", "WHICH", BETWEEN),
    _number(
        "--frames", Frames | None, None, "pictures from one to the next, both among them; default 8, or 60 of seeds"
    ),
    _number("--fps", Fps, 30, "pictures a second, in a file that ends in .gif or .mp4"),
)
CLASS = "the class, by its number or name; default: the classes in turn"
TRUNCATED = (
    ("--truncation", {"metavar": "PSI", "type": float, "default": 1.0, "help": "below 1: nearer to the average, of w"}),
    _number("--cutoff", NonNegativeInt | None, None, "truncate only so many layers, from the coarsest on"),
)
HOW = (
    ("--class", {"metavar": "CLASS", "dest": "label", "type": str | None, "default": None, "help": CLASS}),
    *TRUNCATED,
)
WRITERS = ("files", "save-styles", "save-labels")  # they write files themselves
OPTIONS: dict[str, dict[str, tuple[Option, ...]]] = {
    "any": {"show": (COUNT, *GRID)},
    "seeds": {
        "draw": (_list("--seeds", "0-63", "which seeds: 0-63, or 1,5,8-10"), *HOW, SINGLES),
        "mix": (
            _list("--rows", "0-3", "seeds of the rows"),
            _list("--columns", "4-9", "seeds of the columns"),
            _list("--layers", None, "layers whose styles are those of the column; default the finer half"),
            *(*HOW, SINGLES),
        ),
        "interpolate": (*MOVING, *HOW, SINGLES),
        "classes": (_list("--seeds", "0-7", "which seeds, a column each"), *TRUNCATED, SINGLES),
        "files": (_number("--count", Many, 50_000, "how many; their seeds are 0, 1 and so on"), *HOW),
    },
    "styles": {
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
            *MOVING,
            _several("--on", "PICTURE...", "the pictures to paint; default the first of the two"),
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
    },
}


def _parser(action: str | None) -> Parser:
    """The parser of an action, with the options that it has in any kind of run."""
    described = {
        kind: "\n".join(f"  {name:13}{ACTIONS[name]}" for name in actions) for kind, actions in OPTIONS.items()
    }
    parser = Parser(
        prog="python -m gan.sample",
        usage=f"python -m gan.sample [RUN|FILE.pkl [{action or 'ACTION'}]] [options]",
        description=ACTIONS[action] if action else "Look at what a run's networks make.",
        epilog=EXAMPLES.format(**described),
    )
    options.add_saved_run(parser)
    add = parser.add_argument
    add("action", nargs="?", default=None, help="what to do, see below; by default draw, reconstruct or show")
    without = {"any": "show", "seeds": "draw", "styles": "reconstruct"}
    found = [option for kind, actions in OPTIONS.items() for option in actions.get(action or without[kind], ())]
    for name, how in dict(found).items():
        add(name, **how)
    where = "where to write; default in the run's samples/, or here for a FILE.pkl"
    add("-o", "--file", metavar="FILE", type=str | None, default=None, help=where)
    add("--device", type=str, default="auto", help="what to compute on: auto, cpu, cuda or another device here")
    return parser


if __name__ == "__main__":
    run(main)
