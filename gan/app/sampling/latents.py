"""Where a picture lies in a StyleGAN2: its styles and its noise, as `gan.sample RUN project` finds and saves them.

And directions in which w changes a picture much.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gan.app.sampling.drawer import Drawer
from gan.app.sampling.sheet import writing
from gan.files.disk import load_plain, regular, whole_file
from gan.files.errors import UserError, reading, reason
from nets.stylegan import StyleGenerator
from nets.stylegan_layers import ModulatedConv

SAMPLES = 10_000  # latents whose w tell the mean of w, and how far w are from it
AGAIN = "make one with python -m gan.sample RUN project --picture me.jpg"

Way = Literal["weights", "pca"]


@dataclass(frozen=True)
class Latent:
    """The style of each layer [layers, W], and the noise map of each convolution by its name.

    Without maps, the noise is the network's own.
    """

    w: Tensor
    maps: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Write a file of tensors and numbers only, so that it is read without running code."""
        with writing(path, RuntimeError), whole_file(path) as part:
            torch.save(vars(self), part)

    @classmethod
    def load(cls, path: Path, net: StyleGenerator) -> "Latent":
        """Read a file for this network, without running any code in it."""
        try:
            regular(path)
            saved = load_plain(path)
        except (OSError, UserError) as error:
            raise UserError(f"'{path}' cannot be read as a latent file ({reason(error)}); {AGAIN}") from error
        with reading(f"'{path}'", f"it holds no latent; {AGAIN}"):
            latent = cls(saved["w"], saved["maps"])
            (layers, length), shapes = latent.w.shape, {name: each.shape for name, each in latent.maps.items()}
        rows, wide = net.synthesis.rows, len(net.mapping.w_avg)
        if (layers, length) != (rows, wide) or shapes != {name: each.shape for name, each in noise_maps(net).items()}:
            raise UserError(
                f"'{path}' has styles of length {length} for {layers} layers, and this network has {rows} layers and "
                f"styles of length {wide}, or noise of other sizes; project the picture with this network"
            )
        return latent


def noise_maps(net: StyleGenerator) -> dict[str, Tensor]:
    """The noise that each convolution of a generator adds, by its name."""
    return {name: each for name, each in net.named_buffers() if name.endswith("noise_const")}


def some_w(drawer: Drawer, label: int | str | None = None) -> Tensor:
    """The w of the first seeds [SAMPLES, W]."""
    seeds = range(SAMPLES)
    with torch.no_grad():
        return drawer.net.mapping(drawer.z(seeds), drawer.labels(seeds, label))


def directions(drawer: Drawer, way: Way) -> Tensor:
    """Steps of w [N, W], the most important direction first: each is as long as w's standard deviation along it."""
    known = some_w(drawer)
    vectors = by_weights(drawer.styled()) if way == "weights" else by_pca(known)
    return vectors * (known.cpu() @ vectors.T).std(0)[:, None]


def by_weights(net: StyleGenerator) -> Tensor:
    """Directions to which the convolutions' styles answer most: Shen and Zhou 2021 (SeFa), for all layers together."""
    return _main(torch.cat([layer.affine.weight for layer in net.modules() if isinstance(layer, ModulatedConv)]))


def by_pca(known: Tensor) -> Tensor:
    """Directions in which the w of many pictures differ most: Härkönen et al. 2020 (GANSpace)."""
    return _main(known - known.mean(0))


def _main(rows: Tensor) -> Tensor:
    """The right singular vectors, the largest value first. The largest element of each is positive."""
    vectors = torch.linalg.svd(rows.detach().cpu().double(), full_matrices=False).Vh
    return (vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign() * vectors).float()
