"""BYOL's networks: an encoder with batch norms, and small perceptrons behind it."""

from collections.abc import Sequence

from torch import Tensor, nn


class ResnetEncoder(nn.Module):
    """A representation for each picture: residual blocks with batch norm (He et al. 2016), and the mean over places.

    `widths` are the channels at each size, from half of the picture's down; each is half of the one before.
    """

    def __init__(self, widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0])]
        for number, (before, after) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            stages.append(Block(before, after, stride=2 if number else 1))
        self.stages = nn.Sequential(*stages)

    def forward(self, image: Tensor) -> Tensor:
        return self.stages(image).relu().mean((2, 3))


class Block(nn.Module):
    """ReLU before the two 3x3, batch norm behind each."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.layers(x)


class Online(nn.Module):
    """An encoder and a projector: what the target follows."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = encoder, projector

    def forward(self, image: Tensor) -> Tensor:
        return self.projector(self.encoder(image))


def perceptron(inside: int, hidden: int, outside: int) -> nn.Sequential:
    """A projector or a predictor, Grill et al. 2020, section 3.3: linear, batch norm, ReLU, linear.

    Without any bias, because the projector's output, too, goes to a batch norm: the predictor's.
    """
    norm = nn.BatchNorm1d(hidden)
    return nn.Sequential(nn.Linear(inside, hidden, bias=False), norm, nn.ReLU(), nn.Linear(hidden, outside, bias=False))
