"""SEAN's normalisation (ACE), and the convolution that follows it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise
from nets.blocks import bias_of, conv, xavier_
from nets.norm import SyncBatchNorm
from nets.sean.neighbourhood import CELLS, Neighbourhoods, SizedMasks, cells_of
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
