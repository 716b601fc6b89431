"""A page of tables as one file, which opens in any browser without a server and loads nothing else."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gan.app.page.table import Charts, Table
from gan.app.sampling.sheet import writing
from gan.files.disk import whole_file
from gan.files.errors import UserError, reason

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
