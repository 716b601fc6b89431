"""What Slurm tells a rank, and what happens at its warning."""

import os
import signal

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from strategies import PhaseStrategy
from strategies.processes import slurm
from tests.support.hard_games import Plain
from tests.support.parity import Whole, distance, snapshot, trainer

TASK = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "1",
    "SLURM_CPUS_ON_NODE": "7",
}


@pytest.mark.parametrize(("terminal", "rank"), [(True, False), (False, True)])
def test_a_task_of_srun_is_a_rank_and_what_is_typed_in_the_shell_of_a_step_is_none(terminal, rank, monkeypatch):
    """The task is another process, which reads from a terminal."""
    assert slurm.started_by_srun(TASK) and not slurm.started_by_srun({})
    assert not slurm.started_by_srun({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # the script
    monkeypatch.setattr(os, "readlink", lambda path: {"/proc/7/fd/0": "/dev/pts/3" if terminal else "/dev/null"}[path])
    assert slurm.started_by_srun({**TASK, "SLURM_TASK_PID": "7"}) == rank
    monkeypatch.setattr(os, "getpid", lambda: 7)  # it is this one: srun --pty python -m gan.fit
    assert slurm.started_by_srun({**TASK, "SLURM_TASK_PID": "7"})


@pytest.mark.parametrize(
    ("text", "node", "count"), [("4", 0, 4), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("1,3(x2),2", 2, 3)]
)
def test_the_tasks_of_a_node_are_counted(text, node, count):
    assert slurm.tasks_here({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}) == count


def test_a_rank_has_the_cpus_that_were_asked_for_or_its_part_of_the_nodes():
    assert slurm.cpus({**TASK, "SLURM_CPUS_PER_TASK": "5"}) == 5
    assert slurm.cpus(TASK) == 3  # of 7, two tasks
    assert slurm.cpus({**TASK, "SLURM_CPUS_ON_NODE": "1"}) == 1
    assert slurm.cpus({"SLURM_CPUS_PER_TASK": "5"}) is None


def test_a_job_of_an_array_is_named_by_both_numbers():
    assert slurm.job({"SLURM_JOB_ID": "12"}) == "12"
    assert slurm.job({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}) == "12_1"
    assert slurm.job({}) is None


def test_a_job_goes_back_into_the_queue_or_it_is_said_why_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert "scontrol" in slurm.requeue()  # there is none
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\n")
    scontrol.chmod(0o755)
    assert slurm.requeue() is None
    assert (tmp_path / "asked").read_text() == "requeue 12\n"
    shown = "JobState={} Requeue={} Restarts=0\\n   PreemptEligibleTime=1 PreemptTime={}"
    for state, again, time, answer in (
        ("RUNNING", 1, "2026-11-29T02:27:34", True),
        ("COMPLETING", 1, "2026-11-29T02:27:34", False),  # scancel, after it has been preempted
        ("RUNNING", 0, "2026-11-29T02:27:34", False),  # --no-requeue
        ("RUNNING", 1, "None", False),  # a signal by hand
    ):
        scontrol.write_text(f"#!/bin/sh\nprintf '{shown.format(state, again, time)}'\n")
        assert slurm.is_preempted() == answer
    scontrol.write_text("#!/bin/sh\necho it is disabled >&2\nexit 1\n")
    assert slurm.requeue() == "it is disabled"


# ---- requeue ----


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Inside of a job of one task: the checkpoints that were there when it was asked for the queue."""
    named = {"JOB_ID": "12", "JOB_NAME": "train", "STEP_ID": "0", "NTASKS": "1", "STEP_TASKS_PER_NODE": "1"}
    for name, value in {**named, **dict.fromkeys(("PROCID", "LOCALID", "NODEID"), "0")}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    asked = []
    monkeypatch.setattr(slurm, "requeue", lambda: asked.append(sorted(path.name for path in tmp_path.glob("hpc*"))))
    return asked


def fit(folder, number=0, **options):
    """Six steps. In the middle of the third one it gets a signal."""

    def tell(trainer, *_):
        if trainer.global_step == 2 and number:
            os.kill(os.getpid(), number)

    game, strategy, told = Plain(), PhaseStrategy("single"), LambdaCallback(on_before_backward=tell)
    trainer(strategy, 1, 6, callbacks=[told], default_root_dir=folder, **options).fit(game, Whole(6))
    return snapshot(game, strategy)


def test_it_is_saved_after_the_step_and_goes_on_to_the_same_end(asked, tmp_path):
    whole = fit(tmp_path / "other")
    assert asked == []
    with pytest.raises(SIGTERMException):
        fit(tmp_path, signal.SIGUSR1)
    assert distance(fit(tmp_path), whole) == 0
    assert asked == [["hpc_ckpt_1.ckpt"]]  # whole, and once


@pytest.mark.parametrize(
    ("number", "environment", "queued"),
    [
        (signal.SIGTERM, {}, False),  # another signal asks for nothing
        (signal.SIGUSR2, {}, False),
        (signal.SIGUSR1, {"auto_requeue": False}, False),  # a person may turn it off, or choose the signal
        (signal.SIGUSR2, {"requeue_signal": signal.SIGUSR2}, True),
    ],
)
def test_the_signal_that_was_chosen_asks_for_the_queue(number, environment, queued, asked, tmp_path):
    plugins = [SLURMEnvironment(**environment)] if environment else []
    with pytest.raises(SIGTERMException):
        fit(tmp_path, number, plugins=plugins)
    assert asked == [["hpc_ckpt_1.ckpt"]] * queued and len(list(tmp_path.iterdir())) == queued
