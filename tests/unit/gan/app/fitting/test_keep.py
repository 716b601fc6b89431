"""When checkpoints are saved, which are kept, and how a signal ends training."""

import errno
import json
import os
import shutil
import signal
import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from lightning import Callback

from gan.app.fitting.keep import Keep
from gan.app.run.folder import RunFolder
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.checkpoint import writing
from strategies.processes.stopping import SIGNALS, Stopped
from strategies.training import lockstep
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer
from tests.support.posix import not_on_windows
from tests.support.saved import names, read_checkpoint, write_checkpoint
from tests.support.scene import having


class Signals(Callback):
    """Sends signals to this process at the end of some steps, before Keep looks."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, *_):
        for number in self.at.get(trainer.global_step, ()):
            os.kill(os.getpid(), number)


def fit(keep, steps, *callbacks, game=None, ranks=1, resume=None, write=writing._write_file, validate=None, **settings):
    """A training that saves by Keep, whose files are written so; its last step."""
    strategy = PhaseStrategy("ddp" if ranks > 1 else "single", check=False)
    made = trainer(strategy, ranks, steps, callbacks=[*callbacks, keep], **settings)
    with mock.patch.object(writing, "_write_file", write):
        made.fit(game or Plain(), parts(steps, ranks), validate, ckpt_path=resume and keep.folder.checkpoint(resume))
    return made.global_step


def kept(tmp_path, steps, at=(), every=3, resume=None, in_background=True):
    """The names of the checkpoints that are there then, without step- and .ckpt."""
    fit(Keep(RunFolder(tmp_path), every, in_background), steps, Signals(dict(at)), resume=resume)
    return [name.removeprefix("step-").removesuffix(".ckpt") for name in names(tmp_path / "checkpoints")]


def copied(checkpoints, one, other):
    shutil.copytree(checkpoints / f"step-{one}.ckpt", checkpoints / f"step-{other}.ckpt")


@pytest.mark.promise("checkpoints and files that a run did not write", "it never removes them")
def test_what_this_run_did_not_write_stays(tmp_path):
    """A person's copy, and the later steps of a run that goes on from an earlier one."""
    kept(tmp_path, 4, every=2)
    copied(tmp_path / "checkpoints", "000004", "000004-keep")
    copied(tmp_path / "checkpoints", "000004", "000100")
    assert kept(tmp_path, 9, resume=4) == ["000004-keep", "000006", "000009", "000100"]
    assert kept(tmp_path, 10, resume=9) == ["000004-keep", "000009", "000010", "000100"]


def test_a_checkpoint_that_does_not_know_what_was_written_resumes(tmp_path):
    """As one of a person's own program: then all that is in the folder stays."""
    kept(tmp_path, 4, every=2)
    path = tmp_path / "checkpoints" / "step-000004.ckpt"
    saved = read_checkpoint(path)
    del saved["callbacks"]["Keep"]
    write_checkpoint(path, saved)
    for other in ("000003-keep", "000100"):
        copied(tmp_path / "checkpoints", "000002", other)
    left = ["000002", "000003-keep", "000004", "000006", "000008", "000100"]
    assert kept(tmp_path, 8, resume=4) == left


class Exited(BaseException):
    """What os._exit is here."""


@pytest.fixture
def exits(monkeypatch):
    """A hard end that can be seen."""
    monkeypatch.setattr(lockstep.os, "_exit", mock.Mock(side_effect=Exited))
    return lockstep.os._exit.call_args_list


SENT = [[signal.SIGINT], *([number] * 2 for number in SIGNALS), [signal.SIGTERM, signal.SIGINT]]


@not_on_windows
@pytest.mark.parametrize(("numbers", "ends"), [*((numbers, 8) for numbers in SENT), (SENT[0], 4)], ids=str)
def test_a_signal_saves_after_the_step_and_stops_and_says_so_once_for_each(tmp_path, numbers, ends, exits, capfd):
    """In the last step it is a normal end. SIGTERM and one Ctrl-C are no second Ctrl-C."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)]
    (tmp_path / "checkpoints" / "step-000099.ckpt.part").mkdir(parents=True)  # as a killed process leaves it
    with pytest.raises(Stopped) if ends > 4 else nullcontext():
        kept(tmp_path, ends, {4: numbers})
    assert names(tmp_path / "checkpoints") == ["step-000003.ckpt", "step-000004.ckpt"] and not exits
    assert [signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)] == before
    assert capfd.readouterr().err.count("\nending after this step, and saving") == len(set(numbers))


@pytest.mark.promise(
    "a second Ctrl-C",
    "the run ends at once, and says how many steps are lost and which checkpoint remains; the first one has said so",
)
@not_on_windows
@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({2: 1, 8: 1}, None),  # the second one comes after the first one has ended the run
        ({5: 2}, "ended at step 5 without saving: 2 steps lost, {}/step-000003.ckpt remains"),
        ({2: 2}, "ended at step 2 without saving: 2 steps lost, this run has saved nothing yet"),
    ],
)
def test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost(steps, said, tmp_path, exits, capfd):
    with pytest.raises(Stopped if said is None else Exited):
        kept(tmp_path, 8, {step: [signal.SIGINT] * times for step, times in steps.items()}, in_background=False)
    lines = [line for line in capfd.readouterr().err.splitlines() if "end" in line]
    assert lines[0] == "ending after this step, and saving; another Ctrl-C ends at once, without saving"
    assert lines[1:] == ([] if said is None else [said.format(tmp_path / "checkpoints")])
    assert exits == ([] if said is None else [mock.call(130)])
    first = min(steps)
    assert (tmp_path / "checkpoints" / f"step-{first:06d}.ckpt").exists() == (said is None)


# ---- written in the background ----


class Slow:
    """The checkpoint of one step is written only when the last step is over, or not at all."""

    def __init__(self, step, error=None):
        self.step, self.error, self.may, self.real = step, error, threading.Event(), writing._write_file
        self.threads = []

    def __call__(self, part, *rest):
        self.threads.append(threading.current_thread() is threading.main_thread())
        if f"{self.step:06d}" in part.name:
            assert self.may.wait(60)
            if self.error is not None:
                raise self.error
        return self.real(part, *rest)


class Looks(Callback):
    """Notes at the end of a step which checkpoints are there, and lets the slow one be written."""

    def __init__(self, folder, step, slow):
        self.folder, self.step, self.slow = folder, step, slow
        self.seen = None

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            self.seen = self.folder.steps()
            self.slow.may.set()


def kept_slowly(tmp_path, slow, in_background=True):
    looks = Looks(RunFolder(tmp_path), 7, slow)
    fit(Keep(looks.folder, 2, in_background), 8, looks, write=slow)
    return looks.seen, looks.folder.steps()


def test_training_goes_on_meanwhile_and_older_ones_stay_until_it_is_whole(tmp_path):
    slow = Slow(6)
    assert kept_slowly(tmp_path / "back", slow) == ([2, 4], [6, 8])
    assert slow.threads == [False, False, False, True]  # the last one is whole before the run ends
    slow = Slow(6)
    slow.may.set()
    assert kept_slowly(tmp_path / "front", slow, in_background=False) == ([4, 6], [6, 8]), "there at once"
    assert slow.threads == [True] * 4


# ---- a full disk ----


class Full:
    """The disk has no room for the checkpoints of some steps."""

    def __init__(self, *steps, kind=errno.ENOSPC, ranks=(0,)):
        self.names = tuple(f"step-{step:06d}.ckpt.part" for step in steps)
        self.kind, self.ranks, self.real = kind, ranks, writing._write_file

    def __call__(self, part, rank, *rest):
        if part.name in self.names and rank in self.ranks:
            raise OSError(self.kind, os.strerror(self.kind))
        return self.real(part, rank, *rest)


def kept_when_full(folder, full, in_background, steps=8, ranks=1, **choices):
    """A run of `steps` steps that saves every second one. Returns its Keep, and its last step."""
    keep = Keep(RunFolder(folder), 2, in_background, **choices)
    return keep, fit(keep, steps, ranks=ranks, write=full)


@pytest.mark.parametrize(("kind", "in_background"), [(errno.ENOSPC, True), (errno.EACCES, False)])
def test_training_goes_on_past_a_full_disk_and_no_older_checkpoint_is_removed(kind, in_background, tmp_path, capsys):
    keep, steps = kept_when_full(tmp_path, Full(4, 6, kind=kind), in_background)
    assert steps == 8
    assert names(tmp_path / "checkpoints") == ["step-000002.ckpt", "step-000008.ckpt"]
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    here = tmp_path / "checkpoints"
    assert said == [
        f"warning: cannot write checkpoint {here}/step-{step}.ckpt: {os.strerror(kind)}; step-000002.ckpt remains, "
        f"training goes on, and the next save tries again"
        for step in ("000004", "000006")
    ]
    keep.refuse_if_not_saved(True)
    assert read_checkpoint(here / "step-000008.ckpt")["callbacks"]["Keep"] == {"wrote": [2, 8]}


def test_what_is_no_fault_of_the_disk_ends_the_run(tmp_path):
    def write(part, *rest):
        raise UserError("a mistake")

    with pytest.raises(UserError, match="a mistake"):
        kept_when_full(tmp_path, write, True)


# ---- the best ones ----


class Scored(Plain):
    """Has a score after each validation."""

    def validation_step(self, batch, batch_idx):
        if self.step in self.values:
            self.log("val/error", torch.tensor(self.values[self.step]))


def kept_best(tmp_path, values, steps, best=1, newest=1, in_background=True, full=(), resume=None, score="val/error"):
    keep = Keep(RunFolder(tmp_path), 1, in_background, newest, best, score)
    validations = dict(validate=parts(1), val_check_interval=1, num_sanity_val_steps=1)
    fit(keep, steps, game=having(Scored, values=values)(), resume=resume, write=Full(*full), **validations)
    found = keep.best_checkpoint()
    return RunFolder(tmp_path).steps(), found and found[0].name


VALUES = {1: 0.5, 2: 0.3, 3: 0.4, 4: 0.2, 5: float("nan"), 6: 0.6}


@pytest.mark.promise("older checkpoints", "the newest `--keep` stay, and the `--keep-best` best, also after a restart")
@pytest.mark.parametrize(
    ("best", "newest", "kept", "in_background"),
    [(0, 2, [5, 6], True), (1, 1, [4, 6], False), (2, 1, [2, 4, 6], True), (9, 1, [1, 2, 3, 4, 6], True)],
)
def test_the_newest_and_the_best_are_kept(best, newest, kept, in_background, tmp_path):
    found, name = kept_best(tmp_path, VALUES, 6, best, newest, in_background)
    assert found == kept
    assert name == ("step-000004.ckpt" if best else None)
    assert RunFolder(tmp_path).best.exists() == bool(best)


@pytest.mark.promise("older checkpoints")
def test_the_best_one_is_known_after_a_restart_and_may_be_replaced(tmp_path):
    assert kept_best(tmp_path, VALUES, 3) == ([2, 3], "step-000002.ckpt")
    assert kept_best(tmp_path, {4: 0.31, 5: 0.32}, 5, resume=3) == ([2, 5], "step-000002.ckpt")
    assert kept_best(tmp_path, {6: 0.1, 7: 0.2}, 7, resume=5) == ([6, 7], "step-000006.ckpt")


def test_a_step_that_is_trained_again_has_its_new_score(tmp_path):
    kept_best(tmp_path, {1: 0.5, 2: 0.1, 3: 0.4}, 3, newest=3)
    assert kept_best(tmp_path, {2: 0.6, 3: 0.7}, 3, resume=1) == ([1, 3], "step-000001.ckpt")


def test_the_best_of_another_score_does_not_count(tmp_path):
    kept_best(tmp_path, VALUES, 3)
    assert kept_best(tmp_path, VALUES, 4, resume=3, score="val/other") == ([4], None)


def test_scores_that_cannot_be_read_are_begun_anew(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    for text in ("", "[]", '{"score": "val/error"}', '{"score": "val/error", "steps": {"a": 1}}'):
        folder.best.write_text(text)
        assert Keep(folder, 1, best=1, score="val/error").scores == {}
        assert "best.json' cannot be read" in capsys.readouterr().err
    kept_best(tmp_path, VALUES, 2)
    assert json.loads(folder.best.read_text()) == {"score": "val/error", "steps": {"1": 0.5, "2": 0.3}}


def test_a_checkpoint_that_was_not_saved_is_not_the_best(tmp_path):
    """A later one of its step that this run did not write stays, as ever."""
    folder = RunFolder(tmp_path)
    kept_best(tmp_path, VALUES, 2, newest=2)
    copied(folder.checkpoints, "000002", "000004")
    assert kept_best(tmp_path, VALUES, 5, full=[4], resume=2) == ([2, 4, 5], "step-000002.ckpt")
