"""SEAN's published files, and state dicts with the published names into our networks and back.

`latest_net_G.pth` holds the encoder and the generator, `latest_net_D.pth` the discriminator. Open a file with
`torch.load(path, weights_only=True)`: the functions here take and give state dicts only.
"""

import torch
from torch import Tensor, nn

from gan.files.errors import UserError
from nets.discriminator import MultiScaleDiscriminator
from nets.published.files import PublishedFile, State, take_fitting
from nets.sean import SeanGenerator, StyleEncoder

UPSAMPLINGS = {"normal": 5, "more": 6}


def load_generator(state_dict: State, upsampling: str = "normal") -> tuple[StyleEncoder, SeanGenerator]:
    """Encoder and generator of a published state dict, with its dtype and device, and with memory of their own.

    Widths and labels follow from the shapes. `upsampling` does not, so say which: "normal" or "more".
    """
    if upsampling not in UPSAMPLINGS:
        raise UserError(f"load_generator: unknown upsampling '{upsampling}'; known: {', '.join(UPSAMPLINGS)}")
    places = ("head_0.ace_0.Spade.mlp_shared.0", 0), ("Zencoder.model.14", 0), ("Zencoder.model.1", 0), ("fc", 1)
    sizes = (_size(state_dict, "latest_net_G.pth", f"{name}.weight", at) for name, at in (*places, ("conv_img", 1)))
    hidden, style, first, labels, width = sizes
    with torch.device("meta"):
        encoder = StyleEncoder(style, first)
        generator = SeanGenerator(labels, style, width, hidden, UPSAMPLINGS[upsampling])
    _fill(generator_file(encoder, generator), state_dict)
    return encoder, generator


def export_generator(encoder: StyleEncoder, generator: SeanGenerator) -> dict[str, Tensor]:
    """Encoder and generator with the published key names: what `load_generator` takes."""
    return generator_file(encoder, generator).checked().content()


def load_discriminator(state_dict: State) -> MultiScaleDiscriminator:
    """The discriminator of a published state dict, with its dtype and device, and with memory of its own.

    The numbers of scales and layers and the widths follow from names and shapes.
    """
    first = "discriminator_0.model0.0.weight"
    width, inside = (_size(state_dict, "latest_net_D.pth", first, side) for side in (0, 1))
    stages = {tuple(key.split(".")[:2]) for key in state_dict if key.startswith("discriminator_")}
    layers = sum(scale == "discriminator_0" for scale, _ in stages) - 1
    with torch.device("meta"):
        discriminator = MultiScaleDiscriminator(inside, width, layers, len({scale for scale, _ in stages}))
    _fill(discriminator_file(discriminator), state_dict)
    return discriminator


def export_discriminator(discriminator: MultiScaleDiscriminator) -> dict[str, Tensor]:
    """The discriminator with the published key names: what `load_discriminator` takes."""
    return discriminator_file(discriminator).content()


def generator_file(encoder: StyleEncoder, generator: SeanGenerator) -> PublishedFile:
    if not any(isinstance(layer, nn.InstanceNorm2d) for layer in encoder.model):
        raise UserError("SEAN's published encoder normalises; train one with normalise=True, as gan.fit sean does")
    known = " or ".join(f"{number} ({name})" for name, number in UPSAMPLINGS.items())
    unlike = f"SEAN's generator has upsamplings={generator.upsamplings}, and the published one has {known}"
    networks = {"": generator, "Zencoder.": encoder}
    fits = generator.upsamplings in UPSAMPLINGS.values()
    return PublishedFile("latest_net_G.pth", networks, "*_net_G.pth", unlike="" if fits else unlike)


def discriminator_file(discriminator: MultiScaleDiscriminator) -> PublishedFile:
    return PublishedFile("latest_net_D.pth", {"": discriminator}, "*_net_D.pth")


def _size(state_dict: State, name: str, key: str, side: int) -> int:
    """A side of a convolution's weight that every such state dict has."""
    if key not in state_dict or state_dict[key].dim() != 4:
        raise UserError(f"this is no state dict of SEAN's {name}: it has no convolution '{key}'")
    return state_dict[key].shape[side]


def _fill(file: PublishedFile, state_dict: State) -> None:
    like = next(value for value in state_dict.values() if value.is_floating_point())
    for network in file.networks.values():
        network.to(like.dtype).to_empty(device=like.device)
    if wrong := take_fitting(state_dict, file.networks):
        raise UserError(f"the state dict of SEAN's {file.name} has {wrong}")
