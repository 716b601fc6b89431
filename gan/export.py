"""`python -m gan.export RUN`: write a run's networks, a file for each player, to be loaded with plain torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jsonargparse import Namespace
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from gan.app.command import command, working
from gan.app.outputs import run, say
from gan.app.run import command_line, options
from gan.app.run.parser import Parser, items, listed
from gan.files.disk import free_name, name_for, whole_file
from gan.files.errors import UserError, explained
from gan.files.system import quoted, version_of

if TYPE_CHECKING:
    from gan.app.run.reopen import SavedRun
    from gan.module import GanModule
    from nets.published.files import PublishedFile

Formats = listed("Formats", "torch|onnx", "torch, onnx or both")
README = """{run}, step {step}: one file a player. To read the weights takes torch and safetensors and nothing else.

    from safetensors.torch import load_file
    network.load_state_dict(load_file("{file}.safetensors"))

`network` is one of the class and the sizes named here, made by the package of that class; the run's settings.yaml
has the settings they were made with. Its keys are the network's own. What is in a file is also in its metadata:

    from safetensors import safe_open
    safe_open("{file}.safetensors", "pt").metadata()

"""
WEIGHTS = {"ema": "averaged weights (EMA)", "raw": "raw weights, as they were trained"}
AVERAGED = """An average is of parameters; buffers, such as running statistics, are training's own, unless the player
has ema_buffers='averaged'.
"""
PARAMETRIZED = """{player}: keys with `parametrizations` (e.g. {key}) are torch's own for a
weight that is computed, such as by spectral norm; a network with the same parametrizations
takes them as they are.
"""
PUBLISHED = """{files}: as the published code loads them. Where there are G and G_ema, both are the same generator.
"""
EXAMPLES = """examples:
  python -m gan.export                           the newest run, into its folder's export/step-<step>/
  python -m gan.export runs/001-sean-faces --weights raw
  python -m gan.export RUN --to networks/        into a folder of yours
  python -m gan.export RUN --card --licence "CC BY 4.0"   with a model card, ready for a hub of models
  python -m gan.export RUN --format torch,onnx            the generator also as a program
  python -m gan.export RUN --published           also as the published code's files: latest_net_G.pth of a SEAN,
                                                 network-snapshot.pkl of a StyleGAN2 or an R3GAN
"""


@dataclass(frozen=True)
class Exported:
    """One player's network with the weights of a checkpoint, under the network's own state-dict keys."""

    player: str
    file: str
    network: nn.Module
    weights: Literal["ema", "raw"]
    state: dict[str, Tensor]

    @property
    def described(self) -> dict[str, str]:
        return {"class": class_of(self.network), "file": f"{self.file}.safetensors", "weights": self.weights}


def class_of(network: nn.Module) -> str:
    return f"{type(network).__module__}.{type(network).__name__}"


@command
def main(argv: list[str]) -> None:
    request = parse(argv)
    with working():
        import gan.app.run.reopen  # noqa: F401 - now, and not inside of `export`

    what = {name: request[name] for name in ("which", "to", "weights", "published", "out", "card", "licence", "data")}
    say(*export(**what, formats=request.format or "", name=request.run))


def parse(argv: list[str]) -> Namespace:
    what = "Write each player's network as a safetensors file, which plain torch loads."
    parser = Parser("python -m gan.export", "[RUN] [--weights ema|raw] [--to FOLDER] [options]", what, EXAMPLES)
    options.add_saved_run(parser, weights=True)
    add = parser.option
    add("--to", Path, "a folder to write to; default: export/ in the run's folder")
    parser.flag("--published", "also the files that the published code loads")
    parser.flag("--card", "also a model card: README.md, config.json and pictures, as hubs of models expect them")
    what = "the licence of the data, for the card and its license:; default: the first line of LICENSE in their folder"
    add("--licence", str, what, metavar="TEXT")
    what = "also the generator as a program without our code: torch (.pt2), onnx or both, with a comma"
    add("--format", Formats, what, metavar="LIST")
    return options.parse_saved_run(parser, command_line.arguments(argv))


def export(
    which: str = "auto",
    to: Path | None = None,
    weights: Literal["ema", "raw"] = "ema",
    published: bool = False,
    out: Path = Path("runs"),
    card: bool = False,
    licence: str | None = None,
    formats: str = "",
    **overrides: Any,
) -> list[Path]:
    """Write every player's network and a README on how to load them; returns the files.

    With `card` the README is a model card, with `licence` of the data. `formats` are torch, onnx or both with a comma.

    `which`, `out` and `overrides` are those of `open_run`. With `ema` a player that keeps an average is written with
    averaged weights, and any other with raw ones. All networks are made before the first file is written.
    """
    from gan.app.run.reopen import open_run

    opened = open_run(which, out, weights=weights, exactly=True, **overrides)
    players = networks(opened.run.game, opened.averaged)
    if opened.settings["precision"] == "64-true":
        opened.run.game.float()  # as samples are, that programs and cards show; `players` have copies
    files = _programs(opened, players, formats) if formats else {}  # first: torch may refuse to write one
    files |= {f"{each.file}.safetensors": _safetensors(each, opened) for each in players}
    theirs = _published(opened.run.game) if published else {}
    files |= {name: each.write for name, each in theirs.items()}
    said = _readme(opened, players, theirs)
    # HiFi-GAN's published code has a config.json too: then one file has both.
    config = theirs["config.json"].others if "config.json" in theirs else {}
    files |= _card(opened, players, licence, formats, said, config) if card else {"README.txt": _text(said)}

    default = f"step-{opened.step:06d}" + ("-raw" if weights == "raw" else "")
    folder = opened.folder.path / "export" / default if to is None else to
    return _written(folder, files, "choose a folder with --to")


def _written(folder: Path, files: Mapping[str, Callable[[Path], object]], advice: str) -> list[Path]:
    with explained(f"cannot write to '{folder}': {{why}}; {advice}", OSError, SafetensorError):
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in files.items():
            with whole_file(folder / name) as part:
                write(part)
    return [folder / name for name in files]


def take_from_run(settings: Namespace, argv: Sequence[str] = ()) -> list[str]:
    """If a run is typed after --from, write its published files and take these. Returns what to type for them.

    Its networks are averaged where it has averages. Settings that are not typed in `argv` are the run's, as far as its
    networks were made by them. Pictures get the size of the run's unless another is typed.
    """
    from gan.app.run.folder import is_checkpoint
    from gan.app.run.reopen import open_run
    from gan.app.run.resumed import SHAPES

    typed = settings.get("from_") or ""
    path = Path(typed).expanduser()
    run = next((str(each) for each in (path, *path.parents) if (each / "settings.yaml").is_file()), "RUN")
    if path.suffix == ".safetensors":
        raise UserError(f"--from {typed} is no published file; type --from {quoted(run)}")
    if typed != "auto" and not (path.is_dir() and (str(path) == run or is_checkpoint(path))):
        return []
    if settings.get("resume"):
        raise UserError(f"--from {typed} begins a new run, and --resume goes on with one; leave one of them out")
    opened = open_run(str(path), Path(settings.get("out", "runs")), name=settings.run if typed == "auto" else None)
    own, theirs = (name.partition("-")[0] for name in (settings.run, opened.name))
    if not (own.startswith(theirs) or theirs.startswith(own)) and ":" not in settings.run + opened.name:
        raise UserError(f"--from {typed} is a run of {opened.name}, whose networks {settings.run} does not have")
    game = opened.run.game.float()
    drawer: Any = getattr(game, "drawer", None)
    if drawer is not None:
        drawer.size = None  # all that is drawn, not the middle alone, which published files do not know
    files = {name: file.write for name, file in _published(game, "--from").items()}
    folder = opened.folder.path / "export" / f"step-{opened.step:06d}-from"
    first, *others = _written(folder, files, "type --from and a copy of the run")
    settings.from_ = str(folder if others else first)
    words = ["--from", settings.from_]
    if isinstance(size := opened.of_data("size"), tuple) and settings.get("size", 0) is None:
        settings.size = f"{size[1]}x{size[0]}"
        words += ["--size", settings.size]
    if (scale := opened.settings.get("load_size")) and settings.get("load_size", 0) is None:
        settings.load_size = scale
        words += ["--load-size", str(scale)]
    typed_here = {word.partition("=")[0] for word in command_line.arguments(argv)}
    known = (*SHAPES, "size") if isinstance(settings.get("size"), int) else SHAPES  # None was filled in above
    for name in known if first.suffix != ".pkl" else ():  # which says itself what its networks are
        theirs = opened.settings.get(name)
        if theirs not in (None, settings.get(name, theirs)) and f"--{name}" not in typed_here:
            settings[name] = theirs
            words += [f"--{name.replace('_', '-')}", str(theirs)]
    say(f"begins with {opened.folder.path} after step {opened.step}: {' '.join(words)}")
    return words


def networks(game: "GanModule", averaged: Collection[str]) -> list[Exported]:
    """The players' networks as they are; the weights of the players in `averaged` are averages."""
    found: list[Exported] = []
    taken: set[str] = set()
    for name, player in game.players.items():
        state = player.module.state_dict()
        for key, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise UserError(
                    f"player '{name}': '{key}' of its state dict is no tensor but {type(tensor).__name__}, "
                    f"which a safetensors file cannot hold; keep it in a buffer"
                )
        # Copies, since safetensors refuses shared memory: a layer with two names is written under both.
        state = {key: tensor.clone() for key, tensor in state.items()}
        found.append(Exported(name, free_name(name, taken), player.module, "ema" if name in averaged else "raw", state))
    return found


def _safetensors(each: Exported, opened: "SavedRun") -> Callable[[Path], None]:
    about = {
        "format": "pt",
        "run": opened.folder.path.resolve().name,
        "recipe": opened.name,
        "game": type(opened.run.game).__name__,
        "player": each.player,
        "network": each.described["class"],
        "step": str(opened.step),
        "weights": each.weights,
        "torch": torch.__version__,
        "coordinated-gans": version_of("coordinated-gans") or "a checkout",
    }
    return lambda path: save_file(each.state, path, metadata=about)


def _published(game: "GanModule", option: str = "--published") -> dict[str, "PublishedFile"]:
    """The files of the published code. A network may not have that form, so they are made before any is written."""
    if not callable(files := getattr(game, "published", None)):
        raise UserError(f"{option}: {type(game).__name__} has no published form; leave it out")
    begins = "a training begins with networks in the published form"
    what = begins if option == "--from" else "these networks do not have the published form"
    with explained(f"{what}. {{why}}; or leave {option} out", UserError):
        return {each.name: each if option == "--from" else each.checked() for each in files()}


def _programs(opened: "SavedRun", players: list[Exported], formats: str) -> dict[str, Callable[[Path], object]]:
    """The networks that make what the game shows, as programs; each is compared with its network."""
    from gan.app.exporting import card

    calls = card.calls(opened)
    if not calls:
        what = f"{type(opened.run.game).__name__} shows nothing that the network of a player makes"
        raise UserError(f"--format: {what}; leave it out, or let show(batch) call the network (docs/guide/game.md)")

    def write(kind: str, player: str, path: Path) -> None:
        far = card.write(kind, player, calls[player], path)
        words = f"within {far:.1g} of what the network gives" if far else "exactly what the network gives"
        say(f"{player} as a program of {kind} gives {words}")

    kinds = items(formats)
    return {_program(each, players) + card.SUFFIX[kind]: partial(write, kind, each) for each in calls for kind in kinds}


def _program(name: str, players: list[Exported]) -> str:
    """The name of a program's file, without its ending: that of the player's file, and perhaps the part's name."""
    files = {each.player: each.file for each in players}
    owner, dot, part = name.rpartition(".")
    return files[name] if name in files else f"{files[owner]}{dot}{name_for(part)}"


def _card(
    opened: "SavedRun", players: list[Exported], licence: str | None, formats: str, said: str, known: Mapping[str, Any]
) -> dict[str, Callable[[Path], object]]:
    from gan.app.exporting import card
    from gan.app.fitting.callbacks import SHOWN
    from gan.app.page.run_tables import held_out
    from gan.app.run.reopen import shown_columns
    from gan.app.sampling import grids

    calls, kinds = card.calls(opened), [kind for kind in card.SUFFIX if kind in items(formats)]
    described: dict[str, Any] = {each.player: each.described | {"part": ""} for each in players}
    for name, call in calls.items():
        owner, _, part = name.rpartition(".")
        if name not in described:
            described[name] = described[owner] | {"class": class_of(call.network), "part": f"{part}."}
        if kinds:
            described[name] |= {"programs": [_program(name, players) + card.SUFFIX[kind] for kind in kinds]}
    made = card.arguments(opened, described)
    networks = {name: each | {"arguments": made[name]} for name, each in described.items()}
    columns = shown_columns(opened.run.game, held_out(opened, SHOWN))
    pictures = {"samples.png": lambda path: grids.grid(columns, SHOWN).save(path, "PNG")} if columns else {}
    text = card.readme(opened, networks, calls, kinds, licence, said, next(iter(pictures), ""))
    return {"config.json": _text(card.config(opened, networks, known)), **pictures, "README.md": _text(text)}


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, "utf-8")


def _readme(opened: "SavedRun", players: list[Exported], published: Collection[str]) -> str:
    about = README.format(run=opened.folder.path.resolve().name, step=opened.step, file=players[0].file)
    for each in players:
        size = f"{len(each.state)} tensors, {sum(tensor.numel() for tensor in each.state.values()):,} numbers"
        about += f"{each.file}.safetensors: {each.described['class']}, {size}; {WEIGHTS[each.weights]}\n"
    about += "\n"
    if any(each.weights == "ema" for each in players):
        about += AVERAGED
    for each in players:
        if keys := [key for key in each.state if "parametrizations" in key.split(".")]:
            about += PARAMETRIZED.format(player=each.player, key=keys[0])
    if published:
        about += PUBLISHED.format(files=", ".join(published))
    return about.rstrip() + "\n"


if __name__ == "__main__":
    run(main)
