"""Run folders: numbering, and finding a run to resume."""

import os

import pytest

from gan.app.run import folder
from gan.files.errors import UserError


def make(out, name, *checkpoints):
    run = folder.create(out, name)
    run.settings.write_text(f"run: {name}\n")
    run.checkpoints.mkdir()
    for age, checkpoint in enumerate(checkpoints):
        (run.checkpoints / checkpoint).mkdir()
        os.utime(run.checkpoints / checkpoint, (1000 + age, 1000 + age))
    return run


def test_numbers_go_up_whatever_the_name(tmp_path):
    names = [folder.create(tmp_path / "runs", name).path.name for name in ("sean", "r3gan", "sean")]
    assert names == ["001-sean", "002-r3gan", "003-sean"]
    (tmp_path / "runs" / "041-mine").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("not a run")
    assert folder.create(tmp_path / "runs", "sean").path.name == "042-sean"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write to '.*file': .*; choose a folder with --out"):
        folder.create(tmp_path / "file", "sean")
    with pytest.raises(UserError, match="cannot write to '/proc/runs'"):
        folder.create(folder.Path("/proc/runs"), "sean")


def test_auto_is_the_newest_run_with_a_checkpoint(tmp_path):
    first = make(tmp_path, "sean", "step-000020.ckpt", "step-000010.ckpt")
    make(tmp_path, "pix2pix", "step-000020.ckpt")
    make(tmp_path, "sean")
    assert folder.find("auto", tmp_path, None)[0].path.name == "002-pix2pix"
    assert folder.find("auto", tmp_path, "sean") == (first, first.checkpoints / "step-000020.ckpt")
    assert folder.find("auto", tmp_path, "r3gan") is None
    assert folder.find("auto", tmp_path / "absent", None) is None


def test_auto_is_no_older_run_where_the_newest_has_lost_its_settings(tmp_path):
    for name in ("001-sean", "002-pix2pix"):
        run = folder.RunFolder(tmp_path / name)
        run.checkpoint(3).mkdir(parents=True)
        run.settings.write_text(f"run: {name[4:]}\n")
    run.settings.unlink()
    for name in (None, "pix2pix"):
        with pytest.raises(UserError, match=r"002-pix2pix' has lost its settings.yaml; put it back"):
            folder.find("auto", tmp_path, name)
    assert folder.find("auto", tmp_path, "sean")[0].path.name == "001-sean"


def test_the_newest_checkpoint_is_of_the_latest_step_whenever_it_was_written(tmp_path):
    copies = ("step-000300-keep.ckpt", "step-0000400.ckpt", "step-500.ckpt", "best.ckpt")
    run = make(tmp_path, "sean", "step-1000000.ckpt", "step-999999.ckpt", "step-000020.ckpt", *copies)
    assert run.steps() == [20, 999_999, 1_000_000]
    assert run.newest_checkpoint() == run.checkpoint(1_000_000)
    assert make(tmp_path, "mine", "best.ckpt").newest_checkpoint() is None
    assert folder.find(str(run.checkpoints / "best.ckpt"), tmp_path, None) == (run, run.checkpoints / "best.ckpt")


def test_what_resumes_at_a_step_is_the_run_or_that_step_where_there_is_a_later_one(tmp_path):
    run = make(tmp_path, "sean", "step-000010.ckpt", "step-000020.ckpt")
    assert run.resuming(20) == run.path
    assert run.resuming(10) == run.checkpoints / "step-000010.ckpt"
    assert run.resuming(15) == run.path


def test_grids_are_in_the_order_of_their_steps_and_other_pictures_are_none(tmp_path):
    run = make(tmp_path, "sean")
    assert run.grids() == {}
    for name in (
        "step-1000000.png",
        "step-999999.png",
        "step-000010.png",
        "step-abc.png",
        "step-000010-a.png",
        "reals.png",
    ):
        (run.samples / name).touch()
    assert [(step, path.name) for step, path in run.grids().items()] == [
        (10, "step-000010.png"),
        (999_999, "step-999999.png"),
        (1_000_000, "step-1000000.png"),
    ]
    (tmp_path / "002-file").mkdir()
    (tmp_path / "002-file" / "samples").write_text("a file")
    assert folder.RunFolder(tmp_path / "002-file").grids() == {}


def test_a_half_written_checkpoint_is_not_found(tmp_path):
    run = make(tmp_path, "sean", "step-000010.ckpt", "step-000020.ckpt.part")
    assert run.newest_checkpoint().name == "step-000010.ckpt"


def test_a_run_or_one_of_its_checkpoints_is_found_by_path(tmp_path):
    run = make(tmp_path, "sean", "step-000010.ckpt", "step-000020.ckpt")
    assert folder.find(str(run.path), tmp_path, None) == (run, run.checkpoints / "step-000020.ckpt")
    older = run.checkpoints / "step-000010.ckpt"
    assert folder.find(str(older), tmp_path, None) == (run, older)
    assert folder.find(f"{older}/", tmp_path, None) == (run, older)


def test_a_checkpoint_is_found_from_inside_its_folder(tmp_path, monkeypatch):
    run = make(tmp_path, "sean", "step-000010.ckpt")
    monkeypatch.chdir(run.checkpoints)
    found, checkpoint = folder.find("step-000010.ckpt", tmp_path, None)
    assert found.settings.is_file() and checkpoint.is_dir()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("absent", "there is no '.*absent'; give a run's folder"),
        ("001-empty", "001-empty' has no checkpoint yet; wait for its first"),
        ("001-empty/checkpoints/absent.ckpt", "there is no '.*absent.ckpt'"),
        (".", r"is not of a run: .*settings.yaml is missing"),
    ],
)
def test_what_is_no_run_with_a_checkpoint_is_refused(where, words, tmp_path):
    make(tmp_path, "empty")
    with pytest.raises(UserError, match=words):
        folder.find(str(tmp_path / where), tmp_path, None)


def test_a_run_that_has_lost_its_settings_is_named(tmp_path):
    run = make(tmp_path, "lost", "step-000010.ckpt")
    run.settings.unlink()
    for which in (run.path, run.checkpoint(10)):
        with pytest.raises(UserError, match=r"001-lost' has lost its settings.yaml; put it back"):
            folder.find(str(which), tmp_path, None)


def test_a_refused_run_leaves_nothing_but_one_with_a_checkpoint_stays(tmp_path):
    gone, kept = make(tmp_path, "gone"), make(tmp_path, "kept", "step-000001.ckpt")
    gone.discard()
    kept.discard()
    assert not gone.path.exists()
    assert kept.path.exists()


def test_a_new_folder_that_cannot_be_filled_is_removed(tmp_path):
    run = folder.create(tmp_path, "sean")
    run.game.mkdir()
    with pytest.raises(UserError, match=r"cannot write to '.*001-sean': Is a directory; choose a folder with --out"):
        run.fill({run.settings: "run: sean", run.game: "players"})
    assert not run.path.exists()
