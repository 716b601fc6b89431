"""README.md and config.json of exported networks: what they are, and how plain torch loads them."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from jsonargparse import Namespace
from torch import Tensor, nn

from gan.app.exporting.programs import SUFFIX, Call, networks
from gan.app.painting.reopen import SavedRun, build_again
from gan.app.training.card import card
from gan.games.from_noise import FromNoise

LOAD = """import json
from importlib import import_module

import torch
from safetensors.torch import load_file

made = json.load(open("config.json"))["networks"]["{player}"]
module, _, name = made["class"].rpartition(".")
network = getattr(import_module(module), name)(**made["arguments"])
weights, part = load_file(made["file"]), made["part"]
network.load_state_dict({{key.removeprefix(part): weights[key] for key in weights if key.startswith(part)}})
print(network.eval()({given}){first}.shape)"""
NEEDS = "To make the network also takes the packages `nets` and `gan` of Coordinated GANs, but not Lightning."
NEEDS_THEIRS = "To make the network also takes its module `{}`, on Python's path (PYTHONPATH), and what that imports."
RUN = """import torch

network = torch.export.load("{file}").module()
print(network({given}){first}.shape)"""


def arguments(opened: SavedRun, names: Collection[str]) -> dict[str, dict[str, Any] | None]:
    """What networks of these names are made with; None if that is not plain values, or makes another network."""
    known = networks(opened.run.game)
    with _noting({type(known[name]) for name in names}) as made:
        game = build_again(Namespace(**opened.settings), opened.folder).game
        game.assemble()
    given = {name: made.get(network) for name, network in networks(game).items()}
    return {name: given[name] if _makes(given[name], known[name]) else None for name in names}


@contextmanager
def _noting(classes: set[type[nn.Module]]) -> Iterator[dict[nn.Module, dict[str, Any]]]:
    """Inside the `with`, what networks of these classes are made with is noted."""
    made: dict[nn.Module, dict[str, Any]] = {}

    def noted(make: Callable[..., None]) -> Callable[..., None]:
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            _, *given = signature(make).bind(self, *args, **kwargs).arguments.items()
            made.setdefault(self, dict(given))
            make(self, *args, **kwargs)

        return init

    with ExitStack() as stack:
        for kind in classes:
            stack.enter_context(patch.object(kind, "__init__", noted(kind.__init__)))
        yield made


def _makes(given: dict[str, Any] | None, network: nn.Module) -> bool:
    """Whether these arguments, as config.json has them, make such a network."""
    try:
        again = type(network)(**json.loads(json.dumps(given)))
    except TypeError:
        return False
    return again.state_dict().keys() == network.state_dict().keys()


def config(opened: SavedRun, described: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]) -> str:
    """config.json, with what is `known` already."""
    about = {**known, "run": opened.folder.path.resolve().name, "recipe": opened.name, "step": opened.step}
    about |= {"classes": opened.class_names} if opened.class_names else {}
    return json.dumps({**about, "game": type(opened.run.game).__name__, "networks": described}, indent=1) + "\n"


def readme(
    opened: SavedRun,
    described: Mapping[str, Mapping[str, Any]],
    called: Mapping[str, Call],
    formats: list[str],
    licence: str | None,
    files: str,
    picture: str,
) -> str:
    """README.md. `described` are networks as in config.json, `files` says what the files are. `picture` is one."""
    head = ["---", "library_name: pytorch", "tags:", "- gan", f"- {type(opened.run.game).__name__.lower()}", "---", ""]
    lines = [*head, card(opened.folder, opened.run, opened.step, opened.settings, licence)]
    if opened.class_names:
        names = (f"{number} {name}" for number, name in enumerate(opened.class_names))
        lines += [f"The classes: {', '.join(names)}.", ""]
    if picture:
        held_out = "Held-out samples, and what the networks make of them"
        what = "Samples that are drawn from noise" if isinstance(opened.run.game, FromNoise) else held_out
        lines += [f"![{what}]({picture})", ""]
    for player, call in called.items():
        if described[player]["arguments"] is not None:
            code = LOAD.format(player=player, given=_typed(call), first=_first(call))
            needs = needs_of(described[player]["class"])
            lines += [f"## {player} in plain torch", "", needs, "", "```python", code, "```", ""]
        if "torch" in formats:
            code = RUN.format(file=described[player]["programs"][0], given=_typed(call), first=_first(call))
            lines += [f"## {player} as a program", "", "This needs torch alone.", "", "```python", code, "```", ""]
    lines += ["## Files", "", *(f"- `*{SUFFIX[kind]}`: programs, made by torch" for kind in formats), "", files]
    return "\n".join(lines)


def needs_of(made: str) -> str:
    return NEEDS if made.startswith(("nets.", "gan.")) else NEEDS_THEIRS.format(made.rpartition(".")[0])


def _typed(call: Call) -> str:
    return ", ".join(_made_up(value) if isinstance(value, Tensor) else repr(value) for value in call.given.values())


def _first(call: Call) -> str:
    """Where the picture is in what the network gives: a VQGAN gives numbers beside it."""
    with torch.no_grad():
        return "[0]" if isinstance(call.network(*call.values), tuple | list) else ""


def _made_up(value: Tensor) -> str:
    shape, dtype = ", ".join(map(str, value.shape)), "" if value.is_floating_point() else f", dtype={value.dtype}"
    if value.ndim == 2 and value.equal(torch.eye(value.shape[1]).to(value)[classes := value.float().argmax(1)]):
        return f"torch.eye({value.shape[1]}{dtype})[{classes.tolist()}]"
    return f"torch.zeros({shape}{dtype})" if dtype else f"torch.randn({shape})"
