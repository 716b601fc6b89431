"""VGG-19 in torchvision's names, so narrow that a test can afford it."""

from pathlib import Path

import torch
from torch import Tensor

LAYERS = (2, 2, 4, 4, 4)  # convolutions a stage, a pooling after each stage


def state(
    width: int = 2, seed: int = 0, classifier: bool = True, layers: tuple[int, ...] = LAYERS
) -> dict[str, Tensor]:
    """A state dict as torchvision saves it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / max(1, torch.Size(shape[1:]).numel()) ** 0.5

    found, place, inside = {}, 0, 3
    for stage, convolutions in enumerate(layers):
        outside = width * min(2**stage, 8)
        for _ in range(convolutions):
            found[f"features.{place}.weight"] = draw(outside, inside, 3, 3)
            found[f"features.{place}.bias"] = draw(outside)
            place, inside = place + 2, outside
        place += 1
    if classifier:
        for number, (outside, inside) in {0: (8, 49), 3: (8, 8), 6: (5, 8)}.items():
            found[f"classifier.{number}.weight"] = draw(outside, inside)
            found[f"classifier.{number}.bias"] = draw(outside)
    return found


def state16(width: int = 2) -> dict[str, Tensor]:
    """The same of VGG-16."""
    return state(width, classifier=False, layers=(2, 2, 3, 3, 3))


def save(path: Path, **settings: int) -> str:
    """The same in a file; the path as it is typed."""
    torch.save(state(**settings), path)
    return str(path)
