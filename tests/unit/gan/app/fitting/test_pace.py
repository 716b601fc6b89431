"""The time to the end, and what a line says."""

import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from gan import Phase
from gan.app.fitting import metrics, pace
from gan.app.fitting.metrics import Record
from gan.app.fitting.pace import Bar, Pace
from gan.app.run.folder import RunFolder
from strategies import PhaseStrategy
from tests.support.hard_games import Micro2, Plain
from tests.support.parity import parts, trainer


def test_after_ten_steps_the_time_to_the_end_is_true(monkeypatch):
    """Phases that are due in some steps, a slow first step, and what comes between steps: all have their part."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pace.time, "monotonic", lambda: clock.now)
    phases = (Phase("d", print, "d"), Phase("r1", print, "d", every=16), Phase("path", print, "g", every=4))
    takes = {"d": 1.0, "r1": 1.0, "path": 1.0}
    found = Pace(phases, 0, 1000)
    found.paused("grid", 100, 7.0)  # before training, as a validation: 10 more to come
    found.paused("validation", 250, 20.0)

    def left(step):
        steps = sum(takes[phase.name] for at in range(step, 1000) for phase in phases if phase.due(at, None))
        return steps + 7.0 * (10 - step // 100) + 20.0 * (4 - step // 250)

    for step in range(300):
        clock.now += 90.0 if step == 0 else sum(takes[phase.name] for phase in phases if phase.due(step, None))
        found.stepped()
        for name, every, seconds in (("grid", 100, 7.0), ("validation", 250, 20.0)):
            if (step + 1) % every == 0:
                clock.now += seconds
                found.paused(name, every, seconds)
        if step == 0:
            assert found.left() is None
        if step in (9, 99, 299):
            assert found.left() == pytest.approx(left(step + 1), rel=0.01)


def test_a_loss_that_is_called_as_its_phase_is_named_once():
    found = {"r1/r1": torch.tensor(0.5), "G/gan": torch.tensor(1.0), "G/pixels": torch.tensor(2.0)}
    assert pace._losses(found) == "r1: 0.500 | G: gan 1.000 pixels 2.000"


def test_the_bar_tells_losses_pictures_and_the_time_to_the_end(capsys):
    made = trainer(PhaseStrategy("single"), 1, 5, callbacks=[Bar(16, 2)], enable_progress_bar=True)
    made.fit(Plain(), parts(5))
    said = capsys.readouterr()
    *_, last = said.err.splitlines()  # no terminal: each state of the bar is a line
    losses = r"discriminator: fake \d\.\d{3} real \d\.\d{3} \| generator: \w+ \d\.\d{3}"  # and no norms of gradients
    assert re.match(rf"100%\|█+\| 5/5 steps \[\d\d:\d\d<00:00\] \S+ pictures/s \| {losses}$", last), last
    assert "\r" not in said.err
    lines = re.findall(r"^step (\d) of 5: (\S+) kimg, \S+ pictures/s \(\S+ s/kimg\), .*to go$", said.out, re.MULTILINE)
    assert lines == [("2", "0.032"), ("4", "0.064")]


@pytest.mark.parametrize(("game", "tried"), [(Micro2, 1), (Plain, 0)])
def test_the_bar_says_that_the_first_step_is_tried(game, tried, capsys):
    made = trainer(PhaseStrategy("single"), 1, 2, callbacks=[Bar(16)], enable_progress_bar=True)
    made.fit(game(), parts(2))
    said = capsys.readouterr().err
    assert said.count("trying the first step; --check false skips it\n") == tried
    assert said.count(" 1/2 steps ") == tried  # it is over


@pytest.mark.parametrize(("stops_at", "wanted"), [(9, {5: 80.0}), (3, {})])
def test_a_training_that_is_shorter_than_a_row_has_its_time_too(stops_at, wanted, tmp_path):
    """A stopped training has no row more than one that went on: resumed, its rows are those of the unbroken one."""
    record = Record(RunFolder(tmp_path))

    def stop(trainer, *_):
        trainer.should_stop = trainer.global_step == stops_at

    callbacks = [Bar(16), LambdaCallback(on_train_batch_end=stop)]
    settings = dict(callbacks=callbacks, enable_progress_bar=True, logger=record, log_every_n_steps=10)
    trainer(PhaseStrategy("single"), 1, 5, **settings).fit(Plain(), parts(5))
    rows = metrics.read(record.folder.metrics)
    assert {step: row["pictures"] for step, row in rows.items()} == wanted
    assert all(row["seconds"] > 0 for row in rows.values())


@pytest.mark.parametrize(("told", "unit"), [({}, "pictures"), ({"voice": print}, "sounds")])
def test_the_time_of_a_run_goes_on_from_a_row_that_has_only_scores(told, unit, tmp_path):
    record = Record(RunFolder(tmp_path))
    record.folder.metrics.write_text("step,seconds,val/error\n4,50.0,\n5,,0.3\n")
    here = SimpleNamespace(global_step=5, max_steps=9, is_global_zero=False)
    bar = Bar(16, record=record)
    bar.on_train_start(here, SimpleNamespace(**told, phases={}))
    found = bar._so_far(here)
    assert 50 <= found["seconds"] < 60 and found[unit] == 80
    assert metrics.clock({5: found}) == ((0.016, "0.08 kimg in 00:50") if unit == "pictures" else (0, "00:50"))
