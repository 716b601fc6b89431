"""SEAN's published checkpoints: state dicts with the published key names, into our networks and back.

`latest_net_G.pth` holds the encoder and the generator, `latest_net_D.pth` the discriminator. Open a file with
`torch.load(path, weights_only=True)`: the functions here take and give state dicts only.

[Note: what the published networks never read]
Every ACE has the running statistics of a second batch norm, and every ACE without styles has two blending scalars.
No forward reads them. We keep them as buffers that our own state dicts leave out, so a loaded network is exported
just as it was. A network that was not loaded exports the values that these tensors start with and never leave.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from gan.files.errors import UserError
from nets.discriminator import MultiScaleDiscriminator, PatchDiscriminator
from nets.sean import SeanGenerator, StyleEncoder
from nets.sean.ace import ACE
from nets.sean.generator import Block

State = Mapping[str, Tensor]
UPSAMPLINGS = {"normal": 5, "more": 6}


@dataclass(frozen=True)
class Entry:
    """One tensor of ours, the published ones that it is made of, and the way there and back."""

    ours: str
    theirs: tuple[str, ...]
    together: Callable[[list[Tensor]], Tensor]
    apart: Callable[[Tensor], list[Tensor]]

    def join(self, state: State) -> Tensor:
        """Our tensor made of theirs, in memory of its own."""
        return self.together([state[key] for key in self.theirs]).detach().clone()

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Their tensors made of ours, each in memory of its own."""
        parts = zip(self.theirs, self.apart(tensor.detach()), strict=True)
        return {key: part.clone(memory_format=torch.contiguous_format) for key, part in parts}


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
    inner = [stage[0] for net in _nets(discriminator) for stage in net.stages[1:-1] if isinstance(stage, nn.Sequential)]
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


# ---- which tensor of ours is made of which published ones ----


def _same(ours: str, theirs: str) -> Entry:
    return Entry(ours, (theirs,), lambda parts: parts[0], lambda whole: [whole])


def _stacked(ours: str, *theirs: str) -> Entry:
    """Ours is theirs, concatenated."""
    return Entry(ours, theirs, torch.cat, lambda whole: list(whole.chunk(len(theirs))))


def _convolution(ours: str, theirs: str, *, bias: bool = True, bounded: bool = False) -> Iterator[Entry]:
    names = {"weight": "weight"}
    if bounded:
        start = "parametrizations.weight."
        names = {start + "original": "weight_orig", start + "0._u": "weight_u", start + "0._v": "weight_v"}
    for one, other in (names | ({"bias": "bias"} if bias else {})).items():
        yield _same(f"{ours}.{one}", f"{theirs}.{other}")


def _affine(ours: str, *theirs: str) -> Iterator[Entry]:
    """Two of their convolutions are one of ours. See Affine in nets/sean/ace.py."""
    yield Entry(
        f"{ours}.weight",
        tuple(f"{each}.weight" for each in theirs),
        lambda parts: torch.cat(parts).permute(2, 3, 0, 1).contiguous(),
        lambda whole: list(whole.permute(2, 3, 0, 1).chunk(len(theirs))),
    )
    yield _stacked(f"{ours}.bias", *(f"{each}.bias" for each in theirs))


def encoder_entries(encoder: StyleEncoder) -> Iterator[Entry]:
    """The style encoder; in the published checkpoint it is a part of the generator."""
    for number, layer in enumerate(encoder.layers):
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            yield from _convolution(f"layers.{number}", f"Zencoder.model.{number}")


def _blocks(generator: SeanGenerator) -> Iterator[tuple[str, str, Block]]:
    named = {"head": "head_0", "middle_0": "G_middle_0", "middle_1": "G_middle_1"}
    named |= {f"ups.{number}": f"up_{number}" for number in range(len(generator.ups))}
    for ours, theirs in named.items():
        block = generator.get_submodule(ours)
        assert isinstance(block, Block)
        yield ours, theirs, block


def _aces(generator: SeanGenerator) -> Iterator[tuple[str, str, ACE]]:
    for ours, theirs, block in _blocks(generator):
        for name, layer in block.named_children():
            if isinstance(layer, ACE):
                yield f"{ours}.{name}", f"{theirs}.{name}", layer


def generator_entries(generator: SeanGenerator) -> Iterator[Entry]:
    """The generator without the encoder, and without what no forward reads."""
    yield from _convolution("start", "fc")
    yield from _convolution("paint", "conv_img")
    for ours, theirs, block in _blocks(generator):
        for name in ("conv_0", "conv_1"):
            yield from _convolution(f"{ours}.{name}", f"{theirs}.{name}", bounded=True)
        if block.learned_shortcut:
            yield from _convolution(f"{ours}.conv_s", f"{theirs}.conv_s", bias=False, bounded=True)
    for ours, theirs, ace in _aces(generator):
        yield from _ace(ours, theirs, ace)


def _ace(ours: str, theirs: str, ace: ACE) -> Iterator[Entry]:
    yield Entry(
        f"{ours}.noise_scale",
        (f"{theirs}.noise_var",),
        lambda parts: parts[0].view(-1, 1, 1),
        lambda whole: [whole.flatten()],
    )
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        yield _same(f"{ours}.norm.{name}", f"{theirs}.param_free_norm.{name}")
    yield from _convolution(f"{ours}.mask_features", f"{theirs}.Spade.mlp_shared.0")
    yield from _affine(f"{ours}.mask_affine", f"{theirs}.Spade.mlp_gamma", f"{theirs}.Spade.mlp_beta")
    if ace.style_affine is None:
        return
    yield from _affine(f"{ours}.style_affine", f"{theirs}.conv_gamma", f"{theirs}.conv_beta")
    yield _stacked(f"{ours}.blend", f"{theirs}.blending_gamma", f"{theirs}.blending_beta")
    labels = range(len(ace.region_weight))
    yield Entry(
        f"{ours}.region_weight",
        tuple(f"{theirs}.fc_mu{label}.weight" for label in labels),
        lambda parts: torch.stack([part.t() for part in parts]),
        lambda whole: list(whole.mT),
    )
    yield Entry(
        f"{ours}.region_bias",
        tuple(f"{theirs}.fc_mu{label}.bias" for label in labels),
        lambda parts: torch.stack(parts).unsqueeze(1),
        lambda whole: list(whole.squeeze(1)),
    )


def unread_entries(generator: SeanGenerator) -> Iterator[tuple[Entry, Tensor]]:
    """What no forward reads, with its starting value. See [Note: what the published networks never read]."""
    for ours, theirs, ace in _aces(generator):
        start = ace.noise_scale.detach().flatten()
        values = {
            "running_mean": torch.zeros_like(start),
            "running_var": torch.ones_like(start),
            "num_batches_tracked": torch.zeros((), dtype=torch.long, device=start.device),
        }
        for name, value in values.items():
            yield _same(f"{ours}.unread_{name}", f"{theirs}.Spade.param_free_norm.{name}"), value
        if ace.style_affine is None:
            names = f"{theirs}.blending_gamma", f"{theirs}.blending_beta"
            yield _stacked(f"{ours}.unread_blend", *names), start.new_zeros(2)


def _nets(discriminator: MultiScaleDiscriminator) -> list[PatchDiscriminator]:
    return [net for net in discriminator.scales if isinstance(net, PatchDiscriminator)]


def discriminator_entries(discriminator: MultiScaleDiscriminator) -> Iterator[Entry]:
    for scale, net in enumerate(_nets(discriminator)):
        last = len(net.stages) - 1
        for number in range(last + 1):
            ours, theirs = f"scales.{scale}.stages.{number}", f"discriminator_{scale}.model{number}.0"
            if number == 0:
                yield from _convolution(f"{ours}.0", theirs)
            elif number == last:
                yield from _convolution(ours, theirs)
            else:
                yield from _convolution(f"{ours}.0", f"{theirs}.0", bias=False, bounded=True)
