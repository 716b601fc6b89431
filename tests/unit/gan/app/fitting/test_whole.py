"""The checkpoint that a run goes on from is the newest whole one, and a line says which were passed over."""

import re
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from gan import fit as command
from gan.app.fitting import start, train
from gan.app.run import folder
from gan.app.run import resumed as resuming
from gan.app.run.folder import RunFolder
from gan.app.run.resumed import newest_whole, to_resume, what_to_type
from gan.files.errors import Damaged, UserError
from gan.files.finite import NotFinite
from strategies.checkpoint.writing import save
from strategies.processes.launchers import Launched
from tests.support.saved import damage, numbered


@pytest.fixture
def run(tmp_path):
    made = RunFolder(tmp_path / "001-mine")
    made.checkpoints.mkdir(parents=True)
    made.settings.write_text("run: mine\n")
    for step in (10, 20, 30):
        save(made.checkpoint(step), numbered(step))
    return made


def gone_on_from(typed, run):
    """What is gone on from, and what is said."""
    said = []
    found = folder.find(str(typed), run.path.parent, None)
    return to_resume(str(typed), *found, said.append), said


@pytest.mark.promise(
    "the newest checkpoint is damaged",
    "`--resume auto`, `--resume RUN` and a restart say so and go on from the newest whole one; where it was "
    "typed, the error names that one",
)
def test_the_newest_whole_one_is_taken_and_the_damaged_ones_are_named(run):
    """Also one that was saved since the folder was found."""
    found, said = folder.find("auto", run.path.parent, None), []
    save(run.checkpoint(40), numbered(40))
    assert to_resume("auto", *found, said.append) == run.checkpoint(40) and not said
    damage(run.checkpoint(40))
    path, (line,) = gone_on_from(run.path, run)
    assert path == run.checkpoint(30)
    why = r"step-000040.ckpt cannot be read as a checkpoint: shard-.* is damaged: 'state/\w' in it is not what was "
    assert re.search(rf"{why}written; going on from .*step-000030.ckpt$", line)
    for step in (30, 20):
        (run.checkpoint(step) / "values.json").unlink()
    path, lines = gone_on_from("auto", run)
    assert path == run.checkpoint(10) and [re.search(r"step-0000\d\d", line)[0] for line in lines] == [
        *("step-000040", "step-000030", "step-000020")
    ]
    damage(run.checkpoint(10))
    with pytest.raises(UserError, match=r"step-000040.* no earlier checkpoint of the run is whole, so begin a new run"):
        gone_on_from("auto", run)


def test_one_that_was_typed_is_not_exchanged_but_the_whole_one_before_it_is_named(run):
    assert gone_on_from(run.checkpoint(20), run) == (run.checkpoint(20), [])
    damage(run.checkpoint(20))
    with pytest.raises(UserError, match=r"000020.ckpt cannot .*: type --resume .*step-000010.ckpt$"):
        gone_on_from(run.checkpoint(20), run)
    damage(run.checkpoint(10))
    with pytest.raises(UserError, match=r"000020.ckpt cannot .*; no earlier checkpoint of the run is whole$"):
        gone_on_from(run.checkpoint(20), run)


def test_before_a_copy_of_another_name_are_all_that_the_run_wrote(run):
    copy = run.checkpoints / "step-000020-keep.ckpt"
    damage(run.checkpoint(20).rename(copy))
    newest = run.checkpoint(30)
    assert what_to_type(run, copy) == f"the newest whole checkpoint before it is {newest}: type {newest}"


def test_one_of_a_newer_version_is_not_passed_over(run, monkeypatch):
    """It is not damaged. To train on from an older one would lose steps."""
    monkeypatch.setattr("strategies.checkpoint.writing.FORMAT", 4)
    save(run.checkpoint(40), numbered(40))
    with pytest.raises(UserError, match="it has format 4, and this version reads 3"):
        gone_on_from("auto", run)


def test_a_check_that_takes_long_says_so(run, monkeypatch):
    done, said = threading.Event(), []
    monkeypatch.setattr(resuming, "QUIET", 0.01)
    monkeypatch.setattr(resuming, "check", lambda _: done.wait(30))
    newest_whole([run.checkpoint(30)], lambda line: (said.append(line), done.set()))
    assert said == [f"checking all of {run.checkpoint(30)} ..."]


@pytest.mark.promise("the newest checkpoint is damaged")
@pytest.mark.parametrize("started_again", [False, True])
def test_the_command_goes_on_from_the_newest_whole_one(started_again, run, monkeypatch, capsys):
    """Also when a launcher starts the ranks again, with the command line of the first attempt."""
    run.settings.write_text("run: wgan-gp-faces\n")
    damage(run.checkpoint(30))
    chosen = []
    monkeypatch.setattr(train, "train", lambda *args: chosen.append(args[4].checkpoint))
    if started_again:
        monkeypatch.setattr(command, "launched", lambda: Launched("environment", 0, 0, 1, 1, 0))
        monkeypatch.setattr(start, "launcher_of", lambda *_: "a launcher")
        run.launch.write_text(start.launch_record(["a launcher"], run.checkpoint(30).name))
    typed = ["wgan-gp-faces"] if started_again else ["--resume", "auto", "--devices", "1"]
    assert command.main([*typed, "--out", str(run.path.parent)]) == 0
    assert chosen == [run.checkpoint(20)]
    said = [line for line in capsys.readouterr().out.splitlines() if "damaged" in line]
    assert len(said) == 1 and said[0].endswith(f"going on from {run.checkpoint(20)}")


def refusing(error, monkeypatch):
    monkeypatch.setattr(train, "Trainer", lambda **_: SimpleNamespace(fit=mock.Mock(side_effect=error)))


@pytest.mark.parametrize("kind", [NotFinite, Damaged])
def test_a_new_run_whose_game_reads_a_bad_file_ends_with_what_is_wrong_there(kind, tmp_path, monkeypatch, capsys):
    refusing(kind("other.ckpt is bad"), monkeypatch)
    assert command.main(["wgan-gp-faces", "--out", str(tmp_path), "--devices", "1"]) == 2
    assert capsys.readouterr().err.endswith("other.ckpt is bad\n")


@pytest.mark.promise("weights or averages that are not finite")
def test_a_checkpoint_with_weights_that_are_not_finite_is_refused_with_one_to_type(run, monkeypatch, capsys):
    run.settings.write_text("run: wgan-gp-faces\n")
    refusing(NotFinite("the checkpoint cannot be used"), monkeypatch)
    assert command.main(["--resume", str(run.checkpoint(20)), "--devices", "1"]) == 2
    assert capsys.readouterr().err.endswith(f"before it is {run.checkpoint(10)}: type --resume {run.checkpoint(10)}\n")
