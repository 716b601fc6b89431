"""CycleGAN's generator: down twice, some residual blocks, up twice."""

from torch import Tensor, nn

from nets.blocks import conv, xavier_


class Residual(nn.Module):
    def __init__(self, channels: int, gain: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReflectionPad2d(1),
            conv(channels, channels, 3, padding=0, bias=False, gain=gain),
            nn.InstanceNorm2d(channels),
            nn.ReLU(),
            nn.ReflectionPad2d(1),
            conv(channels, channels, 3, padding=0, bias=False, gain=gain),
            nn.InstanceNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ResnetGenerator(nn.Module):
    """The generator of Zhu et al. 2017 (CycleGAN), after Johnson et al. 2016, from pictures to pictures.

    The published one has `width=64`, and 9 `blocks` at 256 pixels or 6 at 128. Every layer but the last has an
    instance norm.
    """

    def __init__(self, inside: int = 3, outside: int = 3, width: int = 64, blocks: int = 9, gain: float = 0.02) -> None:
        super().__init__()

        def normed(convolution: nn.Module) -> list[nn.Module]:
            return [convolution, nn.InstanceNorm2d(convolution.out_channels), nn.ReLU()]

        def up(before: int, after: int) -> nn.ConvTranspose2d:
            layer = nn.ConvTranspose2d(before, after, 3, 2, 1, output_padding=1, bias=False)
            xavier_(layer.weight, gain)
            return layer

        self.layers = nn.Sequential(
            nn.ReflectionPad2d(3),
            *normed(conv(inside, width, 7, padding=0, bias=False, gain=gain)),
            *normed(conv(width, 2 * width, 3, 2, bias=False, gain=gain)),
            *normed(conv(2 * width, 4 * width, 3, 2, bias=False, gain=gain)),
            *(Residual(4 * width, gain) for _ in range(blocks)),
            *normed(up(4 * width, 2 * width)),
            *normed(up(2 * width, width)),
            nn.ReflectionPad2d(3),
            conv(width, outside, 7, padding=0, gain=gain),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A picture from -1 to 1. Sizes divisible by 4 stay as they are."""
        return self.layers(x)
