"""The benchmark of speed: what it counts, and its table."""

import pytest
import torch
from torch import nn

from gan.bench import speed
from gan.bench.harness import Multiplications
from gan.bench.speed import Speed, Way
from gan.files.errors import UserError


def test_multiplications_are_counted_also_where_a_gradient_is_differentiated():
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    x = torch.ones(5, 4, requires_grad=True)
    with Multiplications() as forward:
        score = net(x).sum()
    assert forward.count == 2 * 5 * (4 * 8 + 8)
    with Multiplications() as both:
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        slope.square().sum().backward()
    assert both.count > forward.count


def test_a_run_is_counted_and_timed_in_the_same_steps():
    settings = {"batch_size": 4, "faces": 8, "held_out": 2, "size": 16, "width": 2}
    found = [speed.measure("r3gan-faces", settings, Way("32-true", channels_last=last), 1) for last in (False, True)]
    assert found[0].flops == found[1].flops > 0
    assert all(each.pictures == pytest.approx(4 / each.seconds) and each.of_limit > 0 for each in found)


def test_the_table_compares_with_the_first_way_that_works():
    fast, slow = Speed(40.0, 0.1, 10, 200.0, 2**21, "here"), Speed(10.0, 0.4, 10, 100.0, 2**20, "here")
    found = {Way("32-true"): "OutOfMemoryError: x", Way("bf16-mixed"): slow, Way("bf16-mixed", True, True): fast}
    assert speed.rows(found) == [
        ("32-true", "as it is", "OutOfMemoryError: x", "", "", ""),
        ("bf16-mixed", "as it is", "10.0", "1.00", "25%", "1"),
        ("bf16-mixed", "compiled, channels last", "40.0", "4.00", "50%", "2"),
    ]


def test_a_way_that_fails_says_why_and_the_others_are_measured(monkeypatch, capsys, tmp_path):
    def measure(run, settings, way, steps):
        if way.compiled:
            raise UserError("no compiler")
        return Speed(10.0, 0.4, 10, 100.0, 2**20, "a small machine")

    class Here:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, *args):
            self.call = lambda: measure(*args)
            return self

        def result(self):
            return self.call()

    monkeypatch.setattr(speed, "ProcessPoolExecutor", Here)
    out = tmp_path / "speed.md"
    out.write_text("# Speeds\n")
    argv = ["r3gan-faces", "--steps", "2", "--precisions", "bf16-mixed", "--write", str(out)]
    assert speed.main(argv) == 0
    written = out.read_text()
    assert written.startswith("# Speeds\n\n## a small machine, torch ")
    assert "gan.bench speed r3gan-faces --steps 2" in written
    assert "| bf16-mixed | compiled | UserError: no compiler |" in written
    assert "| bf16-mixed | channels last | 10.0 | 1.00 | 25% | 1 |" in written
    assert "bf16-mixed, as it is: 10.0 pictures/s" in capsys.readouterr().out


def test_a_number_format_that_is_not_measured_is_refused():
    with pytest.raises(UserError, match="cannot measure --precisions 64; type one or both of 32-true,bf16-mixed"):
        speed.main(["--precisions", "64"])
