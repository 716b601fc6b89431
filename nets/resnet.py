"""CycleGAN's generator: down twice, some residual blocks, up twice."""

from torch import Tensor, nn

from nets.blocks import Residual, conv, conv_doubling


class ResnetGenerator(nn.Module):
    """The generator of Zhu et al. 2017 (CycleGAN), after Johnson et al. 2016, from pictures to pictures.

    The published one has `width=64`, and 9 `blocks` at 256 pixels or 6 at 128. Every layer but the last has an
    instance norm.
    """

    def __init__(self, inside: int = 3, outside: int = 3, width: int = 64, blocks: int = 9, gain: float = 0.02) -> None:
        super().__init__()

        def normed(convolution: nn.Conv2d | nn.ConvTranspose2d) -> list[nn.Module]:
            return [convolution, nn.InstanceNorm2d(convolution.out_channels), nn.ReLU()]

        def block(channels: int) -> Residual:
            first, second = (
                [nn.ReflectionPad2d(1), *normed(conv(channels, channels, 3, padding=0, bias=False, gain=gain))]
                for _ in range(2)
            )
            return Residual(nn.Sequential(*first, *second[:-1]), shortcut=nn.Identity())  # no ReLU before the sum

        self.layers = nn.Sequential(
            nn.ReflectionPad2d(3),
            *normed(conv(inside, width, 7, padding=0, bias=False, gain=gain)),
            *normed(conv(width, 2 * width, 3, 2, bias=False, gain=gain)),
            *normed(conv(2 * width, 4 * width, 3, 2, bias=False, gain=gain)),
            *(block(4 * width) for _ in range(blocks)),
            *normed(conv_doubling(4 * width, 2 * width, 3, bias=False, gain=gain)),
            *normed(conv_doubling(2 * width, width, 3, bias=False, gain=gain)),
            nn.ReflectionPad2d(3),
            conv(width, outside, 7, padding=0, gain=gain),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A picture from -1 to 1. Sizes divisible by 4 stay as they are."""
        return self.layers(x)
