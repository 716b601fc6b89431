"""What is exported beside weights: README.md and config.json, which say how plain torch loads networks, and programs.

Programs need none of our code: they are of torch.export (.pt2), or ONNX. Those networks are written that the game calls
to show samples, as it calls them: a generator, and its encoder. Noise and dropout of a network are not in its program.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from jsonargparse import Namespace
from torch import Tensor, nn

from gan import GanModule, noise
from gan.app.fitting.card import card
from gan.app.page.run_tables import held_out
from gan.app.run.reopen import SavedRun, build_again, shown_columns
from gan.files.errors import UserError, reason
from gan.games.from_noise import FromNoise
from nets.resnet import ResnetGenerator

SUFFIX = {"torch": ".pt2", "onnx": ".onnx"}
SAMPLES = 2  # in a call: with one, torch.export would take 1 for a constant
FIXED = "its forward fixes the number of samples; write x.shape[0] in place of len(x) there, or"
FAR = 1e-3  # of the largest number that a network gives: a program that differs more is none of it


@dataclass(frozen=True)
class Call:
    """What a network is called with, by the names of its forward; of tensors the first dimension is the batch."""

    network: nn.Module
    given: dict[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(self.given.values())


def networks(game: GanModule) -> dict[str, nn.Module]:
    """The players' networks by their names, and after them their parts, such as generators.to_b."""
    whole = {name: player.module for name, player in game.players.items()}
    return whole | {f"{name}.{part}": net for name, one in whole.items() for part, net in one.named_children()}


def calls(opened: SavedRun) -> dict[str, Call]:
    """The first call of each player's network, or of its parts, when the game shows held-out samples."""
    found: dict[str, Call] = {}
    names = {network: name for name, network in reversed(networks(opened.run.game).items())}

    def note(network: nn.Module, args: tuple, kwargs: dict) -> None:
        given = signature(network.forward).bind(*args, **kwargs).arguments
        found.setdefault(names[network], Call(network, dict(given)))

    with ExitStack() as hooks:
        for network in names:
            hooks.enter_context(network.register_forward_pre_hook(note, with_kwargs=True))
        shown_columns(opened.run.game, held_out(opened, SAMPLES))
    return {name: call for name, call in found.items() if name.rpartition(".")[0] not in found}


def takes_sizes(call: Call) -> bool:
    """Whether a program of this takes other sizes too, if the sides are multiples of 4: a ResNet does not pad these."""
    return isinstance(call.network, ResnetGenerator) and not any(side % 4 for side in call.values[0].shape[2:])


def _none(draw: object, shape: Sequence[int], like: Tensor | None, common: bool, dtype: object = None) -> Tensor:
    """In the place of a draw of noise: a program would draw other numbers than its network."""
    return torch.zeros(shape) if like is None else like.new_zeros(shape)


@torch.no_grad()
@patch.object(noise, "_draw", _none)
@patch.object(noise, "dropout", lambda x, *_, **__: x)
def write(kind: str, player: str, call: Call, path: Path) -> float:
    """Write the program, for any number of samples; returns how far what it gives is from what the network gives."""
    batch = dict.fromkeys((0, 2, 3) if takes_sizes(call) else (0,), torch.export.Dim.DYNAMIC)
    shapes = {name: batch if isinstance(value, Tensor) else None for name, value in call.given.items()}
    try:
        made = torch.export.export(call.network, call.values, dynamic_shapes=shapes)
        got = _through_torch(made, call, path) if kind == "torch" else _through_onnx(made, call, path)
    except OSError:
        raise
    except ImportError as error:
        raise UserError("--format onnx needs its packages: pip install '.[onnx]'") from error
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:  # torch wraps it in advice of its own
            first = first.__cause__
        why = FIXED if "specialized it to be a constant" in str(error) else reason(first)
        raise UserError(f"--format {kind}: torch cannot write '{player}' so: {why}; leave it out") from error
    wanted = call.network(*call.values)
    wanted, got = (each[0] if isinstance(each, tuple | list) else each for each in (wanted, got))
    far = float((got.to(wanted) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
    if not far <= FAR:
        raise UserError(f"--format {kind}: the program of '{player}' is {far:.2g} away from the network; leave it out")
    return far


def _through_torch(made: Any, call: Call, path: Path) -> Any:
    with path.open("wb") as file:  # torch would refuse the name of a file that is not whole yet
        torch.export.save(made, file)
    with path.open("rb") as file:
        return torch.export.load(file).module()(*call.values)


def _through_onnx(made: Any, call: Call, path: Path) -> Tensor:
    from onnxruntime import InferenceSession

    written = torch.onnx.export(made, dynamo=True, verbose=False)
    assert written is not None
    written.model.graph.outputs[0].name = "output"
    written.save(path)
    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {each.name: call.given[each.name].cpu().numpy() for each in session.get_inputs()}
    return torch.from_numpy(session.run(None, inputs)[0])


LOAD = """import json
from importlib import import_module

import torch
{pillow}from safetensors.torch import load_file

made = json.load(open("config.json"))["networks"]["{player}"]
module, _, name = made["class"].rpartition(".")
network = getattr(import_module(module), name)(**made["arguments"])
weights, part = load_file(made["file"]), made["part"]
network.load_state_dict({{key.removeprefix(part): weights[key] for key in weights if key.startswith(part)}})
{photo}found = network.eval()({given}){first}
print(found.shape){picture}"""
PICTURE = """
pixels = (found[0].detach().clamp(-1, 1) * 127.5 + 127.5).round().byte()
Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy()).save("{player}.png")"""
NEEDS = "To make the network also takes the packages `nets` and `gan` of Coordinated GANs, but not Lightning."
NEEDS_THEIRS = "To make the network also takes its module `{}`, on Python's path (PYTHONPATH), and what that imports."
RUN = """import torch
{pillow}
network = torch.export.load("{file}").module()
{photo}found = network({given}){first}
print(found.shape){picture}"""
RUN_ONNX = """import torch
{pillow}from onnxruntime import InferenceSession

session = InferenceSession("{file}")
names = [each.name for each in session.get_inputs()]
{photo}given = [{tensors}]
found, *_ = map(torch.from_numpy, session.run(None, {{name: each.numpy() for name, each in zip(names, given)}}))
print(found.shape){picture}"""
PHOTO = """photo = Image.open("photo.png").convert("{mode}").resize(({width}, {height}))  # a picture of yours
pixels = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8)
x = pixels.view(1, {height}, {width}, {channels}).permute(0, 3, 1, 2) / 127.5 - 1
"""
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
NEEDS_PROGRAM = "This needs {}. A program has no noise that its network adds, no dropout and no truncation."
# Licences by their names on the Hugging Face Hub, and what some are called else.
KNOWN = r"cc0-1\.0|cc-by(-nc)?(-sa|-nd)?-[234]\.[05]|mit|apache-2\.0|odbl|odc-by|pddl|l?gpl-[23]\.0|bsd-[23]-clause"
CALLED = {"cc0": "cc0-1.0", "apache": "apache-2.0", "gplv3": "gpl-3.0", "odbl-1.0": "odbl", "odc-by-1.0": "odc-by"}
SIZES = "The program takes this size only.", "The program also takes other sides that are multiples of 4."
TRUNCATION = "For truncation add `psi=0.7`, and `cutoff=8` for the first eight layers alone."


def arguments(opened: SavedRun, names: Collection[str]) -> dict[str, dict[str, Any] | None]:
    """What networks of these names are made with; None if that is not plain values, or makes another network."""
    known = networks(opened.run.game)
    with _noting({type(known[name]) for name in names}) as made:
        game = build_again(Namespace(**opened.settings), opened.folder)[0].game
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
    tags = ["tags:", "- gan", f"- {type(opened.run.game).__name__.lower()}"]
    head = ["---", *_license(licence), "library_name: pytorch", *tags, "---", ""]
    lines = [*head, card(opened.folder, opened.run, opened.step, opened.settings, licence)]
    if opened.class_names:
        names = (f"{number} {name}" for number, name in enumerate(opened.class_names))
        lines += [f"The classes: {', '.join(names)}.", ""]
    if picture:
        held_out = "Held-out samples, and what the networks make of them"
        what = "Samples that are drawn from noise" if isinstance(opened.run.game, FromNoise) else held_out
        lines += [f"![{what}]({picture})", ""]
    for player, call in called.items():
        about, typed = _about(call, player, hasattr(opened.run.game, "translations"))
        if described[player]["arguments"] is not None:
            code = LOAD.format(player=player, **typed)
            needs = f"{needs_of(described[player]['class'])}\n\n{about}"
            needs += f" {TRUNCATION}" if "psi" in signature(call.network.forward).parameters else ""
            lines += [f"## {player} in plain torch", "", needs, "", "```python", code, "```", ""]
        for number, kind in enumerate(formats):
            run, packages = {"torch": (RUN, "torch"), "onnx": (RUN_ONNX, "torch and onnxruntime")}[kind]
            code = run.format(file=described[player]["programs"][number], **typed)
            needs = NEEDS_PROGRAM.format(packages + (", and Pillow for the picture" if typed["pillow"] else " alone"))
            needs += f" {SIZES[takes_sizes(call)]}" if typed["photo"] else ""
            lines += [f"## {player} as a program of {kind}", "", needs, "", about, "", "```python", code, "```", ""]
    lines += ["## Files", "", *(f"- `*{SUFFIX[kind]}`: programs, made by torch" for kind in formats), "", files]
    return "\n".join(lines)


def _license(typed: str | None) -> list[str]:
    """The field of a hub of models, which has short names for licences; others are "other", with a name."""
    if not typed:
        return []
    short = re.sub(r"[^a-z0-9.]+", "-", typed.lower()).strip("-")
    plain = re.sub(r"-(licen[cs]e|version|universal|international)\b", "", short)
    plain = CALLED.get(plain) or re.sub(r"-(\d)$", r"-\1.0", plain)
    if re.fullmatch(KNOWN, plain):
        return [f"license: {plain}  # of the data"]
    return ["license: other  # of the data", f"license_name: {short}"]


def needs_of(made: str) -> str:
    return NEEDS if made.startswith(("nets.", "gan.")) else NEEDS_THEIRS.format(made.rpartition(".")[0])


def _about(call: Call, player: str, translates: bool) -> tuple[str, dict[str, str]]:
    """What the network takes and gives, in words, and the parts of code that call it: a photo if it `translates`."""
    with torch.no_grad():
        found = call.network(*call.values)
    first = "[0]" if isinstance(found, tuple | list) else ""  # a VQGAN gives numbers beside the picture
    found = found[0] if first else found
    given = {name: value for name, value in call.given.items() if isinstance(value, Tensor)}
    classes = ", 1 at the class and 0 elsewhere"
    taken = [f"`{name}` {_of(value)}{classes * _by_class(value)}" for name, value in given.items()]
    picture = _is_picture(found)
    values = ", pictures in about -1 to 1, which the code clamps" * picture
    typed = ", ".join(_made_up(value) if isinstance(value, Tensor) else repr(value) for value in call.values)
    code = {"given": typed, "tensors": ", ".join(map(_made_up, given.values())), "first": first, "photo": ""}
    if translates and picture and len(call.values) == 1 and _is_picture(call.values[0]):
        _, channels, height, width = call.values[0].shape
        photo = PHOTO.format(mode=MODES[channels], channels=channels, height=height, width=width)
        code |= {"given": "x", "tensors": "x", "photo": photo}
        taken = [f"{taken[0]}, pictures from -1 to 1"]
    code |= {"picture": PICTURE.format(player=player) * picture, "pillow": "from PIL import Image\n" * picture}
    return f"The network takes {'; '.join(taken)}. It gives {_of(found)}{values}.", code


def _is_picture(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.shape[1] in MODES and value.is_floating_point()


def _of(value: Tensor) -> str:
    return f"[{', '.join(['B', *map(str, value.shape[1:])])}]"


def _by_class(value: Tensor) -> bool:
    return value.ndim == 2 and value.equal(torch.eye(value.shape[1]).to(value)[value.float().argmax(1)])


def _made_up(value: Tensor) -> str:
    shape, dtype = ", ".join(map(str, value.shape)), "" if value.is_floating_point() else f", dtype={value.dtype}"
    if _by_class(value):
        return f"torch.eye({value.shape[1]}{dtype})[{value.float().argmax(1).tolist()}]"
    return f"torch.zeros({shape}{dtype})" if dtype else f"torch.randn({shape})"
