"""Which tensor of our SEAN is made of which tensors of the published one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nets.discriminator import MultiScaleDiscriminator
from nets.sean import SeanGenerator, StyleEncoder
from nets.sean.ace import ACE
from nets.sean.generator import Block

State = Mapping[str, Tensor]


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
        yield ours, theirs, generator.get_submodule(ours)


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
            "num_batches_tracked": torch.zeros_like(ace.norm.num_batches_tracked),
        }
        for name, value in values.items():
            yield _same(f"{ours}.unread_{name}", f"{theirs}.Spade.param_free_norm.{name}"), value
        if ace.style_affine is None:
            names = f"{theirs}.blending_gamma", f"{theirs}.blending_beta"
            yield _stacked(f"{ours}.unread_blend", *names), start.new_zeros(2)


def discriminator_entries(discriminator: MultiScaleDiscriminator) -> Iterator[Entry]:
    for scale, net in enumerate(discriminator.scales):
        last = len(net.stages) - 1
        for number in range(last + 1):
            ours, theirs = f"scales.{scale}.stages.{number}", f"discriminator_{scale}.model{number}.0"
            if number == 0:
                yield from _convolution(f"{ours}.0", theirs)
            elif number == last:
                yield from _convolution(ours, theirs)
            else:
                yield from _convolution(f"{ours}.0", f"{theirs}.0", bias=False, bounded=True)
