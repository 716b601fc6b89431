"""`python samples/gallery.py [RUN]`: what a run made, as one page that opens in any browser, without a server.

The page is a single file with its pictures in it; it loads nothing else, so it can be mailed or put on any server.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gan.app.outputs import run
from gan.app.page import run_tables, style_tables
from gan.app.page.document import Part, Piece, document, write
from gan.app.page.table import Table
from gan.app.painting.reopen import SavedRun, open_run
from gan.app.run.parser import Parser
from gan.app.training.card import first_sentence
from gan.files.errors import UserError, refuse


@dataclass(frozen=True)
class Section:
    """A part of the page: the name of its link, a title and tables. `folded` is a table to open, and its name."""

    link: str
    title: str
    tables: tuple[Callable[[SavedRun], Piece], ...]
    folded: tuple[str, Callable[[SavedRun], Table]] | None = None


def between(opened: SavedRun) -> Table:
    """One edit of a region's style, towards picture 1 where there is one."""
    return style_tables.edit(opened, other=1 if len(getattr(opened.run.data, "val", ())) > 1 else None)


SECTIONS = (
    Section("training", "What it learned to make", (run_tables.over_time,)),
    Section("sounds", "What it sounds like", (run_tables.sounds,)),
    Section("masks", "Masks beside pictures", (run_tables.masks, run_tables.legend)),
    Section("styles", "One region in another's style", (style_tables.exchange,)),
    Section("between", "From one style to another", (between,)),
    Section("videos", "Videos", (run_tables.videos,)),
    Section("copies", "Are they copies?", (run_tables.nearest,)),
    Section("scores", "Scores", (run_tables.scored,)),
    Section("health", "Is it well?", (run_tables.health,)),
    Section("curves", "Curves", (run_tables.curves,)),
    Section("run", "The run", (run_tables.facts,), ("Every setting", run_tables.settings)),
)


def main(argv: list[str] | None = None) -> int:
    """The command: 0 when the page is written, 2 with one clear message when it could not be."""
    parser = Parser(prog="python samples/gallery.py", description=__doc__.split("\n\n")[1])
    parser.add_argument("run", nargs="?", default="auto", help="a run's folder or a checkpoint; default the newest run")
    parser.add_argument("--out", type=Path, help="the page, or the folder to put it in; default the run's folder")
    parser.add_argument("--data", help="where the run's pictures are now, if they have moved")
    options = parser.parse_args(argv)
    try:
        opened = open_run(options.run, device="auto", data=options.data)
        path = place(options.out, opened)
        write(path, lambda: page(opened), "--out")
    except UserError as error:
        return refuse(error)
    print(f"open {path} in a browser ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def place(out: Path | None, opened: SavedRun) -> Path:
    """Where the page goes; `out` is a file if it ends in .html or .htm, else a folder."""
    if out is None:
        return opened.folder.path / "gallery.html"
    return out if out.suffix in (".html", ".htm") else out / f"{opened.folder.path.name}.html"


def page(opened: SavedRun) -> str:
    """The whole page; sections that this game has nothing for are left out."""
    parts = [
        Part(
            section.link,
            section.title,
            [table(opened) for table in section.tables],
            section.folded and (section.folded[0], section.folded[1](opened)),
        )
        for section in SECTIONS
    ]
    made = f"<code>python samples/gallery.py</code> from <code>{escape(opened.checkpoint.name)}</code>"
    lede = first_sentence(opened.settings["run"])
    return document(opened.folder.path.name, lede, _standing(opened), parts, made)


def _standing(opened: SavedRun) -> str:
    """How far the run is, and the first of its scores."""
    good = "".join(f" {score[0].upper()}{score[1:]} (lower is better)." for score in run_tables.scores(opened)[:1])
    return f"Step {opened.step:,} of {opened.run.max_steps:,}.{good}"


if __name__ == "__main__":
    run(main)
