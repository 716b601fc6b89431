"""Runs opened again: found, built, and with the weights of a checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from gan.app.run import reopen
from gan.app.run.reopen import open_run
from gan.files.errors import UserError
from gan.runs import build
from tests.support import opening
from tests.support.saved import damage, read_checkpoint, write_checkpoint


def the_checkpoint(run):
    (path,) = run.glob("checkpoints/*.ckpt")
    return path


def test_a_run_is_opened_as_it_was_saved(sean_run):
    found = open_run(str(sean_run))
    saved = read_checkpoint(the_checkpoint(sean_run))
    assert (found.name, found.step, found.checkpoint) == ("sean-faces", 2, the_checkpoint(sean_run))
    assert found.folder.path == sean_run
    in_file = yaml.safe_load((sean_run / "settings.yaml").read_text())
    assert in_file["size"] == 32 and {name: found.settings[name] for name in in_file} == in_file
    game = found.run.game
    state = game.state_dict()
    assert state.keys() == saved["state_dict"].keys()
    assert all(torch.equal(state[name], weight) for name, weight in saved["state_dict"].items())
    assert not any(module.training for module in game.modules())
    assert not any(parameter.requires_grad for parameter in game.parameters())
    assert len(found.run.data.train) == 16 and len(found.run.data.val) == 4
    assert len(open_run(str(sean_run), faces=8).run.data.train) == 8


def test_a_checkpoint_that_training_replaces_meanwhile_is_not_missed(copy, monkeypatch):
    path, build = the_checkpoint(copy), reopen.build
    moves = iter([path.with_name("step-000003.ckpt")])

    def slow(*args, **settings):
        if (newer := next(moves, None)) is not None:
            path.rename(newer)
        return build(*args, **settings)

    monkeypatch.setattr(reopen, "build", slow)
    assert open_run(str(copy)).checkpoint.name == "step-000003.ckpt"


def test_data_that_have_moved_are_named_by_their_setting(folder_run, tmp_path):
    moved = shutil.copytree(folder_run, tmp_path / "runs" / folder_run.name)
    opening.rewrite(moved, data="gone")
    for damaged in ("{", "5", "[" * 100_000, '{"tram": 1}', '{"train": {"kind": "Folder"}, "val": {}}'):
        (moved / "data.json").write_text(damaged)
        with pytest.raises(UserError, match=r"cannot read '.*data.json': .*; put back what gan.fit wrote"):
            open_run(str(moved))
    (moved / "data.json").unlink()  # as runs were before
    with pytest.raises(UserError, match=r"cannot be opened: there is no folder gone.* type --data and the folder"):
        open_run(str(moved))
    assert len(open_run(str(moved), data=folder_run.parent.parent / "data").run.data.val) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"siz": 32}, "' and run sean-faces do not fit together: .*'siz' is not accepted; did you mean size"),
        ({"size": -32}, "settings.yaml' says size: '-32'; write a whole number above 0"),
        ({"width": 2}, "step-000002.ckpt has other networks than the run's settings make: .*size mismatch"),
    ],
)
def test_settings_that_do_not_fit_are_refused(copy, changes, message):
    opening.rewrite(copy, **changes)
    with pytest.raises(UserError, match=message):
        open_run(str(copy))


def test_a_checkpoint_of_another_game_or_program_is_refused(copy):
    path = the_checkpoint(copy)
    saved = read_checkpoint(path)
    write_checkpoint(path, {**saved, "game": "Pix2pix", "players": {"a": {}}})
    with pytest.raises(UserError, match="is of Pix2pix with players a; the run's settings make Sean with players enc"):
        open_run(str(copy))
    write_checkpoint(path, {"epoch": 1})
    with pytest.raises(UserError, match="is of another program with players unknown"):
        open_run(str(copy))


@pytest.mark.promise("the newest checkpoint is damaged")
def test_a_damaged_one_is_named_with_the_whole_one_before_it(copy):
    path = the_checkpoint(copy)
    other = shutil.copytree(path, path.with_name("step-000001.ckpt"))
    damage(path)
    for which in (copy, path):
        with pytest.raises(UserError, match=f"000002.ckpt cannot .* damaged: .* before it is {other}: type {other}$"):
            open_run(str(which))
    assert open_run(str(other)).checkpoint == other
    damage(other)
    with pytest.raises(UserError, match=r"000002.ckpt cannot .* damaged.*; no earlier checkpoint of the run is whole"):
        open_run(str(copy))


@pytest.mark.promise("weights or averages that are not finite")
@pytest.mark.parametrize("averaged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_weights_that_are_not_finite_are_refused_by_name(averaged, copy):
    path = the_checkpoint(copy)
    saved = read_checkpoint(path)
    weights = {name.removeprefix("generator."): weight for name, weight in saved["state_dict"].items()}
    player = build("sean-faces", **opening.WIDTHS).game.generator
    averages = {name: weights[name].clone() for name, _ in player.named_parameters()}
    saved["players"]["generator"]["ema"] = averages
    name = list(averages)[3]
    (averages if averaged else weights)[name].view(-1)[-1] = torch.nan
    write_checkpoint(path, saved)
    message = rf"000002.ckpt cannot be used: '{name}' of player 'generator' has NaN; "
    with pytest.raises(UserError, match=f"{message}no earlier checkpoint of the run is whole$"):
        open_run(str(copy))
    earlier = shutil.copytree(path, path.with_name("step-000001.ckpt"))
    with pytest.raises(UserError, match=f"{message}the newest whole checkpoint before it is .*: type {earlier}$"):
        open_run(str(copy))


def test_devices_that_are_not_there_are_refused(sean_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_run(str(sean_run), device="auto").run.game.device == torch.device("cpu")
    with pytest.raises(UserError, match="device 'cuda' is not there: this machine has 0 GPUs; type cpu"):
        open_run(str(sean_run), device="cuda")
    with pytest.raises(UserError, match="unknown device 'gpus'; type auto, cpu"):
        open_run(str(sean_run), device="gpus")


@pytest.mark.parametrize(("which", "out"), [("auto", "x" * 300), ("x" * 300, "runs"), ("x" * 300 + "/y.ckpt", "runs")])
def test_a_name_that_is_too_long_is_refused(which, out):
    with pytest.raises(UserError, match=r"^cannot look for the run '.*': File name too long: "):
        open_run(which, Path(out))
