"""How a picture of any format, mode and shape becomes pixels of one size."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from datasets.files.pairs import DEEP, FORMATS, PICTURES, colour_of
from gan.files.errors import UserError

SUFFIXES = (*PICTURES, ".gif", ".jfif", ".ppm", ".pgm", ".avif")
READ = (*FORMATS, "PPM", "AVIF")
MOST_BYTES = 2**29  # of a picture's file
BICUBIC = Image.Resampling.BICUBIC
ENLARGED = 8  # a picture that would be enlarged more than so many times is tiny
TURNED = (5, 6, 7, 8)  # the EXIF orientations that exchange width and height


@dataclass(frozen=True)
class Frame:
    """What all pictures of a set become. `fit` is "crop" (the middle), "pad" (with the background) or "stretch".

    With "whole" they keep their shapes, and `height` and `width` are both the shorter side.
    """

    height: int
    width: int
    channels: int = 3
    fit: str = "crop"
    background: str = "white"

    def __post_init__(self) -> None:
        colour_of(self.background)  # a mistyped one is an error before the work

    def shape(self, width: int, height: int) -> tuple[int, int]:
        """Height and width of what a picture of this width and height becomes."""
        if self.fit != "whole":
            return self.height, self.width
        shorter = min(width, height)
        return round(height * self.height / shorter), round(width * self.width / shorter)

    def tiny(self, width: int, height: int) -> str:
        """What is wrong with a picture that would be enlarged too much, else ""."""
        small = max(self.height / height, self.width / width) > ENLARGED
        return f"it is tiny: {width}x{height} pixels for {self.width}x{self.height}" if small else ""

    def pixels(self, picture: Image.Image) -> Tensor:
        """The picture as bytes [channels, height, width], by bicubic with antialiasing. Colours count by their opacity.

        Padding is transparent where there is a fourth channel.
        """
        picture = ImageOps.exif_transpose(picture)
        if tiny := self.tiny(*picture.size):
            raise UserError(tiny)
        size = self.shape(*picture.size)[::-1]
        picture = self._in_channels(picture)
        if self.fit == "crop":
            picture = ImageOps.fit(picture, size, BICUBIC)
        elif self.fit != "pad":
            picture = picture.resize(size, BICUBIC)
        else:
            picture = ImageOps.pad(picture, size, BICUBIC, "rgba({},{},{},0)".format(*colour_of(self.background)))
        return torch.from_numpy(np.array(picture)).view(*size[::-1], -1).permute(2, 0, 1).contiguous()

    def _in_channels(self, picture: Image.Image) -> Image.Image:
        """The picture in this frame's channels. Without a fourth one it stands on the background."""
        picture = _shallow(picture)
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
        elif picture.mode in ("1", "P"):
            picture = picture.convert("L" if picture.mode == "1" else "RGB")
        shrink = min(picture.height // (4 * self.height), picture.width // (4 * self.width))
        if shrink > 1:  # a mean of whole pixels, far above the final size: saves most of the memory of large pictures
            picture = picture.reduce(shrink)
        if picture.mode == "RGBA" and self.channels != 4:
            ground = Image.new("RGBA", picture.size, (*colour_of(self.background), 255))
            picture = Image.alpha_composite(ground, picture)
        return picture.convert({1: "L", 3: "RGB", 4: "RGBA"}[self.channels])


def header(picture: Image.Image) -> str:
    """Width, height and mode, of what is written before the pixels: "640 480 RGB". A plus is transparency."""
    width, height = picture.size
    late = picture.format == "PNG" and "exif" not in picture.info  # for it Pillow would read all pixels first
    if not late and picture.getexif().get(0x0112) in TURNED:
        width, height = height, width
    plus = "+" if picture.mode not in ("RGBA", "LA", "PA") and picture.has_transparency_data else ""
    return f"{width} {height} {picture.mode}{plus}"


def _shallow(picture: Image.Image) -> Image.Image:
    """The picture with a byte for each value. 16 bits are scaled, where Pillow would clip them."""
    if picture.mode not in DEEP and not picture.mode.startswith("I;16"):
        return picture
    values = np.array(picture).astype(np.float64)
    whole = 1.0 if picture.mode == "F" else 65535.0
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > whole:
        raise UserError(f"its values are not 0 to {whole:g} (mode {picture.mode}); save it with 8 or 16 bits a channel")
    return Image.fromarray((values * (255 / whole)).round().astype(np.uint8))
