"""`python samples/gallery.py [RUN]`: what a run made, as one page that opens in any browser, without a server.

The page is a single file with its pictures in it; it loads nothing and can be mailed or hung up anywhere.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gan.errors import UserError, refuse
from gan.painting import run_tables
from gan.painting.reopen import Opened, open_run
from gan.painting.table import Charts, Table

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Section:
    """A part of the page: a link in its head, a title and tables, perhaps one that is folded under a name."""

    link: str
    title: str
    tables: tuple[Callable[[Opened], Table | Charts], ...]
    folded: tuple[str, Callable[[Opened], Table]] | None = None


def between(run: Opened) -> Table:
    """The edit that the notebook offers, once: towards another picture where there is one."""
    return run_tables.edit(run, other=1 if len(run.run.data.val) > 1 else None)


SECTIONS = (
    Section("training", "What it learned to make", (run_tables.over_time,)),
    Section("masks", "Masks beside pictures", (run_tables.masks, run_tables.legend)),
    Section("styles", "One region in another's style", (run_tables.exchange,)),
    Section("between", "From one style to another", (between,)),
    Section("copies", "Are they copies?", (run_tables.nearest,)),
    Section("curves", "Curves", (run_tables.curves,)),
    Section("run", "The run", (run_tables.facts,), ("Every setting", run_tables.settings)),
)


def main(argv: list[str] | None = None) -> int:
    """The command: 0 when the page is written, 2 with one clear message when it could not be."""
    parser = argparse.ArgumentParser(prog="python samples/gallery.py", description=__doc__.split("\n\n")[1])
    parser.add_argument("run", nargs="?", default="auto", help="a run's folder or a checkpoint; default the newest run")
    parser.add_argument("--out", type=Path, help="the page, or the folder to put it in; default the run's folder")
    parser.add_argument("--data", help="where the run's pictures are now, if they have moved")
    options = parser.parse_args(argv)
    try:
        run = open_run(options.run, device="auto", **({"data": options.data} if options.data else {}))
        path = place(options.out, run)
        write(path, lambda: page(run))
    except UserError as error:
        return refuse(error)
    print(f"open {path} in a browser ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def place(out: Path | None, run: Opened) -> Path:
    """Where the page goes: a file is one that ends like a page."""
    if out is None:
        return run.folder.path / "gallery.html"
    return out if out.suffix in (".html", ".htm") else out / f"{run.folder.path.name}.html"


def write(path: Path, make: Callable[[], str]) -> None:
    """Write the page whole or not at all, and make it only where it can be written."""
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}; choose a place with --out") from error
    try:
        part.write_text(make(), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def page(run: Opened) -> str:
    """The whole page; sections that this game has nothing for are left out."""
    title = run.folder.path.name
    sections = {section: [table(run) for table in section.tables] for section in SECTIONS}
    sections = {section: tables for section, tables in sections.items() if any(map(drawn, tables))}
    links = "".join(f'<a href="#{section.link}">{escape(section.title)}</a>' for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="{escape(run_tables.first_sentence(run))}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{(HERE / "gallery.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="lede">{escape(run_tables.first_sentence(run))}</p>
<p>{escape(_standing(run))}</p>
<nav>{links}</nav>
</header>
<main>
{"".join(_section(section, tables, run) for section, tables in sections.items())}</main>
<footer>Made by <code>python samples/gallery.py</code> from <code>{escape(run.checkpoint.name)}</code>.
Click a picture to enlarge it; the arrow keys go on to its neighbours.</footer>
<dialog id="large" aria-label="Enlarged picture"></dialog>
<script>
{(HERE / "gallery.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _standing(run: Opened) -> str:
    """How far the run is and how good, in the first of its scores."""
    good = "".join(f" {score[0].upper()}{score[1:]} (lower is better)." for score in run_tables.scores(run)[:1])
    return f"Step {run.step:,} of {run.run.max_steps:,}.{good}"


def drawn(table: Table | Charts) -> bool:
    """Whether there is more to it than words on what is missing."""
    return bool(table.drawings if isinstance(table, Charts) else table.rows)


def _section(section: Section, tables: list[Table | Charts], run: Opened) -> str:
    inside = "\n".join(_slider(table) + table.html() for table in tables if drawn(table))
    if section.folded:
        name, table = section.folded
        inside += f"\n<details><summary>{escape(name)}</summary>{table(run).html()}</details>"
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
    sys.exit(main())
