"""SEAN's style encoder: from a picture and its regions to a style code for each region."""

import torch
from torch import Tensor, nn

from nets.blocks import SLOPE, conv, conv_doubling, resize_nearest


class StyleEncoder(nn.Module):
    """Codes [B, labels, style] of a picture: the mean of its features under each region's mask.

    The layers are those of Zhu et al. 2020 (SEAN), which has `width=32` and `style=512`. `normalise` is its instance
    norm. That removes how bright and how colourful the whole picture is. Photographs show this in many other ways,
    but a narrow encoder of flat drawings learns colours much sooner without it. The norm also cancels the biases
    before it, which the published encoder has. See [Note: biases that a norm cancels].
    """

    def __init__(self, style: int = 512, width: int = 32, normalise: bool = True, gain: float = 0.02) -> None:
        super().__init__()

        def layer(convolution: nn.Conv2d | nn.ConvTranspose2d) -> list[nn.Module]:
            norm = [nn.InstanceNorm2d(convolution.out_channels)] if normalise else []
            return [convolution, *norm, nn.LeakyReLU(SLOPE, inplace=True)]

        up = conv_doubling(4 * width, 8 * width, 3, normed=normalise, gain=gain)
        self.model = nn.Sequential(
            nn.ReflectionPad2d(1),
            *layer(conv(3, width, 3, padding=0, normed=normalise, gain=gain)),
            *layer(conv(width, 2 * width, 3, 2, normed=normalise, gain=gain)),
            *layer(conv(2 * width, 4 * width, 3, 2, normed=normalise, gain=gain)),
            *layer(up),
            nn.ReflectionPad2d(1),
            conv(8 * width, style, 3, padding=0, gain=gain),
            nn.Tanh(),
        )

    def forward(self, image: Tensor, onehot: Tensor) -> Tensor:
        """The codes; a region that is not in the picture gets a code of zeros."""
        features = self.model(image)
        mask = resize_nearest(onehot, features.shape[-2:]).flatten(2)
        pixels = mask.sum(2, keepdim=True).clamp_min(1)
        return torch.bmm(mask, features.flatten(2).transpose(1, 2)) / pixels
