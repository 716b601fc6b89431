"""`python samples/gallery.py [RUN]`: what a run made, as one page that opens in any browser, without a server.

The page is a single file with its pictures in it; it loads nothing else, so it can be mailed or put on any server.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gan.app.outputs import run
from gan.app.page import run_tables, style_tables
from gan.app.page.table import Charts, Table
from gan.app.painting.reopen import SavedRun, open_run
from gan.app.run.parser import Parser
from gan.files.disk import whole_file
from gan.files.errors import UserError, refuse

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Section:
    """A part of the page: the name of its link, a title and tables. `folded` is a table to open, and its name."""

    link: str
    title: str
    tables: tuple[Callable[[SavedRun], Table | Charts], ...]
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
    Section("copies", "Are they copies?", (run_tables.nearest,)),
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
        write(path, lambda: page(opened))
    except UserError as error:
        return refuse(error)
    print(f"open {path} in a browser ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def place(out: Path | None, opened: SavedRun) -> Path:
    """Where the page goes; `out` is a file if it ends in .html or .htm, else a folder."""
    if out is None:
        return opened.folder.path / "gallery.html"
    return out if out.suffix in (".html", ".htm") else out / f"{opened.folder.path.name}.html"


def write(path: Path, make: Callable[[], str]) -> None:
    """Write the page, which takes a while to make: first see whether it can be written."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = stack.enter_context(whole_file(path))
        except OSError as error:
            raise UserError(f"cannot write '{path}': {error.strerror}; choose a place with --out") from error
        part.write_text(make(), encoding="utf-8")


def page(opened: SavedRun) -> str:
    """The whole page; sections that this game has nothing for are left out."""
    title = opened.folder.path.name
    sections = {section: [table(opened) for table in section.tables] for section in SECTIONS}
    sections = {section: tables for section, tables in sections.items() if any(map(drawn, tables))}
    links = "".join(f'<a href="#{section.link}">{escape(section.title)}</a>' for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="{escape(run_tables.first_sentence(opened))}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{(HERE / "gallery.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="lede">{escape(run_tables.first_sentence(opened))}</p>
<p>{escape(_standing(opened))}</p>
<nav>{links}</nav>
</header>
<main>
{"".join(_section(section, tables, opened) for section, tables in sections.items())}</main>
<footer>Made by <code>python samples/gallery.py</code> from <code>{escape(opened.checkpoint.name)}</code>.
Click a picture to enlarge it; the arrow keys go on to its neighbours.</footer>
<dialog id="large" aria-label="Enlarged picture"></dialog>
<script>
{(HERE / "gallery.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _standing(opened: SavedRun) -> str:
    """How far the run is, and the first of its scores."""
    good = "".join(f" {score[0].upper()}{score[1:]} (lower is better)." for score in run_tables.scores(opened)[:1])
    return f"Step {opened.step:,} of {opened.run.max_steps:,}.{good}"


def drawn(table: Table | Charts) -> bool:
    """Whether there is more in it than a note on what is missing."""
    return bool(table.drawings if isinstance(table, Charts) else table.rows)


def _section(section: Section, tables: list[Table | Charts], opened: SavedRun) -> str:
    inside = "\n".join(_slider(table) + table.html() for table in tables if drawn(table))
    if section.folded:
        name, table = section.folded
        inside += f"\n<details><summary>{escape(name)}</summary>{table(opened).html()}</details>"
    return f'<section id="{section.link}">\n<h2>{escape(section.title)}</h2>\n{inside}\n</section>\n'


def _slider(table: Table | Charts) -> str:
    """A slider over the moments of a table; without scripts the page shows the last one."""
    if isinstance(table, Charts) or len(table.moments) < 2:
        return ""
    last = len(table.moments) - 1
    return (
        f'<form class="moments" data-names="{escape(json.dumps(list(table.moments)))}" hidden>'
        f'<button type="button">Play</button><input type="range" min="0" max="{last}" value="{last}" '
        f'aria-label="step of training"><output>{escape(table.moments[last])}</output></form>'
    )


if __name__ == "__main__":
    run(main)
