"""Read pictures and label maps that a user gives by path, in the same way as the data sets read theirs."""

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
from gan.files import regular
from gan.painting import grids

Size = tuple[int, int]


def read_picture(path: Path, size: Size) -> Tensor:
    """A picture [3, H, W] in -1 to 1, resized."""
    image = functional.resize(pairs.read_picture(_there(path)), list(size), InterpolationMode.BICUBIC, antialias=True)
    return image.float() / 127.5 - 1


def read_labels(path: Path, size: Size, labels: int, void: Mapping[int, int]) -> Tensor:
    """A label map [H, W], resized by nearest neighbour.

    A pixel is the number of a label, or a label's colour in `grids.palette`, which grids and `save-labels` use: image
    editors write either. In a palette PNG the colours count if all of them are of that palette, else the numbers.
    `void` maps other numbers, which the data set's files use, to labels.
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
    """A picture and its label map; both files must have the same shape."""
    (width, height), (across, down) = _open(picture).size, _open(label).size
    if abs(width * down - across * height) > max(width, height, across, down):
        raise UserError(
            f"{picture} is {width}x{height} and {label} is {across}x{down}; a picture and its label map must be of "
            f"the same shape"
        )
    return read_picture(picture, size), read_labels(label, size, labels, void)


def _coloured(path: Path, labels: int) -> np.ndarray | None:
    """The labels by their colours; None where the numbers in the file are the labels."""
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
        f"{path} has the colour {colour} at column {column}, row {row}, and in {len(wrong)} pixels colours that belong "
        f"to no label; paint without soft edges in the colours that save-labels writes, or give a PNG of one channel"
    )


def _open(path: Path) -> Image.Image:
    with pairs.opened(_there(path)) as image:
        return image.copy()


def _there(path: Path) -> Path:
    try:
        regular(path)
    except FileNotFoundError as error:
        raise UserError(f"there is no file '{path}'") from error
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from error
    return path
