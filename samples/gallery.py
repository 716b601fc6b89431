"""`python samples/gallery.py [RUN]`: what a run made, as one page that opens in any browser, without a server.

The page is a single file with its pictures in it; it loads nothing else, so it can be mailed or put on any server.
"""

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gan.app.command import command
from gan.app.fitting import card
from gan.app.outputs import run
from gan.app.page import compared, run_tables
from gan.app.page.table import Part, Piece, document, write
from gan.app.run.parser import Parser
from gan.app.run.reopen import SavedRun, open_run


@command
def main(argv: list[str]) -> None:
    parser = Parser("python samples/gallery.py", description=__doc__.split("\n\n")[1])
    parser.add_argument("run", nargs="?", default="auto", help="a run's folder or a checkpoint; default the newest run")
    parser.add_argument("--out", type=Path, help="the page, or the folder to put it in; default the run's folder")
    parser.add_argument("--data", help="where the run's pictures are now, if they have moved")
    options = parser.parse_args(argv)
    opened = open_run(options.run, device="auto", data=options.data)
    path = place(options.out, opened)
    write(path, lambda: page(opened), "--out")
    print(f"open {path} in a browser ({path.stat().st_size / 1e6:.1f} MB)")


def place(out: Path | None, opened: SavedRun) -> Path:
    """Where the page goes; `out` is a file if it ends in .html or .htm, else a folder."""
    if out is None:
        return opened.folder.path / "gallery.html"
    return out if out.suffix in (".html", ".htm") else out / f"{opened.folder.path.name}.html"


def page(opened: SavedRun) -> str:
    """The whole page; parts that this game has nothing for, or whose data are gone, are left out."""

    def of_data(*tables: Callable[[SavedRun], Piece]) -> list[Piece]:
        return [] if opened.gone else [table(opened) for table in tables]

    parts = [
        Part("training", "What it learned to make", [run_tables.over_time(opened)]),
        Part("sounds", "What it sounds like", of_data(run_tables.sounds)),
        Part("masks", "Masks beside pictures", of_data(run_tables.masks, run_tables.legend)),
        Part("styles", "One region in another's style", of_data(run_tables.exchange)),
        Part("videos", "Videos", [run_tables.videos(opened)]),
        Part("copies", "Are they copies?", of_data(run_tables.nearest)),
        Part("scores", "Scores", [compared.scores([opened], [""])]),
        Part("health", "Is it well?", [run_tables.health(opened)]),
        Part("curves", "Curves", [run_tables.curves(opened)]),
        Part("run", "The run", [run_tables.facts(opened)], ("Every setting", run_tables.settings(opened))),
    ]
    made = f"<code>python samples/gallery.py</code> from <code>{escape(opened.checkpoint.name)}</code>"
    lede = card.first_sentence(opened.settings["run"])
    standing = f"Step {opened.step:,} of {opened.run.max_steps:,}."
    for each in card.scores(opened.folder, opened.run, opened.step)[:1]:
        standing += f" {each.name[0].upper()}{each.name[1:]}: {each.value} ({each.how})."
    return document(opened.folder.path.name, lede, standing, parts, made)


if __name__ == "__main__":
    run(main)
