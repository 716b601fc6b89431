"""From a data set's bytes to tensors for networks, mirrored and cropped at random."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from gan.files.errors import UserError
from gan.noise import seed_for

Item = dict[str, Any]


class Augment:
    """Mirrors half of the samples (`flip`), and enlarges by 286/256 and crops at random (`crop`), as SPADE and SEAN do.

    All pictures and labels of a sample move together. The random numbers depend on (seed, epoch, index) alone; the
    global random state is neither read nor changed.
    """

    def __init__(
        self, seed: int = 0, flip: bool = True, crop: bool = False, flip_pairs: tuple[tuple[int, int], ...] = ()
    ) -> None:
        self.seed, self.flip, self.crop, self.flip_pairs = seed, flip, crop, flip_pairs

    def __call__(self, item: Item, epoch: int, index: int) -> Item:
        """The item, augmented for this epoch. Pictures and labels are known by their tv_tensors types."""
        mirror, down, right = self._draw(epoch, index)
        if self.crop:
            item = {name: _crop(value, down, right) for name, value in item.items()}
        return self._mirror(item, mirror)

    def load(self, dataset: Any, epoch: int, index: int) -> Item:
        """A sample of a data set, augmented.

        A data set of files has `load_crop`, and resizes once: from the stored size to the one that is cropped. Of a
        data set with `load_part`, such as one of sounds, it is a random part of the sample.
        """
        if hasattr(dataset, "load_part"):
            return dataset.load_part(index, self._draw(epoch, index)[0])
        if hasattr(dataset, "load_augmented"):
            return dataset.load_augmented(self, epoch, index)
        if not (self.crop and hasattr(dataset, "load_crop")):
            return self(as_item(dataset[index]), epoch, index)
        mirror, down, right = self._draw(epoch, index)
        return self._mirror(dataset.load_crop(index, down, right), mirror)

    def _draw(self, epoch: int, index: int) -> list[float]:
        dice = torch.Generator().manual_seed(seed_for("augment", self.seed, epoch, index))
        return torch.rand(3, generator=dice).tolist()

    def _mirror(self, item: Item, mirror: float) -> Item:
        if self.flip and mirror < 0.5:
            return {name: self._flip(name, value) for name, value in item.items()}
        return item

    def _flip(self, name: str, value: Any) -> Any:
        if not isinstance(value, tv_tensors.TVTensor):
            return value
        value = functional.horizontal_flip(value)
        if isinstance(value, tv_tensors.Mask) and name.endswith("label"):
            label = value.clone()
            for left, right in self.flip_pairs:
                value[label == left], value[label == right] = right, left
        return value


def enlarged(size: tuple[int, int]) -> tuple[int, int]:
    """The size of which a part is cropped, as published."""
    return round(size[0] * 286 / 256), round(size[1] * 286 / 256)


def corner(larger: Sequence[int], size: tuple[int, int], down: float, right: float) -> tuple[int, int]:
    """The upper left of a part of this size, which `down` and `right` choose from 0 to 1."""
    return int(down * (larger[0] - size[0] + 1)), int(right * (larger[1] - size[1] + 1))


def _crop(value: Any, down: float, right: float) -> Any:
    """Enlarge and crop: for samples that are not in files."""
    if not isinstance(value, tv_tensors.TVTensor):
        return value
    height, width = value.shape[-2:]
    larger = list(enlarged((height, width)))
    top, left = corner(larger, (height, width), down, right)
    if isinstance(value, tv_tensors.Mask):
        # torch's other nearest would be half a pixel off the picture.
        plain = value.as_subclass(Tensor).reshape(-1, 1, height, width)
        grown = functional.resize(plain, larger, InterpolationMode.NEAREST_EXACT).reshape(*value.shape[:-2], *larger)
        return tv_tensors.Mask(functional.crop(grown, top, left, height, width))
    grown = functional.resize(value, larger, InterpolationMode.BICUBIC, antialias=True)
    return functional.crop(grown, top, left, height, width)


def as_item(sample: Any) -> Item:
    """What a data set gives, by name: torchvision's sets give a picture, or a pair of a picture and its class.

    Pillow's pictures, and arrays and tensors of bytes, become pictures that can be mirrored and cropped.
    """
    if isinstance(sample, dict):
        return {name: _as_picture(value) if isinstance(value, Image.Image) else value for name, value in sample.items()}
    if isinstance(sample, tuple | list):
        picture, label, *others = sample
        if others:
            raise UserError(f"a sample of {len(sample)} values has no names; give a picture and a class, or a dict")
        return {"image": _as_picture(picture), "class": label}
    return {"image": _as_picture(sample)}


def _as_picture(value: Any) -> Any:
    """Bytes [channels, height, width]. A palette becomes colours; an array is [height, width] or has channels last."""
    if isinstance(value, Image.Image):
        modes = {"1": "L", "P": "RGBA" if value.has_transparency_data else "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
        value = np.array(value.convert(modes.get(value.mode, value.mode)))
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return functional.to_image(value)
    if isinstance(value, Tensor) and value.dtype == torch.uint8 and not isinstance(value, tv_tensors.TVTensor):
        return tv_tensors.Image(value)
    return value


def to_tensors(item: Item) -> Item:
    """Pictures as floats from -1 to 1, labels as int64, both as plain tensors. Other values stay as they are."""

    def convert(value: Any) -> Any:
        if isinstance(value, tv_tensors.Mask):
            return value.as_subclass(Tensor).long()
        if isinstance(value, tv_tensors.Image):
            return value.as_subclass(Tensor).float() / 127.5 - 1
        return value

    return {name: convert(value) for name, value in item.items()}


class Samples(Protocol):
    """A data set that can be counted, which torch's `Dataset` need not be."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Prepared(Dataset):
    """A data set with the index (epoch, index), whose items are augmented and made tensors."""

    def __init__(self, dataset: Samples, augment: Augment | None = None) -> None:
        self.dataset, self.augment = dataset, augment

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, which: tuple[int, int]) -> Item:
        epoch, index = which
        item = self.augment.load(self.dataset, epoch, index) if self.augment else as_item(self.dataset[index])
        return to_tensors(item)
