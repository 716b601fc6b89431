"""VQGAN's published last.ckpt as our networks, and ours as such a file. Sizes follow from the weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gan.files.disk import load_plain, regular
from gan.files.errors import UserError
from nets.norm import ActNorm
from nets.patch import PatchGan
from nets.vqgan import Learning, VqAutoencoder

JUDGE = "loss.discriminator.main."


class Unknown:
    """Stands in for whatever else a file names, such as Lightning's callbacks: it runs nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "Unknown":
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def read(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint of Lightning. Nothing else in the file is used, and no code in the file is run."""
    try:
        regular(path)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        stand_ins: list[Any] = [(type("Unknown", (Unknown,), {}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            saved = load_plain(path)
    except (UserError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"'{path}' cannot be read as a checkpoint of VQGAN: {error}") from error
    state = saved.get("state_dict", saved) if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        raise UserError(f"'{path}' holds no weights by name; take a last.ckpt of VQGAN")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def ours(weights: Mapping[str, Tensor], learning: Learning = "learned") -> tuple[VqAutoencoder, PatchGan | None]:
    """The autoencoder, and the discriminator where the weights have one."""
    try:
        shapes = {name: value.shape for name, value in weights.items()}
        levels = _count(shapes, r"encoder\.down\.(\d+)\.")
        width = shapes["encoder.conv_in.weight"][0]
        net = VqAutoencoder(
            shapes["encoder.conv_in.weight"][1],
            width,
            [shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] // width for level in range(levels)],
            _count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
            [level for level in range(levels) if f"encoder.down.{level}.attn.0.q.weight" in shapes],
            shapes["encoder.conv_out.weight"][0],
            *reversed(shapes["quantize.embedding.weight"]),
            learning=learning,
        )
        state = {name: weights[name] for name in net.state_dict() if not name.startswith("quantize.")}
        net.load_state_dict(state, strict=False)
        net.quantize.take(weights["quantize.embedding.weight"])
        judge = _judge({name.removeprefix(JUDGE): value for name, value in weights.items() if name.startswith(JUDGE)})
    except KeyError as error:
        raise UserError(f"these are not the weights of a VQGAN: {error} is missing") from error
    except RuntimeError as error:
        raise UserError(f"these weights are of another network than VQGAN: {error}") from error
    return net, judge


@dataclass(frozen=True)
class LastCkpt:
    """These networks as the file that the published code reads."""

    net: VqAutoencoder
    judge: PatchGan
    name: str = "last.ckpt"

    def write(self, path: Path) -> None:
        torch.save({"state_dict": self.state()}, path)

    def state(self) -> dict[str, Tensor]:
        state = {name: value for name, value in self.net.state_dict().items() if not name.startswith("quantize.")}
        state["quantize.embedding.weight"] = self.net.quantize.codes
        of_judge = self.judge.model.state_dict()
        for name, each in self.judge.model.named_modules():
            if isinstance(each, ActNorm):
                of_judge[f"{name}.loc"], of_judge[f"{name}.scale"] = each.published()
                del of_judge[f"{name}.to_loc"], of_judge[f"{name}.to_scale"]
        state |= {f"{JUDGE}{name}": value for name, value in of_judge.items()}
        return {name: value.detach().cpu().clone() for name, value in state.items()}


def _judge(weights: dict[str, Tensor]) -> PatchGan | None:
    if not weights:
        return None
    convolutions = [value for value in weights.values() if value.dim() == 4 and value.shape[-1] == 4]
    norm = "act" if any(name.endswith(".loc") for name in weights) else "batch"
    judge = PatchGan(convolutions[0].shape[1], convolutions[0].shape[0], len(convolutions) - 2, norm)
    judge.model.load_state_dict({**judge.model.state_dict(), **weights})
    return judge


def _count(names: Mapping[str, Any], pattern: str) -> int:
    return len({found[1] for name in names if (found := re.match(pattern, name))})
