"""How a picture of any format, mode and shape becomes pixels of one size."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from datasets.files.pairs import DEEP, FORMATS, PICTURES
from gan.files.errors import UserError

SUFFIXES = (*PICTURES, ".gif", ".jfif", ".ppm", ".pgm", ".avif")
READ = (*FORMATS, "PPM", "AVIF")
MOST_BYTES = 2**29  # of a picture's file
ENLARGED = 8  # a picture that would be enlarged more than so many times is tiny
TURNED = (5, 6, 7, 8)  # the EXIF orientations that exchange width and height


@dataclass(frozen=True)
class Frame:
    """What all pictures of a set become: their size and channels, and how they are fitted.

    `fit` is "crop" (the middle), "pad" (with the background) or "stretch".
    """

    height: int
    width: int
    channels: int = 3
    fit: str = "crop"
    background: str = "white"

    def colour(self) -> tuple[int, ...]:
        try:
            return ImageColor.getrgb(self.background)[:3]
        except ValueError as error:
            raise UserError(f"there is no colour {self.background!r}; try white, black, or #c0c0c0") from error

    def pixels(self, picture: Image.Image) -> Tensor:
        """The picture as bytes [channels, height, width]."""
        if max(self.height / picture.height, self.width / picture.width) > ENLARGED:
            raise UserError(f"it is tiny: {picture.width}x{picture.height} pixels for {self.width}x{self.height}")
        pixels = self._in_channels(_turned(picture))
        height, width = pixels.shape[1:]
        size = [self.height, self.width]
        if self.fit == "crop":
            scale = min(height / self.height, width / self.width)
            high, wide = max(1, round(self.height * scale)), max(1, round(self.width * scale))
            top, left = (height - high) // 2, (width - wide) // 2
            return _resize(pixels[:, top : top + high, left : left + wide], size)
        if self.fit == "stretch":
            return _resize(pixels, size)
        scale = min(self.height / height, self.width / width)
        high, wide = max(1, round(height * scale)), max(1, round(width * scale))
        whole = self._empty()
        top, left = (self.height - high) // 2, (self.width - wide) // 2
        whole[:, top : top + high, left : left + wide] = _resize(pixels, [high, wide])
        return whole

    def _in_channels(self, picture: Image.Image) -> Tensor:
        """All pixels of the picture, in this frame's channels. Without a fourth one they stand on the background."""
        picture = _shallow(picture)
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
        elif picture.mode in ("1", "P"):
            picture = picture.convert("L" if picture.mode == "1" else "RGB")
        shrink = min(picture.height // (4 * self.height), picture.width // (4 * self.width))
        if shrink > 1:  # a mean of whole pixels, far above the final size: saves most of the memory of large pictures
            picture = picture.reduce(shrink)
        if picture.mode == "RGBA" and self.channels != 4:
            ground = Image.new("RGBA", picture.size, (*self.colour(), 255))
            picture = Image.alpha_composite(ground, picture)
        picture = picture.convert({1: "L", 3: "RGB", 4: "RGBA"}[self.channels])
        return torch.from_numpy(np.array(picture)).view(picture.height, picture.width, -1).permute(2, 0, 1)

    def _empty(self) -> Tensor:
        """The background alone, which is transparent where there is a fourth channel."""
        colour = (*self.colour(), 0)[: self.channels]
        if self.channels == 1:
            colour = (Image.new("RGB", (1, 1), self.colour()).convert("L").tobytes()[0],)
        return torch.tensor(colour, dtype=torch.uint8).view(-1, 1, 1).repeat(1, self.height, self.width)


def header(picture: Image.Image) -> str:
    """Width, height and mode, of what is written before the pixels: "640 480 RGB". A plus is transparency."""
    width, height = picture.size
    late = picture.format == "PNG" and "exif" not in picture.info  # for it Pillow would read all pixels first
    if not late and picture.getexif().get(0x0112) in TURNED:
        width, height = height, width
    plus = "+" if picture.mode not in ("RGBA", "LA", "PA") and picture.has_transparency_data else ""
    return f"{width} {height} {picture.mode}{plus}"


def _turned(picture: Image.Image) -> Image.Image:
    """As the camera was held."""
    return ImageOps.exif_transpose(picture)


def _shallow(picture: Image.Image) -> Image.Image:
    """The picture with a byte for each value. 16 bits are scaled, where Pillow would clip them."""
    if picture.mode not in DEEP and not picture.mode.startswith("I;16"):
        return picture
    values = np.array(picture).astype(np.float64)
    whole = 1.0 if picture.mode == "F" else 65535.0
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > whole:
        raise UserError(f"its values are not 0 to {whole:g} (mode {picture.mode}); save it with 8 or 16 bits a channel")
    return Image.fromarray((values * (255 / whole)).round().astype(np.uint8))


def _resize(pixels: Tensor, size: list[int]) -> Tensor:
    """Bicubic with antialiasing. Colours count by their opacity, or what is transparent would stain the edges."""
    if list(pixels.shape[1:]) == size:
        return pixels.contiguous()
    if len(pixels) != 4:
        return functional.resize(pixels, size, InterpolationMode.BICUBIC, antialias=True)
    colours, opacity = pixels[:3].float(), pixels[3:].float() / 255
    thick = functional.resize(torch.cat([colours * opacity, opacity]), size, InterpolationMode.BICUBIC, antialias=True)
    opacity = thick[3:].clamp(0, 1)
    colours = torch.where(opacity > 1 / 512, thick[:3] / opacity.clamp_min(1 / 512), 255.0)
    return torch.cat([colours, opacity * 255]).round().clamp(0, 255).byte()
