"""Pictures and label maps in two folders, paired by name."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors

from gan.errors import UserError

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
ONE_CHANNEL = ("L", "P", "1", "I", "I;16", "I;16B")  # the modes in which a pixel is one number


class FolderPairs(Dataset):
    """`root/images/<name>.jpg` (or png, webp ...) with `root/labels/<name>.png`, resized to size x size.

    Names may have folders in them. A label map is a one-channel or palette PNG of the numbers 0 to
    num_labels - 1. `flip_pairs` names the labels that change places when a picture is mirrored.
    """

    def __init__(
        self, root: str | Path, num_labels: int, size: int, flip_pairs: tuple[tuple[int, int], ...] = ()
    ) -> None:
        if not 1 <= num_labels <= 256:
            raise UserError(f"{num_labels} labels do not fit into a byte; try 1 to 256")
        self.root, self.num_labels, self.size, self.flip_pairs = Path(root), num_labels, size, flip_pairs
        self.label_names = tuple(str(label) for label in range(num_labels))
        images = _files(self.root / "images", PICTURES, "pictures (jpg, png, webp ...)")
        labels = _files(self.root / "labels", (".png",), "label maps (png)")
        _check_pairs(images, labels, self.root)
        self.pairs = [(images[name], labels[name]) for name in sorted(images)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image_path, label_path = self.pairs[index]

        # Read both, as they are stored: an orientation in the picture's EXIF is not one of the labels.
        image, label = _read(image_path, "RGB"), _read(label_path)
        if image.size != label.size:
            raise UserError(
                f"{image_path} is {image.width}x{image.height} and {label_path} is {label.width}x{label.height}; "
                "make a picture and its label map the same size"
            )
        _check_labels(label, label_path, self.num_labels)

        # Resize; labels are never mixed.
        size = (self.size, self.size)
        values = Image.fromarray(np.array(label).astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
        picture = image.resize(size, Image.Resampling.BICUBIC)
        return {
            "image": tv_tensors.Image(torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()),
            "label": tv_tensors.Mask(torch.from_numpy(np.array(values))),
        }


def _files(folder: Path, suffixes: tuple[str, ...], what: str) -> dict[str, Path]:
    """The files of a folder and its sub-folders, by their name without the suffix."""
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}; put the {what} there, or give the folder that holds 'images' and 'labels'"
        )
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in suffixes or path.name.startswith("."):
            continue
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name in files:
            raise UserError(f"{files[name]} and {path} have the same name; remove one of them")
        files[name] = path
    if not files:
        raise UserError(f"there are no {what} in {folder}")
    return files


def _check_pairs(images: dict[str, Path], labels: dict[str, Path], root: Path) -> None:
    for some, others, what, folder in ((images, labels, "label map", "labels"), (labels, images, "picture", "images")):
        lonely = sorted(some.keys() - others.keys())
        if lonely:
            names = ", ".join(str(some[name]) for name in lonely[:3]) + (" ..." if len(lonely) > 3 else "")
            raise UserError(
                f"{len(lonely)} of {len(some)} files have no {what} of the same name: {names}; "
                f"add each {what} to {root / folder}, or remove the file"
            )


def _read(path: Path, mode: str | None = None) -> Image.Image:
    try:
        with Image.open(path) as picture:
            picture.load()
            return picture.convert(mode) if mode else picture.copy()
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as a picture ({error}); replace or remove it") from error


def _check_labels(label: Image.Image, path: Path, num_labels: int) -> None:
    if label.mode not in ONE_CHANNEL:
        raise UserError(
            f"{path} is a picture of mode {label.mode}; a label map has one channel (mode L) or a palette (mode P), "
            "and its values are the labels"
        )
    low, high = np.array(label).min(), np.array(label).max()
    for value in (low, high):
        if not 0 <= value < num_labels:
            raise UserError(
                f"{path} has the label {int(value)}; with {num_labels} labels the allowed range is 0..{num_labels - 1}"
            )
