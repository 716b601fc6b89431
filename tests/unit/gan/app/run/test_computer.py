"""Devices of a computer, and jobs of a cluster."""

import os
import re
import shlex

import pytest
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator, MPSAccelerator

from gan import fit as command
from gan.app.run import job, options
from gan.app.run.computer import machine
from gan.files.errors import UserError
from gan.files.system import cores
from strategies import TorchAccelerator
from tests.support.posix import not_on_windows

# ---- job ----


SIX = ("--run", "r3gan-faces", "--devices", "6")


@pytest.fixture(autouse=True)
def no_job(here, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


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
    tasks = {"nodes": "3", "ntasks-per-node": "6", "gres": "gpu:6", "cpus-per-task": "4"}
    files = {"chdir": str(here), "output": "r3gan-faces-%j.log", "open-mode": "append"}
    assert asks(text) == {"job-name": "r3gan-faces", **tasks, **files, "signal": "USR1@120", "requeue": ""}
    lines = text.splitlines()
    assert all(lines[number - 1].startswith("# ") for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert " ".join(runs(text)) == "--run r3gan-faces --strategy zero3 --batch-size 36 --accelerator gpu"
    assert "OMP_NUM_THREADS" not in text


def test_on_cpus_no_gpu_is_asked_for_and_a_task_computes_on_all_it_has(capsys):
    text = script(capsys, *SIX, "--accelerator", "cpu", "--workers", "9")
    assert "gres" not in asks(text) and asks(text)["cpus-per-task"] == "10"
    assert 'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"' in text


def test_what_is_resumed_is_resumed_by_the_job_and_paths_with_spaces_stay_whole(capsys, tmp_path, monkeypatch):
    (tmp_path / "my runs").mkdir()
    monkeypatch.chdir(tmp_path / "my runs")
    assert command.main(["--run", "r3gan-faces", "--dry-run", "--out", "all of them"]) == 0
    (tmp_path / "my runs/all of them/001-r3gan-faces/checkpoints/step-000001.ckpt").mkdir(parents=True)
    capsys.readouterr()
    text = script(capsys, "--resume", "all of them/001-r3gan-faces", "--devices", "2")
    assert f"--chdir='{tmp_path}/my runs'" in text
    assert runs(text) == ["--resume", "all of them/001-r3gan-faces", "--accelerator", "gpu"]


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
    assert options.parse(["--run", "r3gan-faces"])[0].workers == options.parse(["--run", "r3gan"])[0].workers == 5
    assert options.parse(["--run", "r3gan-faces", "--workers", "2"])[0].workers == 2


# ---- computer ----


ELASTIC = dict(TORCHELASTIC_RUN_ID="1", RANK="2", LOCAL_RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", GROUP_RANK="1")


@pytest.fixture
def computer(monkeypatch):
    """`computer(*typed, gpus=0, **variables)`: the devices for a command that a launcher may have started."""
    for name in [*os.environ]:
        if name in ELASTIC or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(*typed, gpus=0, **variables):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return machine(options.parse(["r3gan-faces", *typed])[0])

    return make


@not_on_windows
@pytest.mark.parametrize(
    ("typed", "gpus", "found"),
    [
        ("", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("", 0, ["cpu"] * min(2, cores())),
        ("--strategy single", 3, ["cuda:0"]),
        ("--devices 0,2", 4, ["cuda:0", "cuda:2"]),
        ("--devices 2,", 4, ["cuda:2"]),
        ("--devices 2", 4, ["cuda:0", "cuda:1"]),
        ("--devices 2", 0, ["cpu", "cpu"]),
    ],
)
def test_all_gpus_or_two_processes_are_the_default_and_gpus_are_chosen_by_their_numbers(typed, gpus, found, computer):
    made = computer(*typed.split(), gpus=gpus)
    assert [made.device(rank) for rank in range(made.processes)] == found


@not_on_windows
def test_ranks_share_the_cpus_that_a_job_has_and_not_those_of_its_machine(computer, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(8)}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    computer("--devices", "2")
    assert threads == [4]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--devices", "0,4"), "--devices 0,4: the GPUs here have numbers from 0 to 3"),
        (("--devices", "1,1"), "--devices 1,1 names a GPU twice"),
        (("--devices", "0,2", "--accelerator", "cpu"), "--devices 0,2 chooses GPUs, .* CPU; type --devices 2"),
        (("--devices", "5"), "--devices 5: this machine has 4 GPUs; type --devices 4"),
    ],
)
def test_gpus_that_are_not_there_are_refused(typed, words, computer):
    with pytest.raises(UserError, match=words):
        computer(*typed, gpus=4)


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu"])
def test_an_accelerator_has_the_name_of_its_devices(kind, computer, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: kind == "mps")
    for name in ("auto", kind, *["gpu"] * (kind != "hpu")):
        found = computer("--accelerator", name)
        assert (type(found.accelerator), found.device(0)) == (TorchAccelerator, f"{kind}:0")
    assert computer("--accelerator", "cpu").device(0) == "cpu"
    with pytest.raises(UserError, match=r"--devices 2: this machine has 1 (GPU|hpu device); type --devices 1$"):
        computer("--devices", "2")
    with pytest.raises(UserError, match=f"there is no GPU here; type --accelerator {kind}$"):
        computer("--accelerator", "cuda")


def test_an_accelerator_of_a_persons_own_is_found_by_its_name(computer, monkeypatch):
    class Own(CPUAccelerator):
        pass

    AcceleratorRegistry.register("own", Own)
    try:
        assert type(computer("--accelerator", "own").accelerator) is Own
    finally:
        AcceleratorRegistry.remove("own")
    with pytest.raises(UserError, match="--accelerator own is not known; type auto, cpu, cuda, gpu"):
        computer("--accelerator", "own")


def test_ranks_that_were_started_are_the_devices(computer):
    assert (computer(**ELASTIC).devices, computer().nodes) == (2, 2)
    assert computer("--devices", "1,3", gpus=4).device(1) == "cuda:3"
    with pytest.raises(UserError, match="torchrun started 2 ranks here and --devices says 4; leave --devices out"):
        computer("--devices", "4")
    with pytest.raises(UserError, match=r"2 ranks here, and the GPUs that each sees are 1; .*-node 1, or"):
        computer(gpus=1)
    assert computer("--accelerator", "cpu", gpus=1).kind == "cpu"
    alone = {**ELASTIC, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    assert computer(**alone).devices == 1
    with pytest.raises(UserError, match=r"started 1 rank here and --devices says 4; .*torchrun --nproc-per-node 4"):
        computer("--devices", "4")
