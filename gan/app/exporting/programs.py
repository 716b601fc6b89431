"""A run's networks as programs that need none of our code: of torch.export (.pt2), or ONNX.

Those networks are written that the game calls to show samples, as it calls them: a generator, and its encoder. Where a
network adds noise or has dropout, a program has neither.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gan import GanModule, noise
from gan.app.page.run_tables import held_out
from gan.app.run.reopen import SavedRun, shown
from gan.files.errors import UserError, reason
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
        shown(opened.run.game, held_out(opened, SAMPLES))
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
    written.save(path)
    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {each.name: call.given[each.name].cpu().numpy() for each in session.get_inputs()}
    return torch.from_numpy(session.run(None, inputs)[0])
