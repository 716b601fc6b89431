"""VGG-19's features, by which a perceptual loss compares two pictures."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import VGG19_Weights, vgg

from gan.files.errors import UserError

RELUS = (1, 6, 11, 20, 29)  # relu1_1, relu2_1, relu3_1, relu4_1 and relu5_1 among torchvision's layers
SMALLEST = 16  # pixels that four poolings halve


class Vgg19(nn.Module):
    """The five features relu1_1 to relu5_1 of Simonyan and Zisserman 2014 in torchvision's layers, frozen.

    `weights` is a state dict with torchvision's names, of any width; only its `features.*` up to relu5_1 are read.
    With `normalise`, pictures are shifted and scaled by ImageNet's mean and standard deviation, as the network was
    trained. Without, they go in from -1 to 1, as in SPADE and SEAN. State dicts leave the weights out, because these
    come from a file of their own.
    """

    def __init__(self, weights: Mapping[str, Tensor], normalise: bool = False) -> None:
        super().__init__()
        self.normalise = normalise
        (mean, spread) = (torch.tensor(values).view(3, 1, 1) for values in _imagenet())
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("spread", spread, persistent=False)

        # On "meta" no memory is filled: the given tensors become the network's.
        width = len(_tensor(weights, "features.0.weight"))
        with torch.device("meta"):
            layers = vgg.make_layers([step if step == "M" else step * width // 64 for step in vgg.cfgs["E"]])
        self.features = layers[: RELUS[-1] + 1]
        found = {}
        for name, wanted in self.features.state_dict().items():
            found[name] = _tensor(weights, f"features.{name}").float()
            if found[name].shape != wanted.shape:
                raise ValueError(f"'features.{name}' is {list(found[name].shape)} in place of {list(wanted.shape)}")
        self.features.load_state_dict(found, assign=True)
        self.eval().requires_grad_(False)
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_keep)

    def forward(self, image: Tensor) -> list[Tensor]:
        """The features of pictures [B,3,H,W] from -1 to 1, fine to coarse."""
        if min(image.shape[-2:]) < SMALLEST:
            raise UserError(
                f"VGG-19 cannot see pictures of {image.shape[-2]} x {image.shape[-1]}: they are halved four times; "
                f"choose a size of {SMALLEST} or more, or type --perceptual off"
            )
        x = ((image + 1) / 2 - self.mean) / self.spread if self.normalise else image
        found = []
        for number, layer in enumerate(self.features):
            x = layer(x)
            if number in RELUS:
                found.append(x)
        return found


def _imagenet() -> tuple[list[float], list[float]]:
    transform = VGG19_Weights.IMAGENET1K_V1.transforms()
    return transform.mean, transform.std


def _tensor(weights: Mapping[str, Tensor], name: str) -> Tensor:
    found = weights.get(name)
    if not isinstance(found, Tensor) or found.dim() < 1:
        raise ValueError(f"'{name}' is missing")
    return found


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}features.")]:
        del state[name]


def _keep(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Loading a state dict, which has none of these weights, leaves them as they are."""
    for name, tensor in module.features.state_dict(prefix=f"{prefix}features.").items():
        state[name] = tensor
