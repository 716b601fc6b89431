"""Pictures and label maps that a person gives by path, read as the data sets read theirs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from datasets.files import pairs
from gan.errors import UserError
from gan.painting import grids

Size = tuple[int, int]


def read_picture(path: Path, size: Size) -> Tensor:
    """A picture [3, H, W] in -1 to 1, brought to a height and width."""
    image = functional.resize(pairs.read_picture(_there(path)), list(size), InterpolationMode.BICUBIC, antialias=True)
    return image.float() / 127.5 - 1


def read_labels(path: Path, size: Size, labels: int, void: Mapping[int, int]) -> Tensor:
    """A label map [H, W], brought to a height and width by nearest.

    Its pixels are the numbers of labels, or their colours in `grids.palette`, as grids and `save-labels` paint
    them: an editor may write either. A palette PNG goes by its colours where all of them are of that palette. `void`
    are numbers that the data set's own files have for a label.
    """
    numbers = _coloured(path, labels)
    if numbers is None:
        numbers = pairs.read_map(path).astype(np.int32)
        for value, label in void.items():
            numbers[numbers == value] = label
        for value in (numbers.min(), numbers.max()):
            if not 0 <= value < labels:
                raise UserError(
                    f"{path} has the label {value}; with {labels} labels the allowed range is 0..{labels - 1}"
                )
    small = Image.fromarray(numbers).resize(size[::-1], Image.Resampling.NEAREST)
    return torch.from_numpy(np.array(small)).long()


def read_pair(picture: Path, label: Path, size: Size, labels: int, void: Mapping[int, int]) -> tuple[Tensor, Tensor]:
    """A picture and its label map, which show the same."""
    (width, height), (across, down) = _open(picture).size, _open(label).size
    if abs(width * down - across * height) > max(width, height, across, down):
        raise UserError(
            f"{picture} is {width}x{height} and {label} is {across}x{down}; a picture and its label map must be of "
            f"the same shape"
        )
    return read_picture(picture, size), read_labels(label, size, labels, void)


def _coloured(path: Path, labels: int) -> np.ndarray | None:
    """The labels by their colours; None where the file means its numbers."""
    image = _open(path)
    if image.mode in pairs.ONE_CHANNEL and image.mode != "P":
        return None
    colours = torch.from_numpy(np.array(image.convert("RGB")))
    numbers = grids.unpaint(colours, labels)
    wrong = (numbers < 0).nonzero()
    if len(wrong) == 0:
        return numbers.numpy().astype(np.int32)
    if image.mode == "P":
        return None
    row, column = wrong[0].tolist()
    colour = "#{:02x}{:02x}{:02x}".format(*colours[row, column].tolist())
    raise UserError(
        f"{path} has the colour {colour} at column {column}, row {row}, and in {len(wrong)} pixels colours that are no "
        f"label's; paint without soft edges in the colours that save-labels writes, or give a PNG of one channel"
    )


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(_there(path)) as image:
            return image.copy()
    except pairs.UNREADABLE as error:
        raise pairs.unreadable(path, error) from error


def _there(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"there is no file '{path}'")
    return path
