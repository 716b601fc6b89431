"""A damaged checkpoint that is taken in silence is reported, and so is a lost one. The commands here are made up."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.faults import case
from tests.faults.case import Player
from tests.faults.kinds.checkpoints import give
from tests.faults.known import _bits

RIGHT, OTHER = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.0000002])}
FOLDER = Path("runs/001-f/checkpoints")

pytestmark = pytest.mark.slow  # `make test` has a small part of `make faults`: test_some.py


def exports(state, step=2, status=0):
    path = Path(f"runs/001-f/export/step-{step:06d}/generator.safetensors")
    path.parent.mkdir(parents=True)
    save_file(state, path)
    print(path)
    return status


def refuses():
    os.write(2, b"error: step-000002.ckpt is damaged\n")
    return 2


def loses():
    shutil.rmtree(FOLDER / "step-000001.ckpt")
    return exports(RIGHT)


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    """What is said of an export, if it does as `main` does."""
    for step in (1, 2):
        folder = tmp_path / "known" / "faces" / FOLDER / f"step-{step:06d}.ckpt"
        folder.mkdir(parents=True)
        (folder / "values.json").write_text(f"{step}")
        (tmp_path / "known" / f"faces-export-{step}").write_bytes(pickle.dumps({"generator.safetensors": _bits(RIGHT)}))

    def find(main, which="auto"):
        def kind(case):
            case.copy("faces")
            give(case, "faces", "export", which, FOLDER / "step-000001.ckpt")

        monkeypatch.setitem(case.COMMANDS, "export", lambda words: main())
        return Player(kind, "control", 0, 0, tmp_path / "known").end().wrong

    return find


def test_right_weights_and_a_refusal_are_right(wrong):
    assert wrong(lambda: exports(RIGHT)) == []
    assert wrong(lambda: exports(RIGHT, 1)) == []
    assert wrong(refuses) == []


def test_another_bit_in_what_it_makes_is_reported(wrong):
    assert wrong(lambda: exports(OTHER)) == [
        "nothing taken: a damaged checkpoint was taken in silence: export from step 2 is another one"
    ]


def test_another_checkpoint_than_was_asked_for_is_reported(wrong):
    (line,) = wrong(lambda: exports(RIGHT, 1), which=FOLDER / "step-000002.ckpt")
    assert "was asked for, and step 1 was taken" in line


def test_a_whole_checkpoint_that_is_gone_is_reported(wrong):
    assert any("is no longer whole, and there is no newer one" in line for line in wrong(loses))


def test_an_end_without_a_result_is_reported(wrong):
    assert any("made nothing that can be compared" in line for line in wrong(lambda: 0))
