"""VQGAN's published last.ckpt. Sizes of networks follow from the weights."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gan.files.errors import UserError
from nets.patch import PatchGan
from nets.published.files import PublishedFile
from nets.vqgan import Learning, VqAutoencoder

JUDGE = "loss.discriminator.main."


def last_ckpt(net: VqAutoencoder, judge: PatchGan) -> PublishedFile:
    return PublishedFile("last.ckpt", {"": net, JUDGE: judge.model}, "*.ckpt", within="state_dict")


def networks(weights: Mapping[str, Tensor], learning: Learning = "learned") -> tuple[VqAutoencoder, PatchGan | None]:
    """An autoencoder of the sizes of published weights, and a discriminator where they have one."""
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
    except KeyError as error:
        raise UserError(f"these are not the weights of a VQGAN: {error} is missing") from error
    convolutions = [shape for name, shape in shapes.items() if name.startswith(JUDGE) and shape[2:] == (4, 4)]
    if not convolutions:
        return net, None
    norm = "act" if any(name.endswith(".loc") for name in shapes) else "batch"
    return net, PatchGan(convolutions[0][1], convolutions[0][0], len(convolutions) - 2, norm)


def _count(names: Mapping[str, Any], pattern: str) -> int:
    return len({found[1] for name in names if (found := re.match(pattern, name))})
