"""Where a picture lies in a StyleGAN2: its styles and its noise, as `gan.sample RUN project` finds and saves them."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gan.app.painting.sheet import writing
from gan.files.disk import load_plain, regular, whole_file
from gan.files.errors import UserError, reading, reason
from nets.stylegan import StyleGenerator

AGAIN = "make one with python -m gan.sample RUN project --picture me.jpg"


@dataclass(frozen=True)
class Latent:
    """The style of each layer [layers, W], and the noise map of each convolution by its name; without maps, the net's.

    `found_in` are the weights that draw the picture here. A latent file has all three, and a checksum of them.
    """

    w: Tensor
    maps: dict[str, Tensor]
    found_in: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write a file of tensors and numbers only, so that it is read without running code."""
        with writing(path), whole_file(path) as part:
            torch.save({**vars(self), "crc32": self._crc32()}, part)

    @classmethod
    def load(cls, path: Path, net: StyleGenerator) -> "Latent":
        """Read a file for this network, without running any code in it."""
        try:
            regular(path)
            saved = load_plain(path)
        except (OSError, UserError) as error:
            raise UserError(f"'{path}' cannot be read as a latent file ({reason(error)}); {AGAIN}") from error
        with reading(f"'{path}'", f"it holds no latent; {AGAIN}"):
            latent = cls(saved["w"], saved["maps"], saved.get("found_in", ()))
            if saved["crc32"] != latent._crc32():
                raise ValueError
            (layers, length), shapes = latent.w.shape, {name: each.shape for name, each in latent.maps.items()}
        rows, wide = net.synthesis.rows, len(net.mapping.w_avg)
        if (layers, length) != (rows, wide) or shapes != {name: each.shape for name, each in noise_maps(net).items()}:
            raise UserError(
                f"'{path}' has styles of length {length} for {layers} layers, and this network has {rows} layers and "
                f"styles of length {wide}, or noise of other sizes; project the picture with this network"
            )
        return latent

    def _crc32(self) -> int:
        found = zlib.crc32("\n".join(self.found_in).encode())  # 0 without, as in older files
        for name, each in {"w": self.w, **self.maps}.items():
            found = zlib.crc32(each.contiguous().numpy().tobytes(), zlib.crc32(name.encode(), found))
        return found


def noise_maps(net: StyleGenerator) -> dict[str, Tensor]:
    """The noise that each convolution of a generator adds, by its name."""
    return {name: each for name, each in net.named_buffers() if name.endswith("noise_const")}
