"""Faces drawn from a seed: a data set with labels and with ground truth, and nothing to download.

The shape of a face and the style of its regions are drawn separately. So the right result of a style transfer is
known: the shape of one face, drawn in the styles of another.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors

from datasets.drawn.drawing import FLIP_PAIRS, LABELS, Region, Tone
from datasets.drawn.looks import LOOKS, Style, paint
from datasets.drawn.portrait import draw_portrait, supersampling
from gan.files.errors import UserError
from gan.noise import seed_for

MEMORY = 1 << 30  # bytes of drawn pictures that a data set keeps; others are drawn again each time


class Faces(Dataset):
    """Faces number `first` to `first + length - 1` of a seed: pictures and their maps of 19 labels.

    Face k of a seed is the same in every data set, for any length, process or number of workers. `look` is "any", where
    each region of each face has its own style, or "poster" or "neon", where all faces share one palette.
    """

    num_labels, label_names, flip_pairs = len(LABELS), LABELS, FLIP_PAIRS

    def __init__(self, length: int, size: int = 64, seed: int = 0, first: int = 0, look: str = "any") -> None:
        if size < 16:
            raise UserError(f"faces of size {size} are too small to be seen; try size 16 or more")
        if length < 1:
            raise UserError(f"a set of {length} faces is empty; try a length of 1 or more")
        if look not in LOOKS:
            raise UserError(f"look {look!r} is not known; try one of {', '.join(LOOKS)}")
        self.length, self.size, self.seed, self.first, self.look = length, size, seed, first, look
        # Picture and labels are drawn from one portrait, so we keep the latest one.
        self._latest: tuple[int, np.ndarray] | None = None
        self._kept: dict[tuple, torch.Tensor] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        face = self.face(index)
        return {"image": self.image(face), "label": self.label_map(face)}

    def face(self, index: int) -> int:
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is outside of {self.length} faces")
        return self.first + index % self.length

    def image(self, shape: int, style: int | Mapping[int, int] | None = None) -> tv_tensors.Image:
        """The picture of `draw` as bytes [3, H, W], drawn once and kept."""
        key = shape, frozenset(style.items()) if isinstance(style, Mapping) else style
        return tv_tensors.Image(self._keep(key, lambda: _bytes(self.draw(shape, style)).permute(2, 0, 1)))

    def label_map(self, shape: int) -> tv_tensors.Mask:
        """The labels of `label` as bytes [H, W], drawn once and kept."""
        return tv_tensors.Mask(self._keep((shape,), lambda: _bytes(self.label(shape))))

    def draw(self, shape: int, style: int | Mapping[int, int] | None = None) -> Image.Image:
        """Draw the shape of one face in the style of another: the ground truth of a style transfer.

        `style` is the number of the face whose styles are used. Or it gives a face for some regions; the other regions
        keep their own style.
        """
        return paint(self._cells(shape), self._styles(shape, style), self.size)

    def label(self, shape: int) -> Image.Image:
        """Draw the labels of a face: each pixel has the region at its middle."""
        fine = supersampling(self.size)
        return Image.fromarray(self._cells(shape)[fine // 2 :: fine, fine // 2 :: fine] // len(Tone))

    def _cells(self, shape: int) -> np.ndarray:
        if self._latest is None or self._latest[0] != shape:
            cells = draw_portrait(seed_for("shape", self.seed, shape), self.size * supersampling(self.size))
            self._latest = shape, cells
        return self._latest[1]

    def _styles(self, shape: int, style: int | Mapping[int, int] | None) -> list[Style]:
        if not isinstance(style, Mapping):
            style = dict.fromkeys(Region, shape if style is None else style)
        return [LOOKS[self.look](self.seed, style.get(region, shape), region) for region in Region]

    def _keep(self, key: tuple, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        kept = self._kept.get(key)
        if kept is None:
            kept = draw().contiguous()
            if self._kept_bytes + kept.numel() <= MEMORY:
                self._kept[key] = kept
                self._kept_bytes += kept.numel()
        return kept.clone()  # the caller may write on it


class FaceTransfers(Dataset):
    """Pairs of faces for style transfer: A, B, and the truth, which is A's shape drawn in B's styles.

    B is the face after A; after the last face comes the first. "region_truth" is A with the style of one "region" from
    B. This region is one that both faces have and that fills 1/64 of A or more; pairs take these regions in turn.
    """

    def __init__(self, faces: Faces) -> None:
        if len(faces) < 2:
            raise UserError("a style transfer needs two faces; try Faces of length 2 or more")
        self.faces = faces
        self.num_labels, self.label_names, self.flip_pairs = faces.num_labels, faces.label_names, faces.flip_pairs

    def __len__(self) -> int:
        return len(self.faces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        faces = self.faces
        a, b = faces.face(index), faces.face((index + 1) % len(self))
        item = {"image": faces.image(a), "label": faces.label_map(a), "truth": faces.image(a, style=b)}
        item |= {"style_image": faces.image(b), "style_label": faces.label_map(b)}
        parts = item["label"], item["style_label"]
        sizes, theirs = (torch.bincount(part.flatten(), minlength=self.num_labels) for part in parts)
        shared = ((sizes * 64 >= parts[0].numel()) & (theirs > 0)).nonzero().flatten().tolist()
        region = shared[index % len(shared)]
        return item | {"region": region, "region_truth": faces.image(a, style={region: b})}


class FaceDomains(Dataset):
    """Two unpaired domains: "a" has posters of the even faces, "b" has neon pictures of the odd faces.

    With `truth`, there are also perfect translations: "truth_b" is the face of "a" in neon, and "truth_a" is the face
    of "b" as a poster.
    """

    def __init__(self, length: int, size: int = 64, seed: int = 0, first: int = 0, truth: bool = False) -> None:
        self.posters = Faces(2 * length, size, seed, 2 * first, look="poster")
        self.neons = Faces(2 * length, size, seed, 2 * first, look="neon")
        self.length, self.truth = length, truth

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        even = self.posters.face(2 * index)
        item: dict[str, torch.Tensor] = {"a": self.posters.image(even), "b": self.neons.image(even + 1)}
        if self.truth:
            item |= {"truth_b": self.neons.image(even), "truth_a": self.posters.image(even + 1)}
        return item


class FaceLooks(Dataset):
    """Faces with classes, which take turns: posters and neon pictures."""

    looks = ("poster", "neon")

    def __init__(self, length: int, size: int = 64, seed: int = 0, first: int = 0) -> None:
        self.faces, self.neons = (Faces(length, size, seed, first, look) for look in self.looks)

    def __len__(self) -> int:
        return len(self.faces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.faces.face(index)
        neon = number % 2
        return {"image": (self.neons if neon else self.faces).image(number), "class": neon}


def _bytes(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture))
