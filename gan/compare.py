"""`python -m gan.compare RUN RUN ...`: several runs on one page, with what differs on top."""

from pathlib import Path

from jsonargparse import Namespace

from gan.app.command import command, working
from gan.app.outputs import run, say
from gan.app.run import options
from gan.app.run.parser import Parser
from gan.files.errors import UserError

EXAMPLES = """examples:
  python -m gan.compare runs/001-r3gan-faces runs/002-r3gan-faces
  python -m gan.compare runs/0* -o all.html
  python -m gan.compare runs/001-sean-faces/checkpoints/*      how one run has changed
"""


@command
def main(argv: list[str]) -> None:
    """Open the runs, and write the page."""
    request = parse(argv)
    with working():
        from gan.app.page.compared import look, page
        from gan.app.page.document import write

    opened = [look(which, request.device) for which in request.runs]
    path = request.file or opened[0].folder.path.parent / "compare.html"
    write(path, lambda: page(opened), "-o")
    say(f"open {path} in a browser ({path.stat().st_size / 1e6:.1f} MB)")


def parse(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="python -m gan.compare",
        usage="python -m gan.compare RUN RUN ... [-o FILE]",
        description="Show runs on one page: settings that differ, scores, curves over each other, pictures of the same "
        "seeds or held-out inputs side by side.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=str, help="a run's folder, or a checkpoint inside one; two or more")
    what = "where to write; default: compare.html beside the first run's folder"
    add("-o", "--file", metavar="FILE", type=Path | None, default=None, help=what)
    add("--device", type=str, default="auto", help="what to compute on: auto, cpu, cuda or another device here")
    request = parser.parse_args(options.arguments(argv))
    if len(request.runs) < 2:
        raise UserError(f"'{request.runs[0]}' alone cannot be compared; type two runs or more")
    return request


if __name__ == "__main__":
    run(main)
