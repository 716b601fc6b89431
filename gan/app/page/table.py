"""Tables of pictures and words with titled rows and columns, as HTML. A notebook shows them by itself.

A page of tables is one file, which opens in any browser without a server and loads nothing else.
"""

import base64
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO
from pathlib import Path

from PIL import Image
from torch import Tensor

from gan.app.sampling import grids
from gan.app.sampling.sheet import writing
from gan.files.disk import whole_file
from gan.files.errors import UserError, reason
from gan.sound import Sound

WITHIN_NAMES = re.compile(r"(?<=[/_])(?=\w)|(?=\.\w+:)")  # where a line of a long file name may end
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
        parts = WITHIN_NAMES.sub("<wbr>", words)
        below = f"<small>{parts}</small>" if words else ""
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


# ---- a page of tables ----

HERE = Path(__file__).resolve().parent
LOOK = HERE / "look.css"  # the editor's, too
Piece = Table | Charts


@dataclass(frozen=True)
class Part:
    """`folded` is a table to open, and its name. A piece is false if it has nothing but a note on what is missing."""

    link: str
    title: str
    pieces: Sequence[Piece]
    folded: tuple[str, Table] | None = None


def document(title: str, lede: str, standing: str, parts: Sequence[Part], made: str) -> str:
    """The whole page; parts that have nothing to show are left out. `made` says in HTML by what it was made."""
    parts = [part for part in parts if any(part.pieces)]
    links = "".join(f'<a href="#{part.link}">{escape(part.title)}</a>' for part in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="{escape(lede)}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{LOOK.read_text("utf-8")}{(HERE / "page.css").read_text("utf-8")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="lede">{escape(lede)}</p>
<p>{escape(standing)}</p>
<nav>{links}</nav>
</header>
<main>
{"".join(map(_section, parts))}</main>
<footer>Made by {made}.
Click a picture to enlarge it; the arrow keys go on to its neighbours.</footer>
<dialog id="large" aria-label="Enlarged picture"></dialog>
<script>
{(HERE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def write(path: Path, make: Callable[[], str], option: str) -> None:
    """Write the page, which takes a while to make: first see whether it can be written. `option` says where."""
    with writing(path, advice=f"choose a place with {option}"), whole_file(path) as part:
        try:
            text = make()
        except OSError as error:  # of what is read for the page
            raise UserError(reason(error)) from error
        part.write_text(text, encoding="utf-8")


def _section(part: Part) -> str:
    inside = "\n".join(_slider(piece) + piece.html() for piece in part.pieces if piece)
    if part.folded:
        name, table = part.folded
        inside += f"\n<details><summary>{escape(name)}</summary>{table.html()}</details>"
    return f'<section id="{part.link}">\n<h2>{escape(part.title)}</h2>\n{inside}\n</section>\n'


def _slider(piece: Piece) -> str:
    """A slider over the moments of a table; without scripts the page shows the last one."""
    if not isinstance(piece, Table) or len(piece.moments) < 2:
        return ""
    last = len(piece.moments) - 1
    return (
        f'<form class="moments" data-names="{escape(json.dumps(list(piece.moments)))}" hidden>'
        f'<button type="button">Play</button><input type="range" min="0" max="{last}" value="{last}" '
        f'aria-label="step of training"><output>{escape(piece.moments[last])}</output></form>'
    )
