"""`python -m gan.bench NAME`: measure on this machine, and print a table."""

import sys
from collections.abc import Callable

from gan.bench import launchers, loading, saving, speed
from gan.bench.grid import command as grid
from gan.bench.peers import command as peers
from gan.bench.sean import command as sean
from gan.files.errors import UserError, refuse
from gan.files.system import LINUX

BENCHMARKS: dict[str, Callable[[list[str]], int]] = {
    "sean": sean.main,
    "loading": loading.main,
    "saving": saving.main,
    "peers": peers.main,
    "launchers": launchers.main,
    "grid": grid.main,
    "speed": speed.main,
}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark of that name; 2 where there is none."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m gan.bench NAME [options]\n\n" + _list())
        return 0 if argv else 2
    if argv[0] not in BENCHMARKS:
        print(f"error: there is no benchmark '{argv[0]}'; there are\n{_list()}", file=sys.stderr)
        return 2
    try:
        if not LINUX:
            raise UserError("gan.bench reads memory and times from /proc, which only Linux has")
        return BENCHMARKS[argv[0]](argv[1:])
    except UserError as error:
        return refuse(error)


def _list() -> str:
    lines = ((name, sys.modules[function.__module__].__doc__.splitlines()[0]) for name, function in BENCHMARKS.items())
    return "\n".join(f"  {name:10}{line}" for name, line in lines)
