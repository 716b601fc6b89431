"""The benchmark of speed: what it counts, and its table."""

import pytest
import torch
from torch import nn

from gan.bench import speed
from gan.bench.device import Counter, multiplications
from gan.bench.speed import SpeedBenchmark, Way
from gan.files.errors import UserError


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


def test_a_run_is_counted_and_timed_in_the_same_steps():
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


def test_a_number_format_that_is_not_measured_is_refused():
    with pytest.raises(UserError, match="cannot measure --precisions 64; type one or both of 32-true,bf16-mixed"):
        SpeedBenchmark(["--precisions", "64"])
