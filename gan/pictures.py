"""Grids of samples: titled columns, a row a sample, as PNG."""

import colorsys
from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

MARGIN, TITLE, CELL = 6, 22, 128


def grid(columns: Mapping[str, Tensor], rows: int = 8) -> Image.Image:
    """The grid of some titled batches: pictures [B, 3, H, W] in [-1, 1] or label maps [B, H, W]."""
    cells = {title: [picture(sample) for sample in batch[:rows]] for title, batch in columns.items()}
    first = next(iter(cells.values()))[0]
    zoom = max(1, CELL // first.width)
    width, height = first.width * zoom, first.height * zoom
    lines = max(map(len, cells.values()))
    sheet = Image.new(
        "RGB", (MARGIN + len(cells) * (width + MARGIN), TITLE + MARGIN + lines * (height + MARGIN)), "white"
    )
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for number, (title, pictures) in enumerate(cells.items()):
        left = MARGIN + number * (width + MARGIN)
        draw.text((left + width / 2, TITLE - 6), title, "black", font, anchor="ms")
        for line, cell in enumerate(pictures):
            sheet.paste(
                cell.resize((width, height), Image.Resampling.NEAREST), (left, TITLE + line * (height + MARGIN))
            )
    return sheet


def picture(sample: Tensor) -> Image.Image:
    """One sample as a picture: grey or RGB in [-1, 1], or a label map in the colours of `palette`."""
    sample = sample.detach().cpu()
    if sample.dtype == torch.int64:
        table = palette(int(sample.max()) + 1)
        return Image.fromarray(table[sample].numpy())
    pixels = ((sample.float().clamp(-1, 1) + 1) * 127.5).round().byte()
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def palette(labels: int) -> Tensor:
    """A colour a label, [labels, 3] bytes: 0 is dark, neighbours in number are far apart in hue."""
    golden = (5**0.5 - 1) / 2
    colours = [(0.16, 0.17, 0.20)]
    colours += [
        colorsys.hsv_to_rgb(label * golden % 1, (0.55, 0.8)[label // 2 % 2], (0.95, 0.75)[label % 2])
        for label in range(1, labels)
    ]
    return (torch.tensor(colours) * 255).round().byte()


def save(image: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all: someone may be looking at the folder."""
    part = path.with_suffix(".part")
    image.save(part, format="PNG")
    part.replace(path)
