"""The script of a job: what it asks Slurm for, and what its tasks run."""

import re
import shlex

import pytest

from gan import fit as command
from gan.app.run import job, options
from gan.files.errors import UserError
from tests.support.posix import not_on_windows

SIX = ("--run", "r3gan-faces", "--devices", "6")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def script(capsys, *typed):
    assert command.main([*typed, "--slurm"]) == 0
    return capsys.readouterr().out


def asks(text):
    """What a script asks Slurm for."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def runs(text):
    """The options of gan.fit that a task gets."""
    words = shlex.split(text.splitlines()[-2])
    return words[words.index("gan.fit") + 1 :]


def test_a_task_for_each_gpu_and_each_line_is_explained(capsys, here):
    text = script(capsys, *SIX, "--nodes=3", "--strategy", "zero3", "--batch-size", "36")
    assert asks(text) == {
        "job-name": "r3gan-faces",
        "nodes": "3",
        "ntasks-per-node": "6",
        "gres": "gpu:6",
        "cpus-per-task": "4",
        "chdir": str(here),
        "output": "r3gan-faces-%j.log",
        "open-mode": "append",
        "signal": "USR1@120",
        "requeue": "",
    }
    lines = text.splitlines()
    assert all(lines[number - 1].startswith("# ") for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert runs(text) == [
        *("--run", "r3gan-faces", "--strategy", "zero3", "--batch-size", "36"),
        *("--accelerator", "gpu"),
    ]
    assert "OMP_NUM_THREADS" not in text


def test_on_cpus_no_gpu_is_asked_for_and_a_task_computes_on_all_it_has(capsys):
    text = script(capsys, *SIX, "--accelerator", "cpu", "--workers", "9")
    assert "gres" not in asks(text) and asks(text)["cpus-per-task"] == "10"
    assert 'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"' in text


def test_dp_is_a_task_for_each_device_of_one_machine(capsys):
    text = script(capsys, *SIX, "--strategy", "dp")
    assert (asks(text)["ntasks-per-node"], asks(text)["gres"]) == ("6", "gpu:6")
    assert "--devices" not in runs(text)
    assert command.main([*SIX, "--strategy", "dp", "--slurm", "--nodes", "2"]) == 2
    assert "dp trains on one machine, and there are 2" in capsys.readouterr().err


def test_what_is_resumed_is_resumed_by_the_job(capsys, here):
    assert command.main(["--run", "r3gan-faces", "--dry-run"]) == 0
    (here / "runs/001-r3gan-faces/checkpoints/step-000001.ckpt").mkdir(parents=True)
    capsys.readouterr()
    text = script(capsys, "--resume", "runs/001-r3gan-faces", "--devices", "2")
    assert runs(text) == ["--resume", "runs/001-r3gan-faces", "--accelerator", "gpu"]


def test_paths_with_spaces_stay_whole(capsys, tmp_path, monkeypatch):
    (tmp_path / "my runs").mkdir()
    monkeypatch.chdir(tmp_path / "my runs")
    text = script(capsys, *SIX, "--out", "all of them")
    assert f"--chdir='{tmp_path}/my runs'" in text
    assert runs(text)[-4:-2] == ["--out", "all of them"]


@pytest.mark.parametrize(
    ("typed", "environment", "words"),
    [
        ((), {}, "the devices of the cluster are not seen from here; type --devices N"),
        (SIX, {"SLURM_JOB_ID": "12"}, "this is inside of job 12; leave --slurm out"),
        ((*SIX, "--strategy", "zero9"), {}, "zero9"),
        ((*SIX, "--submit"), {"PATH": ""}, "this machine has no sbatch; type --slurm without --submit"),
    ],
)
def test_what_cannot_be_is_refused(typed, environment, words, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert command.main([*typed, "--slurm"]) == 2
    assert words in capsys.readouterr().err


@not_on_windows
def test_submitting_gives_the_script_to_sbatch_and_says_the_job(capsys, here, monkeypatch):
    sbatch = here / "sbatch"
    sbatch.write_text(f"#!/bin/sh\n/bin/cat > {here}/got\necho '34;cluster'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(here))
    expected = script(capsys, *SIX)
    assert command.main([*SIX, "--submit"]) == 0
    assert "job 34 is in the queue" in capsys.readouterr().out
    assert (here / "got").read_text() == expected.removesuffix("\n")
    sbatch.write_text("#!/bin/sh\necho 'Invalid account' >&2\nexit 1\n")
    with pytest.raises(UserError, match="sbatch refused the job: Invalid account"):
        job.submit(expected)


def test_in_a_job_loaders_have_all_cpus_of_a_task_but_one(monkeypatch):
    assert options.parse(["--run", "r3gan-faces"])[0].workers == 0
    for name, value in (("STEP_ID", "0"), ("CPUS_PER_TASK", "6")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert options.parse(["--run", "r3gan-faces"])[0].workers == 5
    assert options.parse(["--run", "r3gan-faces", "--workers", "2"])[0].workers == 2
