"""SEAN's published checkpoints: state dicts with the published key names, into our networks and back.

`latest_net_G.pth` holds the encoder and the generator, `latest_net_D.pth` the discriminator. Open a file with
`torch.load(path, weights_only=True)`: the functions here take and give state dicts only.

[Note: what the published networks never read]
Every ACE has the running statistics of a second batch norm, and every ACE without styles has two blending scalars.
No forward reads them. We keep them as buffers that our own state dicts leave out, so a loaded network is exported
just as it was. A network that was not loaded exports the values that these tensors start with and never leave.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from gan.files.errors import UserError
from nets.discriminator import MultiScaleDiscriminator
from nets.published.sean_keys import (
    Entry,
    State,
    discriminator_entries,
    encoder_entries,
    generator_entries,
    unread_entries,
)
from nets.sean import SeanGenerator, StyleEncoder

UPSAMPLINGS = {"normal": 5, "more": 6}


def load_generator(state_dict: State, upsampling: str = "normal") -> tuple[StyleEncoder, SeanGenerator]:
    """Encoder and generator of a published state dict, with its dtype and device, and with memory of their own.

    Widths and labels follow from the shapes. `upsampling` does not, so say which: "normal" or "more".
    """
    if upsampling not in UPSAMPLINGS:
        raise UserError(f"load_generator: unknown upsampling '{upsampling}'; known: {', '.join(UPSAMPLINGS)}")
    if "discriminator_0.model0.0.weight" in state_dict:
        raise UserError("load_generator: this is the state dict of a discriminator; try load_discriminator")
    style = _size(state_dict, "load_generator", "Zencoder.model.14.weight", 0)
    first = _size(state_dict, "load_generator", "Zencoder.model.1.weight", 0)
    labels = _size(state_dict, "load_generator", "fc.weight", 1)
    hidden = _size(state_dict, "load_generator", "head_0.ace_0.Spade.mlp_shared.0.weight", 0)
    width = _size(state_dict, "load_generator", "conv_img.weight", 1)

    # On "meta" no memory is filled: the loaded tensors become the network's.
    with torch.device("meta"):
        encoder = StyleEncoder(style, first)
        generator = SeanGenerator(labels, style, width, hidden, UPSAMPLINGS[upsampling])
        unread = list(unread_entries(generator))
    _check(state_dict, "load_generator", _published(encoder, generator))
    _fill(encoder, encoder_entries(encoder), state_dict)
    _fill(generator, generator_entries(generator), state_dict)

    # See [Note: what the published networks never read].
    for entry, _ in unread:
        owner, _, name = entry.ours.rpartition(".")
        generator.get_submodule(owner).register_buffer(name, entry.join(state_dict), persistent=False)
    return encoder, generator


def export_generator(encoder: StyleEncoder, generator: SeanGenerator) -> dict[str, Tensor]:
    """Encoder and generator with the published key names: what `load_generator` takes."""
    if generator.upsamplings not in UPSAMPLINGS.values():
        known = " or ".join(f"{number} ({name})" for name, number in UPSAMPLINGS.items())
        raise UserError(f"export_generator: upsamplings={generator.upsamplings}, and the published one has {known}")
    if not any(isinstance(layer, nn.InstanceNorm2d) for layer in encoder.layers):
        raise UserError("export_generator: the published encoder normalises; train one with normalise=True")
    return _published(encoder, generator)


def load_discriminator(state_dict: State) -> MultiScaleDiscriminator:
    """The discriminator of a published state dict, with its dtype and device, and with memory of its own.

    The numbers of scales and layers and the widths follow from names and shapes.
    """
    if "fc.weight" in state_dict:
        raise UserError("load_discriminator: this is the state dict of a generator; try load_generator")
    inside = _size(state_dict, "load_discriminator", "discriminator_0.model0.0.weight", 1)
    width = _size(state_dict, "load_discriminator", "discriminator_0.model0.0.weight", 0)
    stages = {tuple(key.split(".")[:2]) for key in state_dict if key.startswith("discriminator_")}
    layers = sum(scale == "discriminator_0" for scale, _ in stages) - 1
    with torch.device("meta"):
        discriminator = MultiScaleDiscriminator(inside, width, layers, len({scale for scale, _ in stages}))
    _check(state_dict, "load_discriminator", export_discriminator(discriminator))
    _fill(discriminator, discriminator_entries(discriminator), state_dict)
    return discriminator


def export_discriminator(discriminator: MultiScaleDiscriminator) -> dict[str, Tensor]:
    """The discriminator with the published key names: what `load_discriminator` takes."""
    inner = [stage[0] for scale in discriminator.scales for stage in scale.stages[1:-1]]
    if not all(is_parametrized(layer, "weight") for layer in inner):
        raise UserError("export_discriminator: the published one has spectral norm; train one with spectral=True")
    return _split(discriminator.state_dict(), discriminator_entries(discriminator))


def _published(encoder: StyleEncoder, generator: SeanGenerator) -> dict[str, Tensor]:
    buffers = dict(generator.named_buffers())
    unread = [(entry, buffers.get(entry.ours, start)) for entry, start in unread_entries(generator)]
    return (
        _split(encoder.state_dict(), encoder_entries(encoder))
        | _split(generator.state_dict(), generator_entries(generator))
        | {key: part for entry, tensor in unread for key, part in entry.split(tensor).items()}
    )


def _split(ours: State, entries: Iterable[Entry]) -> dict[str, Tensor]:
    return {key: part for entry in entries for key, part in entry.split(ours[entry.ours]).items()}


def _fill(network: nn.Module, entries: Iterable[Entry], state_dict: State) -> None:
    network.load_state_dict({entry.ours: entry.join(state_dict) for entry in entries}, assign=True)


def _size(state_dict: State, call: str, key: str, place: int) -> int:
    """One side of a convolution's weight that every such state dict has; `place` numbers the side."""
    if key not in state_dict:
        raise UserError(f"{call}: '{key}' is missing among {len(state_dict)} keys, e.g. {_some(state_dict)}")
    if state_dict[key].dim() != 4:
        raise UserError(f"{call}: '{key}' is {list(state_dict[key].shape)} and not the weight of a convolution")
    return state_dict[key].shape[place]


def _check(state_dict: State, call: str, wanted: State) -> None:
    """Refuse missing tensors, unknown tensors and wrong shapes."""
    missing, unexpected = wanted.keys() - state_dict.keys(), state_dict.keys() - wanted.keys()
    wrong = [key for key in wanted.keys() & state_dict.keys() if state_dict[key].shape != wanted[key].shape]
    faults = []
    if missing:
        faults.append(f"{len(missing)} keys are missing: {_some(missing)}")
    if unexpected:
        faults.append(f"{len(unexpected)} keys are unexpected: {_some(unexpected)}")
    for key in sorted(wrong)[:3]:
        faults.append(f"'{key}' is {list(state_dict[key].shape)} where {list(wanted[key].shape)} fits the others")
    if faults:
        raise UserError(f"{call}: not a published SEAN as it is known here; " + "; ".join(faults))


def _some(keys: Iterable[str]) -> str:
    first = sorted(keys)[:4]
    return ", ".join(f"'{key}'" for key in first[:3]) + (", ..." if len(first) > 3 else "")
