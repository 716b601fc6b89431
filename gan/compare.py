"""`python -m gan.compare RUN RUN ...`: several runs on one page, with what differs on top."""

from pathlib import Path

from jsonargparse import Namespace

from gan.app.command import command, working
from gan.app.outputs import run, say
from gan.app.run import command_line, options
from gan.app.run.parser import Parser
from gan.files.errors import UserError, table

EXAMPLES = """examples:
  python -m gan.compare runs/001-r3gan-faces runs/002-r3gan-faces
  python -m gan.compare runs/0* -o all.html
  python -m gan.compare runs/001-sean-faces/checkpoints/*      how one run has changed
"""


@command
def main(argv: list[str]) -> None:
    request = parse(argv)
    with working():
        from gan.app.page.compared import comparison_page, open_to_compare, over_seeds
        from gan.app.page.table import write

    opened = [open_to_compare(which, request.device) for which in request.runs]
    path = request.file or opened[0].folder.path.parent / "compare.html"
    write(path, lambda: comparison_page(opened), "-o")
    for title, scores in over_seeds(opened).items():
        say(title, *table([*scores.items()]))
    say(f"open {path} in a browser ({path.stat().st_size / 1e6:.1f} MB)")


def parse(argv: list[str]) -> Namespace:
    what = (
        "Show runs on one page: settings that differ, scores, curves over each other, pictures of the same seeds or "
        "held-out inputs side by side."
    )
    parser = Parser("python -m gan.compare", "RUN RUN ... [-o FILE]", what, EXAMPLES)
    what = "a run's folder, or a checkpoint inside one; two or more"
    parser.add_argument("runs", metavar="RUN", nargs="*", type=str, help=what)
    what = "where to write; default: compare.html beside the first run's folder"
    parser.option("-o --file", Path, what, metavar="FILE")
    options.add_device(parser)
    request = parser.parse_args(command_line.arguments(argv))
    if len(request.runs) < 2:
        alone = f"'{request.runs[0]}' alone cannot be compared; " if request.runs else ""
        raise UserError(f"{alone}type two runs or more")
    return request


if __name__ == "__main__":
    run(main)
