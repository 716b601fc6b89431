"""The callbacks of `gan.fit` by themselves, under a Trainer of one's own."""

import errno
import os
import shutil
import signal
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning import Callback, LightningDataModule
from torch.utils.data import DataLoader

from gan.errors import UserError
from gan.fit.callbacks import Bar, Keep, Pictures, Score, _losses
from gan.fit.folder import RunFolder
from gan.fit.metrics import Record
from strategies import PhaseStrategy
from strategies.checkpoint import writing
from strategies.processes.stopping import SIGNALS, Stopped
from tests.support.hard_games import Plain
from tests.support.parity import distance, parts, snapshot, trainer, vectors
from tests.support.saved import read_checkpoint, write_checkpoint


def test_the_bar_names_each_phase_and_leaves_gradient_norms_out():
    losses = {
        "d/real": torch.tensor(0.5),
        "d/fake": torch.tensor(0.25),
        "d/d_grad_norm": torch.tensor(9.0),
        "g/loss": torch.tensor(-1.0),
    }
    assert _losses(losses) == "d: real 0.500 fake 0.250 | g: loss -1.000"


def test_the_bar_counts_steps_and_images(capsys):
    made = trainer(PhaseStrategy("single"), 1, 5, callbacks=[Bar(16)], enable_progress_bar=True)
    made.fit(Plain(), parts(5))
    said = capsys.readouterr().err
    assert "5/5" in said


class Show(Plain):
    """Draws from the global random state, in training and for its pictures, and minds its modes."""

    modes: list

    def fake(self, real):
        self.modes.append((self.generator.training, self.discriminator.training))
        return self.generator(torch.randn(len(real), 4, dtype=real.dtype))

    def show(self, batch):
        assert not self.generator.training
        assert not torch.is_grad_enabled()
        return {
            "made": self.generator(torch.randn(len(batch["x"]), 4, dtype=torch.float64))[:, None, None].repeat(
                1, 3, 6, 1
            )
        }


class Data(LightningDataModule):
    def train_dataloader(self):
        return parts(4)

    def val_dataloader(self):
        return DataLoader([{**vectors(9), "image": torch.zeros(16, 3, 4, 4)}], batch_size=None)


def shown(folder, callbacks):
    torch.manual_seed(5)
    game, strategy = Show(), PhaseStrategy("single")
    game.modes = []
    game.discriminator.eval()
    trainer(strategy, 1, 4, callbacks=callbacks).fit(game, datamodule=Data())
    return snapshot(game, strategy), game.modes


def test_pictures_are_drawn_and_disturb_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    folder.samples.mkdir()
    log = Record(folder)
    log.rows = {0: {"d/x": 1.0}}
    plain, modes = shown(folder, [])
    drawn, modes_too = shown(folder, [Pictures(folder, log, every=3)])
    assert distance(plain, drawn) == 0
    assert modes == modes_too == [(True, False)] * 8
    names = sorted(path.name for path in folder.samples.iterdir())
    assert names == ["reals.png", "step-000000.png", "step-000003.png", "step-000004.png"]
    assert folder.curves.is_file()


def test_the_score_remembers_the_first_value_over_an_interruption():
    score, other = Score(["val/x", "val/y"]), Score(["val/x", "val/y"])
    engine = SimpleNamespace(callback_metrics={}, loggers=[])
    for value in (None, 3.0, 2.0, 1.0):
        if value is not None:
            engine.callback_metrics = {"val/x": torch.tensor(value), "val/y": torch.tensor(value + 1), "z": value}
        score.on_validation_end(engine, None)
    assert (score.first, score.last) == ({"val/x": 3, "val/y": 4}, {"val/x": 1, "val/y": 2})
    other.load_state_dict(score.state_dict())
    engine.callback_metrics = {"val/x": torch.tensor(0.5)}
    other.on_validation_end(engine, None)
    assert (other.first, other.last) == ({"val/x": 3, "val/y": 4}, {"val/x": 0.5, "val/y": 2})


class Signals(Callback):
    """Sends signals to this process at the end of some steps, before Keep looks."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, *_):
        for number in self.at.get(trainer.global_step, ()):
            os.kill(os.getpid(), number)


def kept(tmp_path, steps, at, every=3, resume=None):
    keep = Keep(RunFolder(tmp_path), every)
    made = trainer(PhaseStrategy("single"), 1, steps, callbacks=[Signals(at), keep])
    try:
        made.fit(Plain(), parts(steps), ckpt_path=resume and str(tmp_path / "checkpoints" / resume))
    finally:
        found = sorted(path.name for path in (tmp_path / "checkpoints").glob("*"))
    return made, found


def test_the_newest_two_checkpoints_are_kept_and_the_last_step_is_saved(tmp_path):
    (tmp_path / "checkpoints" / "step-000099.ckpt.part").mkdir(parents=True)  # as a killed process leaves it
    assert kept(tmp_path, 8, {})[1] == ["step-000006.ckpt", "step-000008.ckpt"]


def copied(checkpoints, one, other):
    shutil.copytree(checkpoints / f"step-{one}.ckpt", checkpoints / f"step-{other}.ckpt")


def test_what_this_run_did_not_write_stays(tmp_path):
    """A person's copy, and the later steps of a run that goes on from an earlier one."""
    kept(tmp_path, 4, {}, every=2)
    copied(tmp_path / "checkpoints", "000004", "000004-keep")
    copied(tmp_path / "checkpoints", "000004", "000100")
    found = kept(tmp_path, 9, {}, resume="step-000004.ckpt")[1]
    assert found == [f"step-{step}.ckpt" for step in ("000004-keep", "000006", "000009", "000100")]
    found = kept(tmp_path, 10, {}, resume="step-000009.ckpt")[1]
    assert found == [f"step-{step}.ckpt" for step in ("000004-keep", "000009", "000010", "000100")]


def test_going_on_from_an_earlier_step_leaves_what_was_written_beyond_it(tmp_path):
    kept(tmp_path, 7, {}, every=2)
    assert kept(tmp_path, 10, {}, every=5, resume="step-000006.ckpt")[1] == [
        f"step-{step}.ckpt" for step in ("000006", "000007", "000010")
    ]


def test_a_checkpoint_that_does_not_know_what_was_written_resumes(tmp_path):
    """As all did once: what the folder has up to its step is of its run."""
    kept(tmp_path, 4, {}, every=2)
    path = tmp_path / "checkpoints" / "step-000004.ckpt"
    saved = read_checkpoint(path)
    del saved["callbacks"]["Keep"]
    write_checkpoint(path, saved)
    for other in ("000003-keep", "000100"):
        copied(tmp_path / "checkpoints", "000002", other)
    assert kept(tmp_path, 8, {}, resume=path.name)[1] == [
        f"step-{step}.ckpt" for step in ("000003-keep", "000006", "000008", "000100")
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, *SIGNALS])
def test_a_signal_saves_after_the_step_and_stops(tmp_path, number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped):
        kept(tmp_path, 8, {4: [number]})
    assert RunFolder(tmp_path).steps() == [3, 4]
    assert signal.getsignal(number) is before


def test_a_hang_up_that_is_ignored_stays_so(tmp_path):
    """As nohup starts a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        made, _ = kept(tmp_path, 8, {4: [signal.SIGHUP]})
        assert made.global_step == 8
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_in_the_last_step_is_a_normal_end(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)]
    made, found = kept(tmp_path, 4, {4: [signal.SIGTERM]})
    assert [signal.getsignal(number) for number in (signal.SIGINT, *SIGNALS)] == before
    assert made.global_step == 4
    assert found == ["step-000003.ckpt", "step-000004.ckpt"]


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    with pytest.raises(SystemExit):  # how Lightning passes on a KeyboardInterrupt
        kept(tmp_path, 8, {4: [signal.SIGINT, signal.SIGINT]})
    assert list((tmp_path / "checkpoints").glob("step-000004.ckpt")) == []


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
    folder = RunFolder(tmp_path)
    looks = Looks(folder, 7, slow)
    keep = Keep(folder, 2, in_background)
    with mock.patch.object(writing, "_write_file", slow):
        trainer(PhaseStrategy("single"), 1, 8, callbacks=[keep, looks]).fit(Plain(), parts(8))
    return looks.seen, folder.steps()


def test_training_goes_on_meanwhile_and_older_ones_stay_until_it_is_whole(tmp_path):
    slow = Slow(6)
    assert kept_slowly(tmp_path, slow) == ([2, 4], [6, 8])
    assert slow.threads == [False, False, False, True]  # the last one is whole before the run ends


def test_in_the_foreground_it_is_there_at_once(tmp_path):
    slow = Slow(6)
    slow.may.set()
    assert kept_slowly(tmp_path, slow, in_background=False) == ([4, 6], [6, 8])
    assert slow.threads == [True] * 4


def test_a_disk_that_is_full_ends_the_run_and_no_older_one_is_removed(tmp_path):
    with pytest.raises(UserError, match=r"cannot write checkpoint .*step-000006.ckpt: No space left on device"):
        kept_slowly(tmp_path, Slow(6, OSError(errno.ENOSPC, "No space left on device")))
    assert RunFolder(tmp_path).steps() == [2, 4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000002.ckpt",
        "step-000004.ckpt",
    ]
