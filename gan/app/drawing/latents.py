"""Where a picture lies in a StyleGAN2: its styles and its noise, as `gan.sample RUN project` finds and saves them."""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gan.files.disk import load_plain, regular, whole_file
from gan.files.errors import UserError, reason

AGAIN = "make one with python -m gan.sample RUN project --picture me.jpg"


@dataclass(frozen=True)
class Latent:
    """The style of each layer [layers, W], and the noise map of each convolution by its name; without maps, the net's.

    `source` says of what, and in which network.
    """

    w: Tensor
    maps: dict[str, Tensor]
    source: str

    def save(self, path: Path) -> None:
        """Write a file of tensors and text only, so that it is read without running code."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as part:
                torch.save({**vars(self), "crc32": self._crc32()}, part)
        except (OSError, RuntimeError) as error:
            raise UserError(f"cannot write '{path}': {reason(error)}; choose another file with -o") from error

    @classmethod
    def load(cls, path: Path, net: nn.Module) -> "Latent":
        """Read a file for this network, without running any code in it."""
        try:
            regular(path)
            saved = load_plain(path)
        except OSError as error:
            raise UserError(f"cannot read '{path}': {reason(error)}; {AGAIN}") from error
        except UserError as error:
            raise UserError(f"'{path}' is no latent file that can be read ({error}); {AGAIN}") from error
        if not (isinstance(saved, dict) and saved.keys() == {"w", "maps", "source", "crc32"} and _plain(saved)):
            raise UserError(f"'{path}' is no latent file; {AGAIN}")
        latent = cls(saved["w"], saved["maps"], saved["source"])
        if saved["crc32"] != latent._crc32():
            raise UserError(f"'{path}' is damaged: its numbers are not those that were written; {AGAIN}")
        styles, maps = (net.synthesis.rows, len(net.mapping.w_avg)), noise_maps(net)
        if latent.w.shape != styles or {name: each.shape for name, each in latent.maps.items()} != {
            name: each.shape for name, each in maps.items()
        }:
            raise UserError(
                f"'{path}' is of {latent.source}: {latent.w.shape[0]} layers with styles of length "
                f"{latent.w.shape[1]}, and this network has {styles[0]} of {styles[1]}, or noise of other sizes; "
                f"project the picture with this network"
            )
        return latent

    def _crc32(self) -> int:
        found = zlib.crc32(self.source.encode())
        for name, each in {"w": self.w, **self.maps}.items():
            found = zlib.crc32(each.detach().cpu().contiguous().numpy().tobytes(), zlib.crc32(name.encode(), found))
        return found


def _plain(saved: Mapping[str, Any]) -> bool:
    numbers = [saved["w"], *(saved["maps"].values() if isinstance(saved["maps"], dict) else [None])]
    kinds = all(isinstance(each, Tensor) and each.dtype == torch.float32 and each.ndim == 2 for each in numbers)
    return kinds and isinstance(saved["source"], str) and all(isinstance(name, str) for name in saved["maps"])


def noise_maps(net: nn.Module) -> dict[str, Tensor]:
    """The noise that each convolution of a generator adds, by its name."""
    return {name: each for name, each in net.named_buffers() if name.endswith("noise_const")}


@contextmanager
def noise_of(net: nn.Module, latent: Latent) -> Iterator[None]:
    """Inside the `with`, the generator adds this latent's noise."""
    own = {name: each.clone() for name, each in noise_maps(net).items()}
    net.load_state_dict(latent.maps, strict=False)
    yield
    net.load_state_dict(own, strict=False)
