"""Pictures of samples: single ones, label maps in colours, and grids with titled columns and a row a sample.

Sounds are drawn as spectrograms, and have WAV files beside their pictures.
"""

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from math import log2
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from gan.files.disk import name_for, write_whole
from gan.sound import Sound
from nets.mel import Mel
from strategies.batches.micro_batches import tensors

MARGIN, TITLE, LINE, CELL = 6, 22, 15, 128
WIDE = 2  # pictures more than so many times as wide as high stand below each other
BANDS, ZOOM = 40, 2  # a spectrogram's bands of pitches, and pixels for each
FRAME = 0.032  # seconds that a column of its pixels looks at
QUIET, LOUD = -9.0, 0.5  # the logs that are dark and bright
GROUND = "#b2b2b2"  # what transparent parts are shown on: gray, where neither white nor black gets lost
EDITED = 512  # pixels on the shorter side of a label map that is to be painted on


Batch = Sequence[Tensor | Image.Image | None] | Tensor | Sound


def grid(columns: Mapping[str, Batch], rows: int = 8, titles: Sequence[str] = ()) -> Image.Image:
    """A grid with a column for each title and batch: pictures [B, 3, H, W] in [-1, 1], label maps [B, H, W] or sounds.

    `titles` name the rows. A batch may be a list; where it has None, the cell stays white. Of wide pictures, those of
    one row stand below each other.
    """
    cells = {
        title: [None if sample is None else picture(sample) for sample in batch[:rows]]
        for title, batch in columns.items()
    }
    first = next(cell for batch in cells.values() for cell in batch if cell is not None)
    if is_wide(first.size):  # in one column, row by row, with titles for its rows
        order = range(max(map(len, cells.values())))
        titles = [f"{titles[line]}: {title}" if titles else title for line in order for title in cells]
        cells = {"": [column[line] for line in order for column in cells.values()]}
    zoom = max(1, CELL // first.width)
    width, height = first.width * zoom, first.height * zoom
    lines = max(map(len, cells.values()))
    font = _font([*titles, *cells], 14)
    names = [_fit(title, font, CELL) for title in titles]
    margin = MARGIN + (max(round(font.getlength(name)) for name in names) + MARGIN if names else 0)
    size = margin + len(cells) * (width + MARGIN), TITLE + MARGIN + lines * (height + MARGIN)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for line, name in enumerate(names):
        draw.text((margin - MARGIN, TITLE + line * (height + MARGIN) + height / 2), name, "black", font, anchor="rm")
    for number, (title, pictures) in enumerate(cells.items()):
        left = margin + number * (width + MARGIN)
        draw.text((left + width / 2, TITLE - 6), _fit(title, font, width), "black", font, anchor="ms")
        for line, cell in enumerate(pictures):
            if cell is not None:
                large = cell.resize((width, height), Image.Resampling.NEAREST)
                sheet.paste(large, (left, TITLE + line * (height + MARGIN)))
    return sheet


def tiles(cells: Sequence[Image.Image], across: int, margin: int = 0) -> Image.Image:
    """Pictures of one size side by side, so many in a row. Where they are transparent, empty places are too."""
    width, height = (side + margin for side in cells[0].size)
    rows = -(-len(cells) // across)
    size = min(across, len(cells)) * width + margin, rows * height + margin
    sheet = Image.new(cells[0].mode, size, "#ffffff00")
    for number, cell in enumerate(cells):
        sheet.paste(cell, (margin + number % across * width, margin + number // across * height))
    return sheet


def enlarged(image: Image.Image, side: int) -> Image.Image:
    """A small picture, enlarged by a whole number until its shorter side has so many pixels."""
    zoom = max(1, -(-side // min(image.size)))
    return image.resize((zoom * image.width, zoom * image.height), Image.Resampling.NEAREST)


def titled(image: Image.Image, title: str) -> Image.Image:
    """A picture with a title below, on white."""
    sheet = Image.new(image.mode, (image.width, image.height + LINE), "white")
    sheet.paste(image)
    font = _font([title], LINE - 4)
    place = image.width / 2, image.height + LINE / 2
    ImageDraw.Draw(sheet).text(place, _fit(title, font, image.width), "black", font, anchor="mm")
    return sheet


def is_wide(size: tuple[int, int]) -> bool:
    return size[0] > WIDE * size[1]


def _font(texts: Iterable[str], size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, or where it lacks letters, as those of Köln and Москва, the one that Matplotlib brings."""
    if all(map(str.isascii, texts)):
        return ImageFont.load_default(size=size)
    from matplotlib import get_data_path  # takes a while

    return ImageFont.truetype(str(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), size)


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Shorten a text in its middle until it is at most `width` pixels wide."""
    short, left = text, len(text)
    while font.getlength(short) > width and left > 2:
        left -= 1
        short = text[: (left + 1) // 2] + "…" + text[len(text) - left // 2 :]
    return short


def picture(sample: Tensor | Sound | Image.Image, transparent: bool = False) -> Image.Image:
    """One sample as a picture: grey, RGB or RGBA in [-1, 1], a label map in `palette`'s colours, or a spectrogram.

    RGBA is shown on gray, or stays `transparent`.
    """
    if isinstance(sample, Image.Image):
        if sample.mode != "RGBA" or transparent:
            return sample
        return Image.alpha_composite(Image.new("RGBA", sample.size, GROUND), sample).convert("RGB")
    if isinstance(sample, Sound):
        return spectrogram(sample)
    sample = sample.detach().cpu()
    if sample.dtype == torch.int64:
        table = palette(int(sample.max()) + 1)
        return Image.fromarray(table[sample].numpy())
    pixels = ((sample.float().clamp(-1, 1) + 1) * 127.5).round().byte()
    image = Image.fromarray(pixels.expand(max(3, len(pixels)), -1, -1).permute(1, 2, 0).contiguous().numpy())
    return picture(image, transparent)


def spectrogram(sound: Sound) -> Image.Image:
    """The mel spectrogram of one sound: time goes to the right, pitch goes up, and loud is bright."""
    from matplotlib import colormaps

    window = 2 ** round(log2(FRAME * sound.rate))
    wave = sound.samples.detach().cpu().float()
    (loudness,) = Mel(sound.rate, BANDS, window, window // 4)(wave.unsqueeze(0))
    shares = ((loudness - QUIET) / (LOUD - QUIET)).flip(0).repeat_interleave(ZOOM, 0)
    return Image.fromarray(colormaps["inferno"](shares.numpy(), bytes=True)).convert("RGB")


def made(columns: Mapping[str, Tensor | Sound], batch: Any) -> dict[str, Tensor | Sound]:
    """Those columns that are not simply what the batch has."""
    given = {value.data_ptr() for value in tensors(batch)}
    return {
        title: column
        for title, column in columns.items()
        if (column.samples if isinstance(column, Sound) else column).data_ptr() not in given
    }


def palette(labels: int) -> Tensor:
    """A colour for each label, [labels, 3] bytes. Label 0 is dark; labels with near numbers get very different hues."""
    golden = (5**0.5 - 1) / 2
    colours = [(0.16, 0.17, 0.20)]
    colours += [
        colorsys.hsv_to_rgb(label * golden % 1, (0.55, 0.8)[label // 2 % 2], (0.95, 0.75)[label % 2])
        for label in range(1, labels)
    ]
    return (torch.tensor(colours) * 255).round().byte()


def colour(label: int) -> tuple[int, int, int]:
    return tuple(palette(label + 1)[label].tolist())


def unpaint(colours: Tensor, labels: int) -> Tensor:
    """The label map [H, W] for colours of `palette`, [H, W, 3] bytes; -1 where a colour is not of the palette."""
    known, order = _packed(palette(labels)).sort()
    wanted = _packed(colours)
    place = torch.searchsorted(known, wanted).clamp_max(labels - 1)
    return torch.where(known[place] == wanted, order[place], -1)


def _packed(colours: Tensor) -> Tensor:
    return (colours.long() * torch.tensor([1 << 16, 1 << 8, 1])).sum(-1)


def label_png(label: Tensor, labels: int) -> Image.Image:
    """A label map [H, W] as a palette picture: its numbers are the labels, its colours are those of `palette`.

    Small maps are enlarged by a whole number, so that they are large enough to paint on.
    """
    image = Image.fromarray(label.byte().numpy(), "L")
    image.putpalette(palette(labels).flatten().tolist())
    zoom = max(1, EDITED // min(image.size))
    return image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)


def png(image: Image.Image, **how: Any) -> bytes:
    """The file of a picture. `how` is as for Pillow."""
    image.save(content := BytesIO(), "PNG", **how)
    return content.getvalue()


def save_sounds(columns: Mapping[str, Any], picture: Path) -> list[Path]:
    """Write each column of a grid that is a sound, beside the grid's picture; returns the files."""
    heard = {title: column for title, column in columns.items() if isinstance(column, Sound)}
    paths = [picture.with_name(f"{picture.stem}-{name_for(title)}.wav") for title in heard]
    for path, column in zip(paths, heard.values(), strict=True):
        write_whole(path, column.wav())
    return paths
