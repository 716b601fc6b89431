"""The benchmark of launchers starts ranks and prints ratios."""

import re

import pytest

from gan.bench import launchers
from gan.files.errors import UserError


@pytest.mark.slow
def test_each_launcher_has_a_line_and_the_first_is_one(capsys, monkeypatch):
    few = {name: command for name, command in launchers.LAUNCHERS.items() if name in ("popen", "fork")}
    monkeypatch.setattr(launchers, "LAUNCHERS", few)
    assert launchers.main(["--rounds", "1", "--steps", "5"]) == 0
    said = capsys.readouterr().out
    rows = dict(re.findall(r"^(\w+) +((?:[\d.]+ *){4})$", said, re.MULTILINE))
    assert list(rows) == ["popen", "fork"]
    assert [float(each) for each in rows["popen"].split()][1::2] == [1.0, 1.0]
    assert all(float(each) > 0 for row in rows.values() for each in row.split())


def test_means_are_of_all_rounds(capsys, monkeypatch):
    once = [(4.0, 10.0), (8.0, 30.0), (2.0, 5.0), (2.0, 15.0)]
    again = [(6.0, 10.0), (10.0, 30.0), (2.0, 5.0), (2.0, 15.0)]
    figures = iter([*once, *again])
    monkeypatch.setattr(launchers, "_measure", lambda command, steps: next(figures))
    assert launchers.main(["--rounds", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert rows[0] == ["popen", "5.0", "1.00", "10.0", "1.00"]
    assert rows[1] == ["spawn", "9.0", "1.80", "30.0", "3.00"]
    assert rows[2][0::2] == ["fork", "0.40", "0.50"]


def test_a_start_that_fails_is_said(monkeypatch):
    with pytest.raises(UserError, match=r"-c raise SystemExit.* failed"):
        launchers._measure(("-c", "raise SystemExit('no')"), 1)
