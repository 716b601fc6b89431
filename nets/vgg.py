"""VGG-19: the features by which a perceptual loss compares two pictures, and where such weights come from."""

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models import VGG19_Weights, WeightsEnum, vgg

from gan.files.disk import load_plain
from gan.files.errors import UserError

N = TypeVar("N", bound=nn.Module)
SOURCE = VGG19_Weights.IMAGENET1K_V1
RELUS = (1, 6, 11, 20, 29)  # relu1_1, relu2_1, relu3_1, relu4_1 and relu5_1 among torchvision's layers
SMALLEST = 16  # pixels that four poolings halve


class Vgg19(nn.Module):
    """The five features relu1_1 to relu5_1 of Simonyan and Zisserman 2014 in torchvision's layers, frozen.

    `weights` is a state dict with torchvision's names, of any width; only its `features.*` up to relu5_1 are read.
    With `normalise`, pictures are shifted and scaled by ImageNet's mean and standard deviation, as the network was
    trained. Without, they go in from -1 to 1, as in SPADE and SEAN. State dicts leave the weights out, because these
    come from a file of their own.
    """

    relus, called, configuration = RELUS, "VGG-19", "E"

    def __init__(self, weights: Mapping[str, Tensor], normalise: bool = False) -> None:
        super().__init__()
        self.normalise = normalise
        (mean, spread) = (torch.tensor(values).view(3, 1, 1) for values in _imagenet())
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("spread", spread, persistent=False)

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


def _imagenet() -> tuple[list[float], list[float]]:
    transform = SOURCE.transforms()
    return transform.mean, transform.std


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}features.")]:
        del state[name]


def _keep(module: Vgg19, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Loading a state dict, which has none of these weights, leaves them as they are."""
    for name, tensor in module.features.state_dict(prefix=f"{prefix}features.").items():
        state[name] = tensor


def load_vgg19(weights: str, normalise: bool = False) -> Vgg19:
    """VGG-19 with weights from a file. For "torchvision", from its cache; a missing file is downloaded to there."""
    return load(weights, SOURCE, Vgg19.called, lambda state: Vgg19(state, normalise))


def load(weights: str, source: WeightsEnum, called: str, make: Callable[[Mapping[str, Tensor]], N]) -> N:
    """What `make` makes of a file of torchvision's weights: one at that path, or for "torchvision" its own."""
    path = _cached(source, called) if weights == "torchvision" else Path(weights)
    if not path.is_file():
        raise UserError(f"there is no file '{path}' of {called}'s weights; {_advice(source)}")
    try:
        state = load_plain(path)
    except UserError as error:
        raise UserError(f"'{path}' cannot be read as weights: {error}; {_advice(source)}") from error
    try:
        return make(state)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        wrong = " ".join(str(error).split())
        raise UserError(
            f"'{path}' does not hold {called} as torchvision saves it: {wrong}; {_advice(source)}"
        ) from error


def _cached(source: WeightsEnum, called: str) -> Path:
    """The file in torchvision's cache, which is downloaded if it is missing."""
    path = Path(torch.hub.get_dir(), "checkpoints", Path(source.url).name)
    try:
        if not path.is_file():
            with redirect_stdout(sys.stderr):
                source.get_state_dict(check_hash=True, weights_only=True, progress=sys.stderr.isatty())
    except (OSError, RuntimeError, HTTPException) as error:
        raise UserError(
            f"the perceptual loss needs {called}'s weights and their download failed ({error}); {_advice(source)}"
        ) from error
    return path


def _advice(source: WeightsEnum) -> str:
    name = Path(source.url).name
    return (
        f"bring {source.url} as '{Path(torch.hub.get_dir(), 'checkpoints', name)}', or type --perceptual PATH "
        f"with the path of {name}, or --perceptual off to train without"
    )
