"""What is said and what is refused where a run is resumed with other settings."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from gan.app.run import options
from gan.app.run.folder import RunFolder
from gan.app.run.resumed import Resumed
from gan.files.checkpoint import Share
from gan.files.errors import UserError
from strategies.checkpoint.writing import save

NAME = "sean-folder"


@pytest.fixture
def trained(tmp_path):
    """A folder with the settings of a run, and a checkpoint of a network of width 3."""
    folder = RunFolder(tmp_path / "runs" / "001-sean-folder")
    folder.path.mkdir(parents=True)
    save(
        folder.checkpoint(8), {"state_dict": {"net.weight": Share.whole(torch.zeros(3, 2)), "net.bias": torch.zeros(3)}}
    )
    return folder


def resumed(folder, typed=(), **saved):
    """The run resumed with what is typed, in place of the saved settings."""
    settings, _ = options.parse([NAME, "--batch-size", "4", "--data", "mine"])
    kept = {**yaml.safe_load(options.dump(settings, NAME)), **saved}
    folder.settings.write_text(yaml.safe_dump(kept))
    now, where = options.parse(["--resume", str(folder.path), *typed])
    return Resumed(where[0], NAME, options.run_settings(now))


def game(width):
    return SimpleNamespace(game=nn.ModuleDict({"net": nn.Linear(2, width)}))


def test_nothing_is_said_where_nothing_has_changed(trained):
    again = resumed(trained)
    assert str(again) == "" and again.changed == []
    again.check(game(3), trained.checkpoint(8))


def test_what_has_changed_is_said_in_one_line(trained):
    typed = [
        "--batch-size",
        "8",
        "--generator-rate",
        "0.1",
        "--data",
        "moved",
        "--max-steps",
        "9",
        "--sample-every",
        "2",
    ]
    again = resumed(trained, typed)
    assert str(again) == (
        "the run was trained with --data mine --batch-size 4 --max-steps None --generator-rate 0.0001, "
        "and goes on with --data moved --batch-size 8 --max-steps 9 --generator-rate 0.1"
    )
    again.check(game(3), trained.checkpoint(8))


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (
            ["--width", "8"],
            "The run was trained with --width 64, and goes on with --width 8; leave out what changes them",
        ),
        ([], "Its code or its data have changed"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_settings_that_have_changed(typed, why, trained):
    with pytest.raises(UserError) as caught:
        resumed(trained, typed).check(game(4), trained.checkpoint(8))
    assert str(caught.value) == (
        f"the checkpoint's networks are of other sizes: 'net.weight' is 3 x 2 in step-000008.ckpt and 4 x 2 now. {why}"
    )


@pytest.mark.parametrize(
    ("saved", "typed", "advice"),
    [
        ({}, [], "; 'mine' is relative to {}, where the run was started: type --data {}/mine"),
        ({"out": "other/runs"}, [], "; if its data have moved, type --data and their folder"),
        ({"data": "/nowhere/mine"}, [], "; if its data have moved, type --data and their folder"),
        ({}, ["--data", "typed"], ""),
        ({"data": os.getcwd()}, [], ""),
    ],
)
def test_data_that_are_not_there_are_named_with_where_they_were(saved, typed, advice, trained, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = resumed(trained, typed, **saved).where_data_were(UserError("no pictures"))
    assert str(found) == "no pictures" + advice.format(tmp_path, tmp_path)


def test_settings_have_the_whole_path_of_data_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for typed, kept in (("mine", str(tmp_path / "mine")), ("absent", "absent")):
        settings, _ = options.parse([NAME, "--data", typed])
        assert yaml.safe_load(options.dump(settings, NAME))["data"] == kept
        assert settings.data == typed
