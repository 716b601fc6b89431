"""The benchmark of launchers starts ranks and prints ratios."""

import re

import pytest

from gan.bench import launchers
from gan.bench.launchers import LaunchersBenchmark
from gan.files.errors import UserError


@pytest.mark.slow
def test_each_launcher_has_a_line_and_the_first_is_one(capsys, monkeypatch):
    few = {name: command for name, command in launchers.LAUNCHERS.items() if name in ("popen", "fork")}
    monkeypatch.setattr(launchers, "LAUNCHERS", few)
    assert LaunchersBenchmark(["--rounds", "1", "--steps", "5"]).main() == 0
    said = capsys.readouterr().out
    rows = dict(re.findall(r"^(\w+) +((?:[\d.]+ *){4})$", said, re.MULTILINE))
    assert list(rows) == ["popen", "fork"]
    assert [float(each) for each in rows["popen"].split()][1::2] == [1.0, 1.0]
    assert all(float(each) > 0 for row in rows.values() for each in row.split())


def test_figures_are_medians_and_a_start_that_fails_is_named(capsys, monkeypatch):
    starts = {"popen": (4.0, 6.0, 5.0), "spawn": (8.0, 6.0, 10.0), "torchrun": (2.0, 3.0, 2.5)}
    starts = {name: iter(seconds) for name, seconds in starts.items()}
    words = {words: name for name, words in launchers.LAUNCHERS.items()}

    def measure(command, steps):
        if words[command] == "fork":
            raise UserError("fork failed:\nno")
        return {"start, s": next(starts[words[command]]), "steps/s": 10.0}

    monkeypatch.setattr(launchers, "measure", measure)
    assert LaunchersBenchmark(["--rounds", "3"]).main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-6:]]
    assert rows[0] == ["popen", "5.0", "1.00", "10.0", "1.00"]
    assert rows[1] == ["spawn", "8.0", "2.00", "10.0", "1.00"]
    assert rows[2] == ["fork", "see", "(1)"]
    assert rows[3] == ["torchrun", "2.5", "0.50", "10.0", "1.00"]
    assert rows[5] == ["(1)", "fork", "failed:", "no"]


def test_a_start_that_fails_is_said():
    with pytest.raises(UserError, match=r"-c raise SystemExit.* failed"):
        launchers.measure(("-c", "raise SystemExit('no')"), 1)
