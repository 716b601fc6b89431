"""`python -m gan.sample`: draw what a run's networks make, from seeds or in the styles of pictures."""

from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from gan.app.command import command, on_ranks, working
from gan.app.outputs import run, say
from gan.app.run import options
from gan.app.run.parser import Parser
from gan.files.errors import UserError
from gan.files.system import quoted

if TYPE_CHECKING:
    from gan.app.sampling.shown import Shown

EXAMPLES = """actions of any run, and translate also of a published file of pix2pix, CycleGAN, CUT, VQGAN or HiFi-GAN:
{any}

actions of a run that draws from noise, and of a published file of StyleGAN2, R3GAN (.pkl) or BigGAN (G_ema.pth):
{seeds}

actions of a run of SEAN:
{styles}

Seeds are typed as 0-63, 1,5,8-10 or 1 5 8-10. A picture is the number of a held-out one, train:NUMBER, or files of
yours as picture.jpg:labels.png. Styles are those of a picture, a file of saved styles (.pt), or mean: the mean of each
region over training pictures.

examples:
  python -m gan.sample                                           the newest run, its action by default
  python -m gan.sample auto --inputs photos/ --out painted/      of a run that translates: pix2pix, CycleGAN, CUT
  python -m gan.sample auto --inputs labels/ --out painted/      of SEAN or SPADE: paints a folder of label maps
  python -m gan.sample auto --inputs labels/ --from 3            of SEAN: in the styles of picture 3, not of the mean
  python -m gan.sample auto --inputs sounds/ --out made/         of HiFi-GAN: sounds, or mel spectrograms (.npy)
  python -m gan.sample auto --inputs photos/ --out codes/ --direction codes        of VQGAN: a map of codes (.npy) each
  python -m gan.sample auto --inputs codes/ --out painted/ --direction pictures    of VQGAN: pictures of such maps
  python -m gan.sample auto --seeds 0-63 --truncation 0.7        of a run that draws from noise
  python -m gan.sample auto --seeds 7 -o seven.png               one picture, in its own size
  python -m gan.sample ffhq.pkl --seeds 0-63 --class 3           of a published file
  python -m gan.sample latest_net_G.pth --inputs photos/ --out painted/     of a published network that translates
  python -m gan.sample auto mix --rows 0-3 --columns 4-9 --layers 4-7
  python -m gan.sample auto interpolate --between 3 5 9 3 --frames 60 -o walk.mp4
  python -m gan.sample auto classes --seeds 0-7                  a row for each class
  python -m gan.sample auto files --count 50000 -o fakes.zip     for a program that computes FID
  python -m gan.sample auto project --picture me.jpg -o me.pt    finds a picture of yours
  python -m gan.sample auto interpolate --between me.pt you.pt --frames 60
  python -m gan.sample auto directions --latent me.pt --direction 3 --strength -4:4
  python -m gan.sample auto directions --by pca --count 8 --seeds 0-3
  python -m gan.sample auto transfer --from 3 --to 1 2 4         three pictures in the styles of a fourth
  python -m gan.sample auto transfer --from 3 --to 1 --region hair
  python -m gan.sample auto interpolate --between 3 5 --on 1 --frames 60 -o hair.gif
  python -m gan.sample auto save-labels --picture 3 -o mine.png  then paint on it, and
  python -m gan.sample auto repaint --picture 3 --label mine.png
  python -m gan.sample auto save-styles --picture me.jpg:mine.png -o me.pt
  python -m gan.sample auto transfer --from me.pt --to 0 1 2
  python -m gan.sample runs/001-sean-faces transfer --help       the options of an action
"""
ACTIONS = {
    "show": "Draw the grid that training draws, and write its sounds.",
    "translate": "Translate the pictures of a folder of yours; what is done if --inputs is typed.",
    "draw": "Draw the pictures of seeds; what is done if no action is typed.",
    "mix": "Draw the pictures of some seeds (rows) with some layers' styles of others (columns); for StyleGAN2.",
    "interpolate": "Go from the styles of one picture to those of another, or from seed to seed, in equal steps.",
    "classes": "Draw the same seeds in each class.",
    "files": "Write the pictures of many seeds, each into a file, for a program that scores them.",
    "project": "Find a picture of yours in StyleGAN2's w: the picture beside it, a video, and a latent file.",
    "from": "Draw latent files of project again.",
    "directions": "Go from seeds or latent files in the main directions of StyleGAN2's w.",
    "reconstruct": "Paint pictures again from their own label maps and styles; what is done if no action is typed.",
    "transfer": "Paint some pictures in the styles of others, or in those of some regions only.",
    "repaint": "Paint a picture again after its label map was edited.",
    "save-styles": "Write styles, of a picture or the mean, to a file, to be used wherever styles are asked for.",
    "save-labels": "Write the label map of a picture as a palette PNG to paint on, and say what its colours mean.",
}

Frames = restricted_number_type("Frames", int, [(">=", 2)])
Many = restricted_number_type("Many", int, [(">=", 1), ("<=", 10_000_000)])
Fps = restricted_number_type("Fps", int, [(">=", 1), ("<=", 240)])


@command
def main(argv: list[str]) -> None:
    settings = parse(argv)
    with working():
        from gan.app.run.reopen import device_of

    if settings.get("inputs"):  # then --out is where the translations go
        typed = any(word.partition("=")[0] == "--out" for word in argv)
        settings.file, settings.out = settings.file or (str(settings.out) if typed else None), Path("runs")
    if settings.action != "files":
        _sample(settings, argv, settings.device)
        return
    place = device_of(settings.device)
    devices = settings.devices if place.index is None else f"{place.index},"
    on_ranks("gan.sample", argv, place.type, devices, partial(_sample, settings, argv))


def _sample(settings: Namespace, argv: list[str], device: str) -> None:
    from gan.app.editing.editors import open
    from gan.app.run.reopen import open_together

    where = {"out": settings.out, "data": settings.data, "name": settings.run, "weights": settings.weights}
    opened = open_together(
        lambda which: open(which, device, **where),
        settings.which,
        lambda opened: settings.which if opened.run is None else opened.run.checkpoint,
    )
    if settings.standing:
        opened.stand(settings.standing)
    say(opened.title)
    say(*(f"  {path}" for path in act(opened, settings, argv)))


def act(opened: "Shown", settings: Namespace, argv: list[str]) -> list[Path]:
    """Do what was typed, and write what it gives. Returns the files."""
    from gan.app.sampling.sheet import NO_MP4, Sheet, refuse_overwriting

    opened.typed = True
    action = settings.action or ("translate" if settings.get("inputs") else opened.default)
    typed = _fitting(action, settings, argv, opened)
    if settings.file:  # what is typed may name files, and pairs of files as picture.jpg:labels.png
        values = [value if isinstance(value, list) else [value] for name, value in typed.items() if name != "file"]
        words = [str(each) for value in values for each in value]
        refuse_overwriting([part for word in words for part in (word, *word.split(":"))], [Path(settings.file)])
    made = getattr(opened, METHODS.get(action, action.replace("-", "_")))(**typed)
    if not isinstance(made, Sheet):
        return made
    if made.suffix == ".gif" and not settings.file:
        say(NO_MP4)
    path = opened.path(made.name + "-raw" * (settings.weights == "raw"), made.suffix, settings.file)
    return made.save(path, settings.singles, settings.get("fps", 30))


def parse(argv: list[str]) -> Namespace:
    """Read the command line: the run, the action and its options. Without an action, `main` chooses it by the game."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))[:2]
    action = words[1] if len(words) > 1 else None
    _no_action("".join(words[:1]), argv)
    for place in [place for place, word in enumerate(argv[:-1]) if word == "--strength"]:
        argv = [*argv[:place], f"--strength={argv[place + 1]}", *argv[place + 2 :]]  # -4:4 looks like an option
    settings = options.parse_saved_run(_parser(action if action in ACTIONS else None), argv)
    _no_action(settings.which, argv)
    if settings.action != action:
        raise UserError("the run and the action come first: python -m gan.sample RUN ACTION [options]")
    return settings


def _no_action(which: str, argv: list[str]) -> None:
    """Refuse an action where the run should be, and say what to type."""
    if which in ACTIONS and not Path(which).exists():
        at = argv.index(which)
        typed = quoted(which, *argv[:at], *argv[at + 1 :])
        raise UserError(f"say which run comes first: python -m gan.sample auto {typed}")


def _fitting(action: str, settings: Namespace, argv: list[str], opened: "Shown") -> dict[str, Any]:
    """The options as keywords of the action. An action or an option that this run does not have is refused."""
    known = dict.fromkeys([*OPTIONS["any"], *OPTIONS[opened.kind]])
    if opened.run is None:
        known.pop("show")
    if not opened.translates:
        known.pop("translate")
    if action not in known:
        encoder = action == "project" and "save-styles" in known
        hint = f". Its encoder finds a picture's styles without a search: {OF_SEAN}" if encoder else ""
        if action == "save-labels" and getattr(opened.game, "labels", 0):
            hint = f". The editor saves label maps: python -m gan.edit {quoted(settings.which)}"
        if action == "translate" and action not in argv:
            raise UserError(f"{opened.title}: {opened.about}, and translates no pictures; leave --inputs out")
        raise UserError(f"{opened.title}: {opened.about}, so there is no '{action}'; type {', '.join(known)}{hint}")
    names = options_of(opened.kind, action) or options_of("any", action)
    everywhere = {"--device", "--file", "--standing", *(["--out"] if action == "translate" else [])}
    everywhere |= set() if opened.run is None else {"--run", "--data", "--out", "--weights"}
    typed = {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    if wrong := sorted(typed - everywhere - names.keys()):
        if wrong[0] == "--seed" and "--seeds" in names:
            raise UserError(f"{opened.title}: {opened.about}; type --seeds and a list, such as --seeds 7")
        if wrong[0] in ("--direction", "--largest") and opened.translates and action != "translate":
            raise UserError(f"{opened.title}: {wrong[0]} is for pictures that are translated; type --inputs, too")
        own = opened.run is not None and ":" in opened.run.name
        seeds = ", or name a run that draws from noise, such as --run stylegan2"
        seeds = ", or derive the game from gan.games.from_noise.FromNoise: see docs/guide/game.md" if own else seeds
        advice = f"leave {wrong[0]} out{seeds if opened.kind == 'any' and '--seeds' in wrong else ''}"
        raise UserError(f"{opened.title}: {opened.about}, where {wrong[0]} does nothing; {advice}")
    chosen = {how.get("dest", name[2:].replace("-", "_")) for name, how in names.items()}
    chosen -= {"singles", "fps", "devices"}
    chosen |= {"file"} if action in WRITERS else set()
    given = {name: settings[name] for name in chosen if settings[name] is not None}
    return {f"{name}_" if name == "from" else name: value for name, value in given.items()}


def _option(help: str, kind: Any = str, metavar: str = "", default: Any = None, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "default": default, "help": help, **more} | ({"metavar": metavar} if metavar else {})


def _number(help: str, kind: Any, default: int | None = None) -> dict[str, Any]:
    return _option(help, kind, "N", default)


def _several(help: str, metavar: str) -> dict[str, Any]:
    return _option(help, metavar=metavar, nargs="+")


LACKING = "styles of regions that a picture lacks: the mean of training pictures"
BY = "found in the weights (SeFa), or by PCA of many w (GANSpace)"
TWO = "two styles, or seeds and latent files in a row; default held-out pictures 0 and 1, or seeds 0 1 2 3 0"
DEVICES = "processes that share the work, each on a device of its own; default 1; auto: all GPUs, or two on CPU"
LPIPS = "compare by LPIPS, with VGG-16's weights (vgg16-397923af.pth); default: by the discriminator's features"
OF_SEAN = "save-styles --picture me.jpg:labels.png -o me.pt, and then transfer --from me.pt --to 0 1 2"
WRITERS = ("translate", "files", "project", "save-styles", "save-labels")  # they write files themselves
METHODS = {"from": "from_"}  # of actions that are words of Python's own
OPTIONS = {
    "any": {"show": "count singles seed", "translate": "inputs direction largest"},
    "seeds": {
        "draw": "seeds class truncation cutoff singles",
        "mix": "rows columns layers class truncation cutoff singles",
        "interpolate": "between frames fps class truncation cutoff singles",
        "classes": "seeds truncation cutoff singles",
        "project": "picture steps tune perceptual class",
        "from": "latent singles",
        "directions": "seeds latent count direction strength by class singles",
        "files": "count seeds class truncation cutoff devices",
    },
    "styles": {
        "reconstruct": "count picture singles seed",
        "transfer": "from to region missing mean-of singles seed",
        "interpolate": "between frames fps on region missing mean-of singles seed",
        "repaint": "picture label missing mean-of singles seed",
        "translate": "inputs from largest missing mean-of seed",
        "save-styles": "picture mean-of",
        "save-labels": "picture",
    },
}
KNOWN = {  # options by their names; what an action understands otherwise stands behind that action's name, too
    "between": _several(TWO, "WHICH"),
    "by": _option(BY, Literal["weights", "pca"], default="weights"),
    "class": _option("the class, by its number or name; default: the classes in turn", metavar="CLASS", dest="label"),
    "columns": _several("seeds of the columns; default 4-9", "LIST"),
    "count": _number("how many held-out pictures", PositiveInt, 8),
    "directions count": _number("how many directions", PositiveInt, 8),
    "files count": _number("how many; their seeds are 0, 1 and so on", Many, 50_000),
    "cutoff": _number("truncate only so many layers, from the coarsest on", NonNegativeInt),
    "directions direction": _number("go in this direction only", NonNegativeInt),
    "devices": _option(DEVICES, PositiveInt | Literal["auto"], "N", 1),
    "fps": _number("pictures a second, in a file that ends in .gif or .mp4", Fps, 30),
    "frames": _number("pictures from one to the next, both among them; default 8, or 60 of seeds", Frames),
    "from": _several("the styles; default the first five held-out pictures", "STYLES"),
    "translate from": _option("of SEAN: the styles to paint label maps in", str, "STYLES", "mean"),
    "direction": _option("which way, of a run that has several: AtoB, BtoA; of VQGAN codes, pictures", metavar="WAY"),
    "inputs": _option(
        "a folder or zip of pictures, a folder of label maps, sounds or codes, or one file, to translate into --out",
        metavar="PATH",
    ),
    "largest": _number(
        "make pictures smaller whose longer side has more pixels; --load-size is the shorter", PositiveInt
    ),
    "label": _option("the edited label map: a PNG of numbers or of save-labels' colours", metavar="FILE"),
    "latent": _several("latent files that project has written, to start from", "FILE"),
    "layers": _several("layers whose styles are those of the column; default the finer half", "LIST"),
    "mean-of": _number("how many training pictures the mean styles are of", PositiveInt, 1000),
    "missing": _option(
        f"{LACKING}, the painted picture's own, or none", Literal["mean", "own", "zero"], default="mean"
    ),
    "repaint missing": _option(f"{LACKING}, or none", Literal["mean", "zero"], default="mean"),
    "translate missing": _option(f"{LACKING}, or none", Literal["mean", "zero"], default="mean"),
    "on": _several("the pictures to paint; default the first of the two", "PICTURE..."),
    "perceptual": _option(LPIPS, Path, "FILE"),
    "picture": _option("the picture; default the first held-out one", default="0"),
    "project picture": _option("yours, or the number of a held-out one; default the first", default="0"),
    "save-styles picture": _option("whose styles: a picture's, or mean; default the first held-out one's", default="0"),
    "reconstruct picture": _several("these pictures; default the first --count held-out ones", "PICTURE..."),
    "region": _several("only these regions' styles, by name or number", "NAME"),
    "rows": _several("seeds of the rows; default 0-3", "LIST"),
    "seed": _number("decides SEAN's noise, which is the same in all pictures", NonNegativeInt, 0),
    "classes seeds": _several("which seeds, a column each; default 0-7", "LIST"),
    "directions seeds": _several("seeds to start from; default 0-3", "LIST"),
    "files seeds": _several("these seeds in place of the first --count", "LIST"),
    "draw seeds": _several("which seeds: 0-63, or 1 5 8-10; default 0-63", "LIST"),
    "singles": {"help": "also write each picture by itself, in its own size"},
    "steps": _number("of the search for w", PositiveInt, 1000),
    "strength": _option("from one strength to another by ones, in standard deviations of w", str, "FROM:TO", "-3:3"),
    "to": _several("the pictures to paint; default the first five held-out ones", "PICTURE"),
    "truncation": _option("below 1: nearer to the average, of w", float, "PSI", 1.0),
    "tune": _number("then tune the network to the picture in so many steps, into a .pkl", NonNegativeInt, 0),
}


def options_of(kind: str, action: str) -> dict[str, dict[str, Any]]:
    """The options that an action has in a kind of run, with the arguments of `Parser.option` or `flag`."""
    words = OPTIONS[kind].get(action, "").split()
    return {f"--{word}": KNOWN.get(f"{action} {word}") or KNOWN[word] for word in words}


def _parser(action: str | None) -> Parser:
    """The parser of an action, with the options that it has in any kind of run."""
    listed = {kind: "\n".join(f"  {name:13}{ACTIONS[name]}" for name in names) for kind, names in OPTIONS.items()}
    usage, what = f"[RUN|FILE [{action or 'ACTION'}]] [options]", "Look at what a run's networks make."
    parser = Parser("python -m gan.sample", usage, ACTIONS.get(action or "", what), EXAMPLES.format(**listed))
    options.add_saved_run(parser, weights=True)
    what = "what to do, see below; by default draw, reconstruct or show"
    parser.add_argument("action", nargs="?", default=None, help=what)
    without = {"any": "show", "seeds": "draw", "styles": "reconstruct"}
    found = [options_of(kind, action or without[kind]).items() for kind in OPTIONS]
    found += [] if action else [options_of(kind, "translate").items() for kind in ("any", "styles")]
    for name, how in dict(chain.from_iterable(found)).items():
        (parser.option if "kind" in how else parser.flag)(name, **how)
    where = "where to write; default in the run's samples/, or here for a published FILE"
    parser.option("-o --file", str, where, metavar="FILE")
    what = "first take a BigGAN's batch norms' statistics anew, from so many batches of 64 pictures; published: 16"
    parser.option("--standing", PositiveInt, what, metavar="N")
    options.add_device(parser)
    return parser


if __name__ == "__main__":
    run(main)
