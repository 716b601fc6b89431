"""The features of VGG by which losses compare pictures, LPIPS, and where such weights come from."""

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models import VGG16_Weights, VGG19_Weights, WeightsEnum, vgg

from gan.files.disk import load_plain
from gan.files.errors import UserError, explained

N = TypeVar("N", bound=nn.Module)
SOURCE = VGG19_Weights.IMAGENET1K_V1
SMALLEST = 16  # pixels that four poolings halve


class Vgg19(nn.Module):
    """The five features relu1_1 to relu5_1 of Simonyan and Zisserman 2014 in torchvision's layers, frozen.

    `weights` is a state dict with torchvision's names, of any width; only its `features.*` up to relu5_1 are read.
    With `normalise`, pictures are shifted and scaled by ImageNet's mean and standard deviation, as the network was
    trained. Without, they go in from -1 to 1, as in SPADE and SEAN. State dicts leave the weights out, because these
    come from a file of their own.
    """

    relus, called, configuration = (1, 6, 11, 20, 29), "VGG-19", "E"  # those among torchvision's layers

    def __init__(self, weights: Mapping[str, Tensor], normalise: bool = False) -> None:
        super().__init__()
        self.normalise = normalise
        imagenet = SOURCE.transforms()
        self.register_buffer("mean", torch.tensor(imagenet.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("spread", torch.tensor(imagenet.std).view(3, 1, 1), persistent=False)

        # On "meta" no memory is filled: the given tensors become the network's.
        width = len(weights["features.0.weight"])  # published: 64
        steps = [step if isinstance(step, str) else step * width // 64 for step in vgg.cfgs[self.configuration]]
        with torch.device("meta"):
            self.features = vgg.make_layers(steps)[: self.relus[-1] + 1]
        dtype = torch.get_default_dtype()
        found = {name: weights[f"features.{name}"].to(dtype) for name in self.features.state_dict()}
        self.features.load_state_dict(found, assign=True)
        self.eval().requires_grad_(False)
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_keep)

    def forward(self, image: Tensor) -> list[Tensor]:
        """The features of pictures [B,3,H,W] from -1 to 1, fine to coarse."""
        if min(image.shape[-2:]) < SMALLEST:
            raise UserError(
                f"{self.called} cannot see pictures of {image.shape[-2]} x {image.shape[-1]}: they are halved too "
                f"often; choose a size of {SMALLEST} or more, or type --perceptual off"
            )
        x = ((image + 1) / 2 - self.mean) / self.spread if self.normalise else image
        found = []
        for number, layer in enumerate(self.features):
            x = layer(x)
            if number in self.relus:
                found.append(x)
        return found


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}features.")]:
        del state[name]


def _keep(module: Vgg19, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Loading a state dict, which has none of these weights, leaves them as they are."""
    state.update(module.features.state_dict(prefix=f"{prefix}features."))


def load_vgg19(weights: str | Mapping[str, Tensor], normalise: bool = False) -> Vgg19:
    """VGG-19 with weights from a file, or as given. For "torchvision", from its cache, or else downloaded to there."""
    return load(weights, SOURCE, Vgg19.called, lambda state: Vgg19(state, normalise))


def load(
    weights: str | Mapping[str, Tensor], source: WeightsEnum, called: str, make: Callable[[Mapping[str, Tensor]], N]
) -> N:
    """What `make` makes of a file of torchvision's weights: one at that path, or for "torchvision" its own."""
    if not isinstance(weights, str):
        return make(weights)
    failed = f"the perceptual loss needs {called}'s weights and their download failed ({{why}}); {_advice(source)}"
    path = downloaded(source.url, failed) if weights == "torchvision" else Path(weights)
    if not path.is_file():
        raise UserError(f"there is no file '{path}' of {called}'s weights; {_advice(source)}")
    with explained(f"'{path}' cannot be read as weights: {{why}}; {_advice(source)}", UserError):
        state = load_plain(path)
    other = f"'{path}' does not hold {called} as torchvision saves it: {{why}}; {_advice(source)}"
    with explained(other, KeyError, TypeError, AttributeError, RuntimeError):
        return make(state)


def cached(url: str) -> Path:
    """Where torch has what it has downloaded from there."""
    return Path(torch.hub.get_dir(), "checkpoints", Path(url).name)


def downloaded(url: str, failed: str) -> Path:
    """The file in torch's cache, which is downloaded if it is missing; `failed` are the words where that fails."""
    with explained(failed, OSError, RuntimeError, HTTPException), redirect_stdout(sys.stderr):
        if not (path := cached(url)).is_file():
            torch.hub.load_state_dict_from_url(url, check_hash=True, weights_only=True, progress=sys.stderr.isatty())
    return path


def _advice(source: WeightsEnum) -> str:
    return (
        f"bring {source.url} as '{cached(source.url)}', or type --perceptual PATH with the path of "
        f"{Path(source.url).name}, or --perceptual off to train without"
    )


class Vgg16(Vgg19):
    """The features relu1_2 to relu5_3 of VGG-16."""

    relus, called, configuration = (3, 8, 15, 22, 29), "VGG-16", "D"


class Lpips(nn.Module):
    """The distance of pictures from -1 to 1 by Zhang et al. 2018, frozen.

    The trunk normalises, except in version 0.0. `weights` are the published numbers that
    weigh its features: lin0.model.1.weight and so on. With ones in their place all features count alike.
    """

    def __init__(self, trunk: Vgg19, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.trunk = trunk
        for number in range(len(trunk.relus)):
            # Squared differences times w are those of features times the root of w.
            root = weights[f"lin{number}.model.1.weight"].to(torch.get_default_dtype()).sqrt()
            self.register_buffer(f"root{number}", root, persistent=False)

    def embed(self, image: Tensor) -> list[Tensor]:
        """Features of each size, fine to coarse, whose squared differences are the distance."""
        # The norm, and not the root of a sum: its gradient is finite where all features are zero.
        return [
            x * (self.get_buffer(f"root{number}") / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10))
            for number, x in enumerate(self.trunk(image[:, :3].expand(-1, 3, -1, -1)))
        ]

    def layerwise(self, one: Tensor, other: Tensor) -> list[Tensor]:
        """The distances at each place of each layer."""
        pairs = zip(self.embed(one), self.embed(other), strict=True)
        return [(a - b).square().sum(1, keepdim=True) for a, b in pairs]

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """The distance of each pair of pictures, [B, 1, 1, 1]."""
        return torch.stack([layer.mean((2, 3), keepdim=True) for layer in self.layerwise(one, other)]).sum(0)


def load_lpips(weights: str | Mapping[str, Tensor]) -> Lpips:
    """LPIPS 0.1 by VGG-16, of a file as in `load_vgg19`, or as given. torchmetrics has what weighs its features."""
    spec = find_spec("torchmetrics")
    assert spec is not None and spec.origin is not None
    lins = load_plain(Path(spec.origin).parent / "functional" / "image" / "lpips_models" / "vgg.pth")
    return load(weights, VGG16_Weights.IMAGENET1K_V1, Vgg16.called, lambda state: Lpips(Vgg16(state, True), lins))
