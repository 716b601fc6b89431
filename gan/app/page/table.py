"""Tables of pictures and words with titled rows and columns, as HTML. A notebook shows them by itself."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO

from PIL import Image
from torch import Tensor

from gan.app.sampling import grids
from gan.sound import Sound

TINY = 96  # pictures up to this size are saved without loss, and shown with sharp pixels

# For notebooks. The page of samples/gallery.py has its own style.
STYLE = """<style>
.table table { border-collapse: collapse; }
.table th, .table td { padding: 3px; text-align: center; vertical-align: top; font-weight: normal; }
.table tbody th { text-align: left; vertical-align: middle; padding-right: 1em; white-space: nowrap; }
.plain .words { text-align: left; }
.table img { display: block; width: 96px; height: auto; }
.table .heard img, .table audio { display: block; width: 256px; }
.table .exact { image-rendering: pixelated; }
.charts { display: flex; flex-wrap: wrap; }
.table .chart { width: 480px; }
.table .swatch { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.5em; border-radius: 2px; }
.table .note { max-width: 50em; }
</style>"""


@dataclass(frozen=True)
class Cell:
    """Words, or a picture with or without words below it, or one picture for each of the table's moments.

    `wav` is a WAV file to play below the picture. `video` is a GIF or MP4 file in the place of a picture.
    """

    words: str = ""
    pictures: tuple[Image.Image, ...] = ()
    wav: bytes = b""
    video: bytes = b""


def sample_cell(sample: Tensor | Sound | None, words: str = "") -> Cell:
    """A cell with a sample as `grids.picture` draws it: a picture, a label map or a sound. None leaves it empty."""
    if sample is None:
        return Cell(words)
    return Cell(words, (grids.picture(sample),), sample.wav() if isinstance(sample, Sound) else b"")


@dataclass(frozen=True)
class Row:
    """The cells of a row; `swatch` is a colour to show beside its title."""

    title: str
    cells: Sequence[Cell]
    swatch: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Table:
    """Rows under titled columns, with a note above them. A table without rows shows only its note.

    `moments` are the names of the pictures in cells with several pictures. A page has a slider to choose one, a
    notebook shows them in rows below each other (see `unrolled`).
    """

    columns: Sequence[str] = ()
    rows: Sequence[Row] = ()
    note: str = ""
    moments: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

    def unrolled(self, most: int = 6) -> "Table":
        """The table with a row for each moment, at most `most` of them: the first, the last and some between."""
        rows: list[Row] = []
        for row in self.rows:
            if all(len(cell.pictures) < 2 for cell in row.cells):
                rows.append(row)
                continue
            for k in spread(len(self.moments), most):
                cells = [replace(cell, pictures=cell.pictures[k : k + 1]) for cell in row.cells]
                rows.append(replace(row, title=f"{row.title}, {self.moments[k]}", cells=cells))
        return Table(self.columns, rows, self.note)

    def html(self) -> str:
        """HTML without a style. In cells with several pictures, all but the last are hidden."""
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        if not self.rows:
            return f'<div class="table">{note}</div>'
        titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in self.columns)
        head = f"<thead><tr><td></td>{titles}</tr></thead>" if titles else ""
        body = "".join(self._row(row) for row in self.rows)
        table = f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
        return f'<div class="table{self._kind()}">{note}{table}</div>'

    def _kind(self) -> str:
        """The CSS classes of a table of words: plain, and with colours a legend."""
        if any(cell.pictures or cell.video for row in self.rows for cell in row.cells):
            return ""
        return " plain legend" if any(row.swatch for row in self.rows) else " plain"

    def _row(self, row: Row) -> str:
        mark = f'<span class="swatch" style="background:rgb{row.swatch}"></span>' if row.swatch else ""
        columns = self.columns or [""] * len(row.cells)
        cells = "".join(
            self._cell(cell, f"{row.title}, {column}".strip(" ,"))
            for cell, column in zip(row.cells, columns, strict=True)
        )
        return f'<tr><th scope="row"><div>{mark}{escape(row.title)}</div></th>{cells}</tr>'

    def _cell(self, cell: Cell, place: str) -> str:
        words = escape(cell.words)
        if cell.video.startswith(b"GIF8"):
            return f'<td class="video"><img src="{_uri("image/gif", cell.video)}" alt="{escape(place)}"></td>'
        if cell.video:
            source = _uri("video/mp4", cell.video)
            return f'<td class="video"><video controls loop muted src="{source}" title="{escape(place)}"></video></td>'
        if not cell.pictures:
            return f'<td class="words">{words}</td>'
        last = len(cell.pictures) - 1
        images = ""
        for k, picture in enumerate(cell.pictures):
            alt = f"{place}, {self.moments[k]}" if last else f"{place}: {cell.words}" if words else place
            kind = ' class="exact"' if max(picture.size) <= TINY else ""
            size, hidden = f'width="{picture.width}" height="{picture.height}"', " hidden" if k < last else ""
            images += f'<img{kind} src="{encode(picture)}" {size} alt="{escape(alt)}"{hidden}>'
        kind = ' class="moving"' if last else ' class="heard"' if cell.wav else ""
        below = f"<small>{words}</small>" if words else ""
        if cell.wav:
            below = f'<audio controls src="{_uri("audio/wav", cell.wav)}" title="{escape(place)}"></audio>{below}'
        return f"<td{kind}>{images}{below}</td>"

    def _repr_html_(self) -> str:
        return STYLE + self.unrolled().html()


@dataclass(frozen=True)
class Charts:
    drawings: dict[str, bytes]  # SVG
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.drawings)

    def html(self) -> str:
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        named = {escape(f"curves of {title} over the steps"): svg for title, svg in self.drawings.items()}
        images = (f'<img class="chart" alt="{alt}" src="{_uri("image/svg+xml", svg)}">' for alt, svg in named.items())
        return f'<div class="table charts">{note}{"".join(images)}</div>'

    def _repr_html_(self) -> str:
        return STYLE + self.html()


def encode(picture: Image.Image) -> str:
    """A data URI: without loss for small pictures and for masks, else compressed with a loss that is hard to see."""
    if picture.getcolors(256) is not None or max(picture.size) <= TINY:
        return _uri("image/png", grids.png(picture, optimize=True))
    picture.save(data := BytesIO(), "WEBP", quality=90)
    return _uri("image/webp", data.getvalue())


def spread(length: int, most: int) -> list[int]:
    """At most `most` of the numbers below `length`, evenly spread, with the first and the last."""
    most = min(most, length)
    if most < 2:
        return list(range(length))[-most:] if most else []
    return [round(k * (length - 1) / (most - 1)) for k in range(most)]


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
