"""How rounds are timed."""

from functools import cache
from operator import truediv

import pytest
import torch
from torch import nn

from gan.bench import speed
from gan.bench.device import Counter, multiplications
from gan.bench.harness import Benchmark, Column, in_world, reason
from gan.bench.speed import SpeedBenchmark, Way
from gan.files.errors import UserError
from strategies.processes.call_on_ranks import WorldFailed, WorldHangs
from strategies.processes.failure import ended, failed

ONE, TWO, WRONG = ("one", 1), ("two", 2), ("wrong", None)
SPEEDS = {ONE: [10.0, 1.0, 8.0], TWO: [20.0, 4.0, 8.0]}  # the machine has another speed in each round


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


def test_two_cells_are_compared_within_each_round():
    toy = Toy([])
    toy.play()
    assert toy.value(TWO, toy.columns[1]) == 2.0  # of 2, 4 and 1; that of the medians is 1
    assert toy.value(TWO, toy.columns[2]) == 1.0
    toy.why[ONE] = "it has failed in the last round"
    assert toy.value(TWO, toy.columns[1]) is None and toy.value(ONE, toy.columns[0]) is None
    assert toy.table()[1][2:] == ["see (2)", "", "", ""]


def test_without_any_figures_it_fails():
    toy = Toy(["--rounds", "1"])
    toy.cells = lambda: [WRONG]
    assert toy.main() == 1


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


def threads_and_name(name):
    return torch.get_num_threads(), name


def test_a_world_has_the_threads_that_are_asked_for():
    assert in_world(threads_and_name, "a", threads=1, limit=60) == [(1, "a")]


# ---- speed ----


def test_multiplications_are_counted_also_where_a_gradient_is_differentiated():
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    x = torch.ones(5, 4, requires_grad=True)
    with Counter(multiplications) as forward:
        score = net(x).sum()
    assert forward.total == 2 * 5 * (4 * 8 + 8)
    with Counter(multiplications) as both:
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        slope.square().sum().backward()
    assert both.total > forward.total


@pytest.mark.slow
def test_a_run_is_counted_and_timed_in_the_same_steps(monkeypatch):
    monkeypatch.setattr(speed, "convolution_rate", cache(speed.convolution_rate))  # which takes seconds
    settings = {"batch_size": 4, "faces": 8, "held_out": 2, "size": 16, "width": 2}
    ways = Way("32-true"), Way("32-true", "channels last")
    found = [speed.measure("r3gan-faces", settings, way, 1) for way in ways]
    assert found[0]["flops"] == found[1]["flops"] > 0
    assert all(each["pictures/s"] > 0 and each["of limit"] > 0 for each in found)


def test_a_way_that_fails_says_why_and_the_others_are_compared(monkeypatch, capsys, tmp_path):
    rates = {"as it is": 10.0, "channels last": 40.0}

    def in_world(measure, run, settings, way, steps, device):
        if "compiled" in way.title:
            raise UserError("no compiler")
        return [{"pictures/s": rates[way.title], "of limit": 0.25, "peak MB": 2**20, "place": "a small machine"}]

    monkeypatch.setattr(speed, "in_world", in_world)
    out = tmp_path / "speed.md"
    out.write_text("# Speeds\n")
    argv = ["r3gan-faces", "--steps", "2", "--precisions", "bf16-mixed", "--write", str(out)]
    assert SpeedBenchmark(argv).main() == 0
    written = out.read_text()
    assert written.startswith("# Speeds\n\n## a small machine, torch ")
    assert "gan.bench speed r3gan-faces --steps 2" in written
    assert "| bf16-mixed | as it is | 10.0 | 1.00 | 25% | 1 |" in written
    assert "| bf16-mixed | channels last | 40.0 | 4.00 | 25% | 1 |" in written
    assert "| bf16-mixed | compiled | see (1) |" in written and written.endswith("\n\n(1) no compiler\n")
    assert "bf16-mixed, as it is: pictures/s 10.0" in capsys.readouterr().out
