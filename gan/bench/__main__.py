"""`python -m gan.bench NAME`: measure on this machine, and print a table."""

from gan.app.command import command
from gan.app.outputs import run
from gan.bench.grid import GridBenchmark
from gan.bench.harness import Benchmark
from gan.bench.peers import PeersBenchmark
from gan.bench.sean import SeanBenchmark
from gan.bench.speed import SpeedBenchmark
from gan.files.errors import UserError
from gan.files.system import LINUX

BENCHMARKS: dict[str, type[Benchmark]] = {
    each.name: each for each in (SeanBenchmark, PeersBenchmark, GridBenchmark, SpeedBenchmark)
}


@command
def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m gan.bench NAME [options]\n\n" + _list())
        return 0 if argv else 2
    if argv[0] not in BENCHMARKS:
        raise UserError(f"there is no benchmark '{argv[0]}'; there are\n{_list()}")
    if not LINUX:
        raise UserError("gan.bench reads memory and times from /proc, which only Linux has")
    return BENCHMARKS[argv[0]](argv[1:]).main()


def _list() -> str:
    return "\n".join(f"  {name:10}{benchmark.about.splitlines()[0]}" for name, benchmark in BENCHMARKS.items())


if __name__ == "__main__":
    run(main)
