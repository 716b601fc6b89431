"""SEAN's networks: a picture to a style code for each region, and a mask and such codes to a picture."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise
from gan.files.errors import UserError
from nets.blocks import SLOPE, bias_of, conv, conv_doubling, resize_nearest, xavier_
from nets.norm import SyncBatchNorm
from nets.sean.neighbourhood import CELLS, Masks, Neighbourhoods, SizedMasks, cells_of
from nets.sean.normconv import Settings, mask_conv, norm_conv


class ACE(nn.Module):
    """Region-adaptive normalisation: noise, a batch norm without weights, and a scale and shift for each pixel.

    Scale and shift blend two branches: one of the mask (SPADE, Park et al. 2019), and with `style` one of the style
    codes (SEAN, Zhu et al. 2020). Nothing loops over pictures or labels. Where scale and shift are stacked, the
    scale's channels come first. `planes` counts the labels, and one more if there are edges; only labels have styles.

    [Note: folding the style branch]
    The style branch convolves a map that is constant within a region. So we apply its kernel to the codes first, and
    what is left is a sum over the labels around a pixel. The result is the same, also at the border, because both
    ways pad with zeros. The sum is made once for each kind of neighbourhood, see [Note: one row a neighbourhood], or
    as a convolution of the one-hot mask with kernels that belong to the picture:

        codes [B,labels,S] * kernel [3,3,2C,S]  ->  kernels [B,2C,labels,3,3];  kernels * mask -> [B,2C,H,W]

    [Note: what the published networks never read]
    Every published ACE has the running statistics of a second batch norm, and one without styles has two blending
    scalars. No forward reads them, so we have none. In published files they have the values that they start with.
    """

    def __init__(
        self, channels: int, labels: int, planes: int, hidden: int, style: int | None, gain: float, recompute: bool
    ) -> None:
        super().__init__()
        self.labels, self.recompute = labels, recompute
        self.noise_scale = nn.Parameter(torch.zeros(channels, 1, 1))
        self.norm = SyncBatchNorm(channels, affine=False)
        self.mask_features = conv(planes, hidden, 3, gain=gain)
        self.mask_affine = Affine(hidden, channels, gain)
        if style is None:
            self.style_affine = None
            return
        self.region_weight = nn.Parameter(torch.empty(labels, style, style))
        self.region_bias = nn.Parameter(torch.zeros(labels, 1, style))
        for weight in self.region_weight.detach():
            xavier_(weight, gain)
        self.style_affine = Affine(style, channels, gain)
        self.blend = nn.Parameter(torch.zeros(2))

    def forward(
        self, x: Tensor, masks: SizedMasks, codes: Tensor | None, then: nn.Conv2d, slope: float = 1.0
    ) -> Tensor:
        """Normalise x [B,C,H,W] with masks of its size and codes [B,labels,S]; then leaky ReLU and `then`."""
        grain = noise.randn((x.shape[0], 1, *x.shape[2:]), like=x)
        near = masks.neighbourhoods
        # Maps [B,2C,H,W], or tables [B,2C,kinds] with a row for each kind of neighbourhood.
        scale, shift = (self._maps(masks, codes) if near is None else self._tables(near, codes)).chunk(2, 1)
        pixels = None if near is None else near.pixels
        settings = Settings(self.norm, self.norm.training, pixels, slope, int(then.padding[0]), not self.recompute)
        return norm_conv(settings, x, grain, self.noise_scale, scale, shift, then.weight, bias_of(then))

    def published_state(self) -> dict[str, Tensor]:
        """The weights by their published names, as views. See [Note: what the published networks never read]."""
        scale = self.noise_scale.detach().flatten()
        unread = SyncBatchNorm(len(scale), affine=False, device=scale.device, dtype=scale.dtype)
        parts = {
            "param_free_norm": self.norm.state_dict(),
            "Spade.param_free_norm": unread.state_dict(),
            "Spade.mlp_shared.0": self.mask_features.state_dict(),
        }
        state = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
        state |= {"noise_var": scale} | self.mask_affine.halves("Spade.mlp_")
        blend = scale.new_zeros(2) if self.style_affine is None else self.blend.detach()
        state |= zip(("blending_gamma", "blending_beta"), blend.chunk(2), strict=True)
        if self.style_affine is not None:
            state |= self.style_affine.halves("conv_")
            for label, weight in enumerate(self.region_weight.detach()):
                state |= {f"fc_mu{label}.weight": weight.t(), f"fc_mu{label}.bias": self.region_bias[label, 0].detach()}
        return state

    @torch.no_grad()
    def take_published(self, state: dict[str, Tensor]) -> None:
        for name, view in self.published_state().items():
            view.copy_(state[name])

    def _tables(self, near: Neighbourhoods, codes: Tensor | None) -> Tensor:
        """See [Note: one row a neighbourhood]."""
        first = self.mask_features
        hidden = F.relu(F.linear(near.onehot_3x3, first.weight.permute(0, 2, 3, 1).flatten(1), first.bias))
        table = near.mask_sums(self.mask_affine.products(hidden).flatten(0, 1))
        if self.style_affine is None:
            table = table + self.mask_affine.bias
        else:
            share = self._share()
            products = self.style_affine.products(self._regions(codes)) * share
            table = table * (1 - share) + (near.style_sums(products.flatten(0, 2)) + self._bias(share))
        return table.unflatten(0, (-1, near.kinds)).mT.contiguous()

    def _maps(self, masks: SizedMasks, codes: Tensor | None) -> Tensor:
        """See [Note: folding the style branch]."""
        first = masks.planes, self.mask_features.weight, self.mask_features.get_parameter("bias")
        if self.style_affine is None:
            return mask_conv(*first, self.mask_affine.kernel(), self.mask_affine.bias)
        share = self._share()
        mask = mask_conv(*first, self.mask_affine.kernel(1 - share), self._bias(share))
        kernels = self.style_affine.products(self._regions(codes)) * share
        if torch.compiler.is_exporting():  # ONNX has no convolution whose groups are as many as the pictures
            cells = torch.stack(cells_of(F.pad(masks.planes[:, : self.labels], (1, 1, 1, 1))), 2)
            return mask + (kernels.flatten(1, 2).mT @ cells.flatten(1, 2).flatten(2)).view_as(mask)
        pictures, labels = kernels.shape[:2]
        kernels = kernels.permute(0, 3, 1, 2).reshape(-1, labels, 3, 3)
        onehot = masks.planes[:, :labels].reshape(1, pictures * labels, *masks.planes.shape[2:])
        return mask.add_(F.conv2d(onehot, kernels, padding=1, groups=pictures).view_as(mask))

    def _regions(self, codes: Tensor | None) -> Tensor:
        """This layer's own codes [B,labels,S]: a linear layer for each label, and a ReLU."""
        assert codes is not None, "a generator of styles is given codes"
        return F.relu(torch.baddbmm(self.region_bias, codes.transpose(0, 1), self.region_weight)).transpose(0, 1)

    def _share(self) -> Tensor:
        """The weight of the style branch in each channel of scale and shift; the mask branch has the rest."""
        return torch.sigmoid(self.blend).repeat_interleave(len(self.mask_affine.bias) // 2)

    def _bias(self, share: Tensor) -> Tensor:
        assert self.style_affine is not None
        return torch.lerp(self.mask_affine.bias, self.style_affine.bias, share)


class Affine(nn.Module):
    """A 3x3 convolution to `channels` scales and as many shifts; each half starts like a convolution of its own.

    The weight is laid out as [3,3,2C,inside], so that its product with rows is one matrix product.
    """

    def __init__(self, inside: int, channels: int, gain: float) -> None:
        super().__init__()
        halves = [conv(inside, channels, 3, gain=gain).weight.detach() for _ in range(2)]
        self.weight = nn.Parameter(torch.cat(halves).permute(2, 3, 0, 1).contiguous())
        self.bias = nn.Parameter(torch.zeros(2 * channels))

    def products(self, rows: Tensor) -> Tensor:
        """What a row [...,inside] adds to a pixel from each of the 9 cells around it: [...,9,2C]."""
        return F.linear(rows, self.weight.flatten(0, 2)).unflatten(-1, (CELLS, -1))

    def kernel(self, factor: Tensor | None = None) -> Tensor:
        """The weight in a convolution's layout, each channel times a factor."""
        weight = self.weight if factor is None else self.weight * factor.unsqueeze(1)
        return weight.permute(2, 3, 0, 1)

    def halves(self, start: str) -> dict[str, Tensor]:
        """Views of the weights as two convolutions, as they are published."""
        halves = zip(("gamma", "beta"), self.kernel().detach().chunk(2), self.bias.detach().chunk(2), strict=True)
        return {
            f"{start}{half}.{name}": value
            for half, weight, bias in halves
            for name, value in (("weight", weight), ("bias", bias))
        }


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


class Block(nn.Module):
    """A residual block whose normalisations see mask and styles.

    conv_0 and conv_1 have a bias because the published ones do. A later batch norm cancels it, also by way of the
    shortcuts; only after the `last` block there is no more norm. See [Note: biases that a norm cancels].
    """

    def __init__(self, inside: int, outside: int, ace: Callable[[int], ACE], gain: float, last: bool) -> None:
        super().__init__()
        middle = min(inside, outside)
        self.ace_0 = ace(inside)
        self.conv_0 = conv(inside, middle, 3, spectral=True, normed=True, gain=gain)
        self.ace_1 = ace(middle)
        self.conv_1 = conv(middle, outside, 3, spectral=True, normed=not last, gain=gain)
        self.learned_shortcut = inside != outside
        if self.learned_shortcut:
            self.ace_s = ace(inside)
            self.conv_s = conv(inside, outside, 1, spectral=True, bias=False, gain=gain)

    def forward(self, x: Tensor, masks: Masks, codes: Tensor | None) -> Tensor:
        """shortcut(x) + conv_1(act(ACE_1(conv_0(act(ACE_0(x))))))."""
        sized = masks.at((x.shape[-2], x.shape[-1]))
        shortcut = self.ace_s(x, sized, codes, then=self.conv_s) if self.learned_shortcut else x
        inner = self.ace_0(x, sized, codes, then=self.conv_0, slope=SLOPE)
        return shortcut + self.ace_1(inner, sized, codes, then=self.conv_1, slope=SLOPE)


class SeanGenerator(nn.Module):
    """The generator of Zhu et al. 2020 (SEAN), in any size.

    It starts from the mask at size / 2**upsamplings and doubles it `upsamplings` times; the published ones are 5 and
    6. `width` is the number of channels of the last block (64). Each block before it has twice those of the next, up
    to 16 times `width`. `hidden` is the width of the mask branch (128), and `style` the length of a code (512). The
    last block sees no styles. With `style=None` no block does: that is SPADE (Park et al. 2019) with SEAN's noise.
    With `edges`, masks have one more plane than labels, for the edges of instances. `recompute` keeps less for
    backward and computes it again. The modules have their published names.
    """

    def __init__(
        self,
        labels: int = 19,
        style: int | None = 512,
        width: int = 64,
        hidden: int = 128,
        upsamplings: int = 5,
        gain: float = 0.02,
        edges: bool = False,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        if not 2 <= upsamplings <= 6:
            raise UserError(f"SeanGenerator: upsamplings={upsamplings} is not in 2 to 6; try 5")
        self.labels, self.upsamplings = labels, upsamplings
        planes = labels + edges
        shrinking = min(upsamplings, 5) - 1
        wide = width * 2**shrinking

        def block(inside: int, outside: int, last: bool = False) -> Block:
            seen = None if last else style
            ace = partial(ACE, labels=labels, planes=planes, hidden=hidden, style=seen, gain=gain, recompute=recompute)
            return Block(inside, outside, ace, gain, last)

        # The mask at its smallest, the three widest blocks, then one block for each halving of the width.
        self.fc = conv(planes, wide, 3, normed=True, gain=gain)
        self.head_0 = block(wide, wide)
        self.G_middle_0, self.G_middle_1 = block(wide, wide), block(wide, wide)
        self.ups = tuple(f"up_{number}" for number in range(shrinking))
        for number, name in enumerate(self.ups):
            inside = wide // 2**number
            self.add_module(name, block(inside, inside // 2, last=name == self.ups[-1]))
        self.conv_img = conv(width, 3, 3, gain=gain)

    def forward(self, onehot: Tensor, codes: Tensor | None = None) -> Tensor:
        """A picture [B,3,H,W] in -1 to 1 for masks [B,labels,H,W] and codes [B,labels,style]."""
        height, width = onehot.shape[-2:]
        shrink = 2**self.upsamplings
        if height % shrink or width % shrink:
            raise UserError(
                f"SeanGenerator: a mask of {width}x{height} cannot be halved {self.upsamplings} times; "
                f"choose a size divisible by {shrink}, e.g. {-(-height // shrink) * shrink}, or fewer upsamplings"
            )
        masks = Masks(onehot, self.labels)
        x = self.fc(masks.at((height // shrink, width // shrink)).planes)
        x = self.head_0(x, masks, codes)
        x = self.G_middle_0(double(x), masks, codes)
        x = double(x) if self.upsamplings == 6 else x
        x = self.G_middle_1(x, masks, codes)
        for up in self.ups:
            x = self.get_submodule(up)(double(x), masks, codes)
        return torch.tanh(self.conv_img(F.leaky_relu(x, SLOPE)))


def double(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")
