"""The network of a published file, from the names and shapes of its weights alone."""

import re
from pathlib import Path

from gan.files.errors import UserError, explained
from nets.biggan import GENERATOR, BigGenerator
from nets.published.files import State, take_fitting
from nets.resnet import ResnetGenerator, UNet
from nets.vqgan import VqAutoencoder

KINDS = "a generator of pix2pix, CycleGAN, CUT or BigGAN, or VQGAN's autoencoder"


def network_of(path: Path, weights: State) -> ResnetGenerator | UNet | VqAutoencoder | BigGenerator:
    """The network of a file, with its weights: of pix2pix, CycleGAN, CUT, VQGAN or BigGAN.

    What weights do not say is as published: the dropout of a U-Net, and groups of a norm in VQGAN.
    """
    make = next((make for name, make in FIRST.items() if name in weights), _biggan)
    other = f"{path} has not the weights of {KINDS}"
    unknown = f"{other} ({{why}}); other networks are for gan.fit --from"
    with explained(unknown, KeyError, ValueError, IndexError, UserError):
        net = make(weights)
    if wrong := take_fitting(weights, {"": net}):
        raise UserError(f"{other}, but of {wrong}")
    return net


def _numbers(weights: State, pattern: str) -> list[int]:
    """The numbers that stand in names of this pattern, each once, in order."""
    return sorted({int(found[1]) for name in weights if (found := re.match(pattern, name))})


def _resnet(weights: State) -> ResnetGenerator:
    first, *_, last = (weights[f"model.{number}.weight"] for number in _numbers(weights, r"model\.(\d+)\.weight"))
    blocks = _numbers(weights, r"model\.(\d+)\.conv_block")
    second = weights.get(f"model.{blocks[0]}.conv_block.6.weight")  # with dropout a convolution, else a norm or nothing
    return ResnetGenerator(
        first.shape[1],
        last.shape[0],
        first.shape[0],
        len(blocks),
        norm="instance" if "model.1.bias" in weights else "batch",
        dropout=second is not None and second.dim() == 4,
        smooth=any(name.endswith(".filt") for name in weights),
    )


def _unet(weights: State) -> UNet:
    first, last = weights["model.model.0.weight"], weights["model.model.3.weight"]
    depth = sum(value.dim() == 4 for value in weights.values()) // 2
    norm = "instance" if "model.model.0.bias" in weights else "batch"
    return UNet(first.shape[1], last.shape[1], first.shape[0], depth, norm=norm)


def _vqgan(weights: State) -> VqAutoencoder:
    width, channels = weights["encoder.conv_in.weight"].shape[:2]
    levels = _numbers(weights, r"encoder\.down\.(\d+)\.block")
    codes, code = weights["quantize.embedding.weight"].shape
    return VqAutoencoder(
        channels,
        width,
        [weights[f"encoder.down.{level}.block.0.conv1.weight"].shape[0] // width for level in levels],
        len(_numbers(weights, r"encoder\.down\.0\.block\.(\d+)")),
        _numbers(weights, r"encoder\.down\.(\d+)\.attn"),
        weights["encoder.conv_out.weight"].shape[0],
        code,
        codes,
    )


def _biggan(weights: State) -> BigGenerator:
    """One class is no class."""
    shapes = {name: value.shape for name, value in weights.items()}
    blocks = len(_numbers(weights, r"blocks\.(\d+)\."))
    chunk, scales = shapes["linear.weight"][1], shapes["blocks.0.0.bn1.gain.weight"]
    side = {f"{len(widths) - 1} blocks": side for side, widths in GENERATOR.items()}[f"{blocks} blocks"]
    classes, shared = shapes.get("shared.weight", (scales[0], 0))
    hierarchical = shared > 0 and scales[1] > shared
    return BigGenerator(
        (side, side),
        shapes["output_layer.0.gain"][0] // GENERATOR[side][-1],
        chunk * (blocks + 1 if hierarchical else 1),
        classes if classes > 1 else 0,
        shared,
        hierarchical,
        [8 << block for block in range(blocks) if f"blocks.{block}.1.theta.weight" in shapes],
        shapes["output_layer.2.weight"][0],
    )


FIRST = {"encoder.conv_in.weight": _vqgan, "model.model.0.weight": _unet, "model.1.weight": _resnet}
