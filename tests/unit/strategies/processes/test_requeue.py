"""After Slurm's warning a Trainer saves after the step where Lightning looks, and then asks for the queue."""

import os
import signal

import pytest
from lightning import Callback
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from strategies import PhaseStrategy
from strategies.processes import slurm
from tests.support.hard_games import Plain
from tests.support.parity import Whole, distance, snapshot, trainer

STEPS = 6


class Told(Callback):
    """Gets a signal in the middle of its third step."""

    def __init__(self, number):
        self.number = number

    def on_before_backward(self, trainer, *_):
        if trainer.global_step == 2 and self.number:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Inside of a job of one task: the checkpoints that were there when it was asked for the queue."""
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    named = {"JOB_ID": "12", "JOB_NAME": "train", "STEP_ID": "0", "NTASKS": "1", "STEP_TASKS_PER_NODE": "1"}
    for name, value in named.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    asked = []
    monkeypatch.setattr(slurm, "requeue", lambda: asked.append(sorted(path.name for path in tmp_path.glob("hpc*"))))
    return asked


def fit(folder, number=0, **options):
    game, strategy = Plain(), PhaseStrategy("single")
    made = trainer(strategy, 1, STEPS, callbacks=[Told(number)], default_root_dir=folder, **options)
    made.fit(game, Whole(STEPS))
    return snapshot(game, strategy)


def test_it_is_saved_after_the_step_and_goes_on_to_the_same_end(asked, tmp_path):
    whole = fit(tmp_path / "other")
    assert asked == []
    with pytest.raises(SIGTERMException):
        fit(tmp_path, signal.SIGUSR1)
    assert asked == [["hpc_ckpt_1.ckpt"]]  # whole, and once
    assert distance(fit(tmp_path), whole) == 0
    assert asked == [["hpc_ckpt_1.ckpt"]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_another_signal_asks_for_nothing(number, asked, tmp_path):
    with pytest.raises(SIGTERMException):
        fit(tmp_path, number)
    assert asked == [] and not list(tmp_path.iterdir())


def test_a_person_may_turn_it_off(asked, tmp_path):
    with pytest.raises(SIGTERMException):
        fit(tmp_path, signal.SIGUSR1, plugins=[SLURMEnvironment(auto_requeue=False)])
    assert asked == [] and not list(tmp_path.iterdir())


def test_a_person_may_choose_the_signal(asked, tmp_path):
    with pytest.raises(SIGTERMException):
        fit(tmp_path, signal.SIGUSR2, plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)])
    assert asked == [["hpc_ckpt_1.ckpt"]]
