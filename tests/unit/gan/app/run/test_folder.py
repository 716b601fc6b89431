"""The folder of a run, and who trains it."""

import errno
import multiprocessing
import os
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from gan.app.run import folder, options, settings_file
from gan.app.run.folder import RunFolder
from gan.app.run.resumed import Resumed, where_data_are
from gan.files.errors import UserError
from gan.files.system import fcntl
from tests.support.posix import not_on_windows


def make(out, name, *checkpoints):
    run = folder.create(out, name)
    run.settings.write_text(f"run: {name}\n")
    run.checkpoints.mkdir()
    for age, checkpoint in enumerate(checkpoints):
        (run.checkpoints / checkpoint).mkdir()
        os.utime(run.checkpoints / checkpoint, (1000 + age, 1000 + age))
    return run


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write to '.*file': .*; choose a folder with --out"):
        folder.create(tmp_path / "file", "sean")


def test_a_new_folder_is_empty(tmp_path):
    assert not list(folder.create(tmp_path, "hifigan").path.iterdir())  # a dry run of sounds draws nothing


def test_a_file_in_place_of_a_run_is_answered_with_what_scores_and_trains(tmp_path):
    (tmp_path / "net.pkl").touch()
    with pytest.raises(UserError, match=r"is not of a run: .* gan\.fit RUN --from .*net\.pkl --score-every 1$"):
        folder.find(str(tmp_path / "net.pkl"), tmp_path, None)


def test_auto_is_no_older_run_where_the_newest_has_lost_its_settings(tmp_path):
    make(tmp_path, "sean", "step-000003.ckpt")
    make(tmp_path, "pix2pix", "step-000003.ckpt").settings.unlink()
    for name in (None, "pix2pix"):
        with pytest.raises(UserError, match=r"002-pix2pix' has lost its settings.yaml; put it back"):
            folder.find("auto", tmp_path, name)
    assert folder.find("auto", tmp_path, "sean")[0].path.name == "001-sean"


def test_a_checkpoint_of_a_trainers_own_is_of_no_run(tmp_path):
    own = tmp_path / "lightning_logs" / "version_3" / "checkpoints" / "epoch=1-step=10.ckpt"
    own.mkdir(parents=True)
    with pytest.raises(UserError, match=r"is not of a run: .*; a Trainer's .* MyGame.load_from_checkpoint\('.*=10"):
        folder.find(str(own), tmp_path, None)


def test_the_newest_checkpoint_is_of_the_latest_step_whenever_it_was_written(tmp_path):
    copies = ("step-000300-keep.ckpt", "step-0000400.ckpt", "step-500.ckpt", "best.ckpt")
    run = make(tmp_path, "sean", "step-1000000.ckpt", "step-999999.ckpt", "step-000020.ckpt", *copies)
    assert run.steps() == [20, 999_999, 1_000_000]
    assert run.newest_checkpoint() == run.checkpoint(1_000_000)
    assert make(tmp_path, "mine", "best.ckpt").newest_checkpoint() is None
    assert folder.find(str(run.checkpoints / "best.ckpt"), tmp_path, None) == (run, run.checkpoints / "best.ckpt")


def test_a_run_that_is_refused_or_cannot_be_filled_leaves_nothing_but_one_with_a_checkpoint_stays(tmp_path):
    gone, kept = make(tmp_path, "gone"), make(tmp_path, "kept", "step-000001.ckpt")
    gone.discard()
    kept.discard()
    assert not gone.path.exists()
    assert kept.path.exists()
    run = folder.create(tmp_path, "sean")
    run.game.mkdir()
    with pytest.raises(UserError, match=r"cannot write to '.*-sean': Is a directory; choose a folder with --out"):
        run.fill({run.settings: "run: sean", run.game: "players"})
    assert not run.path.exists()


# ---- lock ----


fork = None if fcntl is None else multiprocessing.get_context("fork")


def trains(run, here):
    with folder.training(run):
        here.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process, which trains the run."""
    if fork is None:
        pytest.skip("Windows forks no process")
    here = fork.Event()
    process = fork.Process(target=trains, args=(RunFolder(tmp_path), here))
    process.start()
    assert here.wait(60)
    yield process
    process.kill()
    process.join()


@pytest.mark.promise("two processes train one run", "the second is told who trains it; the lock ends with the process")
def test_a_run_that_another_process_trains_is_refused_by_name_until_that_is_killed(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 0.2)
    said = rf"^process {holder.pid} on {socket.gethostname()} is training '{tmp_path}'; end it first, or resume a copy"
    with pytest.raises(UserError, match=said), folder.training(RunFolder(tmp_path)):
        pass
    holder.kill()
    holder.join()
    with folder.training(RunFolder(tmp_path)):
        assert (tmp_path / "run.lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert (tmp_path / "run.lock").read_text() == ""


def test_one_that_is_just_ending_is_waited_for(holder, tmp_path):
    holder.terminate()
    since = time.monotonic()
    with folder.training(RunFolder(tmp_path)):
        assert time.monotonic() - since < folder.PATIENCE


@pytest.mark.promise("a damaged metrics.csv, another file's name in `samples/`, a folder that cannot be written")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "run.lock").mkdir()
    words = r"^cannot write to '.*': (Is a directory|Permission denied); resume a copy of the folder"
    with pytest.raises(UserError, match=words), folder.training(RunFolder(tmp_path)):
        pass


@not_on_windows
def test_a_file_system_without_locks_is_named_and_none_to_wait_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with folder.training(RunFolder(tmp_path)), folder.training(RunFolder(tmp_path)):
        pass
    assert capsys.readouterr().out.count(f"the disk of '{tmp_path}' has no locks, so nothing keeps a second") == 2


# ---- resumed ----


NAME = "sean-folder"


@pytest.fixture
def trained(tmp_path):
    """A folder with the settings of a run, and a checkpoint."""
    folder = RunFolder(tmp_path / "runs" / "001-sean-folder")
    folder.checkpoint(8).mkdir(parents=True)
    return folder


def resumed(folder, typed=()):
    """The run resumed with what is typed, in place of the saved settings."""
    settings, _ = options.parse([NAME, "--batch-size", "4", "--data", "mine"])
    folder.settings.write_text(settings_file.dump(settings, NAME))
    now, where = options.parse(["--resume", str(folder.path), *typed])
    return Resumed(where[0], NAME, {**options.run_settings(now), "precision": now.precision})


CHANGED = "--generator-rate 0.1 --data moved --max-steps 9 --sample-every 2 --precision 64-true"


@pytest.mark.promise(
    "`--resume` with other settings, or from another folder",
    "what differs is said, and counts; networks that do not fit are refused before anything is trained; data that are "
    "not there are named with `--data`",
)
def test_what_has_changed_is_said_in_one_line(trained):
    words = (
        "the run was trained with --data mine, --generator-rate 0.0001, no --max-steps, --precision 32-true"
        ", and goes on with --data moved, --generator-rate 0.1, --max-steps 9, --precision 64-true"
    )
    for typed, said in (("", ""), (CHANGED, words)):
        again = resumed(trained, typed.split())
        assert str(again) == said and bool(again.changed) == bool(said)
        again.check()
    was = "data mine, generator-rate 0.0001, max-steps 60, precision 32-true"  # on the card
    assert again.as_it_was("config auto, max-steps 60, batch-size 9") == was and "no max-steps" in again.as_it_was("")


@pytest.mark.parametrize(("option", "was"), [("seed", 0), ("batch-size", 4)])
def test_another_seed_or_batch_is_refused_before_it_is_said_that_the_run_goes_on(trained, option, was):
    said = f"trained with {option.replace('-', ' ')} {was}, and has 3 now; resume with {was}, or begin a new run"
    with pytest.raises(UserError, match=said):
        resumed(trained, [f"--{option}", "3"]).check()


def test_weights_of_another_size_are_refused_and_not_those_that_are_not_saved(trained, monkeypatch):
    monkeypatch.setattr("gan.app.run.resumed.load", lambda path: {"state_dict": {"weight": torch.zeros(2, 3)}})
    again = resumed(trained, ["--max-steps", "9"])
    again.check_networks(torch.nn.Linear(3, 2), trained.checkpoint(8))  # its bias is not there, as a VGG's weights
    with pytest.raises(UserError, match=r"'weight' has the size \(2, 4\), and there \(2, 3\); resume with no --max-s"):
        again.check_networks(torch.nn.Linear(4, 2), trained.checkpoint(8))


@pytest.mark.promise("`--resume` with other settings, or from another folder")
@pytest.mark.parametrize(
    ("error", "data", "advice"),
    [
        ("no pictures", "/nowhere/mine", "; if its data have moved, type --data and their folder"),
        ("no folder; type --data and the folder", "/nowhere/mine", ""),
        ("no pictures", os.getcwd(), ""),
    ],
)
def test_where_data_are_gone_what_to_type_is_said_once(error, data, advice):
    assert str(where_data_are(UserError(error), {"data": data})) == error + advice


def test_settings_have_the_whole_path_of_data_that_are_there(here):
    Path("mine").mkdir()
    for typed, kept in (("mine", str(here / "mine")), ("absent", "absent")):
        settings, _ = options.parse([NAME, "--data", typed])
        assert yaml.safe_load(settings_file.dump(settings, NAME))["data"] == kept
        assert settings.data == typed
