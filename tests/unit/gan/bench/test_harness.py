"""How cells take turns, and what is said of one that fails."""

from operator import truediv

import pytest

from gan.bench.harness import Benchmark, Column, reason
from gan.files.errors import UserError
from strategies.processes.call_on_ranks import WorldFailed, WorldHangs
from strategies.processes.failure import ended, failed

ONE, TWO, WRONG = ("one", 1), ("two", 2), ("wrong", None)
# The machine has another speed in each round: TWO is 2, 4 and 1 times as fast as ONE, and both medians are 8.
SPEEDS = {ONE: [10.0, 1.0, 8.0], TWO: [20.0, 4.0, 8.0]}


class Toy(Benchmark):
    name, places = "toy", ("name", "ranks")
    columns = (
        Column("speed", ".1f"),
        Column("of one", ".2f", key="speed", against=truediv),
        Column("least", ".0%", key="speed", against=truediv, over=min),
        Column("kB", ".1f", 1000, "bytes"),
    )

    def add_options(self, add):
        add("--rounds", type=int, default=3)

    def cells(self):
        return [ONE, TWO, WRONG, ONE]

    def base(self, cell):
        return ONE

    def measure(self, cell):
        self.asked = [*getattr(self, "asked", []), cell]
        if cell == WRONG:
            raise UserError("nine stages\n  are many")
        return {"speed": SPEEDS[cell][len(self.found[cell])], "bytes": 1500 if cell == TWO else None}

    def heading(self):
        return "toys"


def test_cells_take_turns_and_one_that_fails_is_measured_once_and_named(capsys):
    toy = Toy([])
    assert toy.main() == 0
    assert toy.asked == [ONE, TWO, WRONG, TWO, ONE, ONE, TWO]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("3 cells, 3 rounds; load ")
    assert said[1:4] == [
        "round 1 of 3: one, 1: speed 10.0",
        "round 1 of 3: two, 2: speed 20.0, kB 1.5",
        "round 1 of 3: wrong: nine stages are many",
    ]
    assert said[-8:] == [
        "toys",
        "",
        "name   ranks    speed  of one  least   kB",
        "one        1      8.0    1.00   100%",
        "two        2      8.0    2.00   100%  1.5",
        "wrong         see (1)",
        "",
        "(1) nine stages are many",
    ]


def test_a_cell_that_fails_in_a_later_round_has_no_figures():
    toy = Toy([])
    toy.play()
    toy.why[ONE] = "it has failed in the last round"
    assert toy.value(TWO, toy.columns[1]) is None and toy.value(ONE, toy.columns[0]) is None


FAULT = "signal 11 (Segmentation fault)"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (WorldHangs(3, {}), "hangs: no end within 3 s"),
        (WorldFailed(failed(0, UserError("9\n stages"), "x")), "refused: 9 stages"),
        (WorldFailed(failed(1, RuntimeError("no paint"), "x")), "fails: RuntimeError: no paint"),
        (WorldFailed(ended(0, 7, "host", -11)), f"fails: rank 0 was ended by {FAULT}; is there too little memory?"),
        (ValueError("no\nmore"), "fails: ValueError: no"),
    ],
)
def test_a_failure_is_one_line(error, said):
    assert reason(error) == said
