"""What cannot be written is said once, and nothing fails."""

import errno

import pytest

from gan.app.training.metrics import Spare


def full(name):
    raise OSError(errno.ENOSPC, "No space left on device", name)


def test_each_kind_of_file_is_said_once(capsys, tmp_path):
    spare = Spare()
    for step in (1, 2):
        with spare.trying(tmp_path / f"{step}.png", "pictures"):
            full("x")
        with spare.trying(tmp_path / "curves.png"):
            full("y")
    assert capsys.readouterr().err.split("\n") == [
        "",
        f"warning: {tmp_path}/1.png cannot be written (No space left on device: x); training goes on",
        "",
        f"warning: {tmp_path}/curves.png cannot be written (No space left on device: y); training goes on",
        "",
    ]


def test_a_mistake_is_none_of_it(tmp_path):
    with pytest.raises(ZeroDivisionError), Spare().trying(tmp_path):
        raise ZeroDivisionError
