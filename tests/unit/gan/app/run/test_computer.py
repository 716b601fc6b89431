"""Which devices a run computes on."""

import os

import pytest
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator, MPSAccelerator

from gan.app.run import options
from gan.app.run.computer import machine
from gan.files.errors import UserError
from strategies import TorchAccelerator
from tests.support.posix import not_on_windows

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
def test_all_gpus_or_two_processes_are_the_default(computer):
    assert (computer(gpus=3).devices, computer().devices) == (3, min(2, os.cpu_count()))
    assert computer("--strategy", "single", gpus=3).devices == 1


@not_on_windows
def test_gpus_are_chosen_by_their_numbers(computer):
    two = computer("--devices", "0,2", gpus=4)
    assert (two.devices, two.chosen, two.processes) == (2, (0, 2), 2)
    assert [two.device(rank) for rank in range(2)] == ["cuda:0", "cuda:2"]
    one = computer("--devices", "2,", gpus=4)
    assert (one.devices, one.device(0)) == (1, "cuda:2")
    assert computer("--devices", "2", gpus=4).device(1) == "cuda:1"
    assert computer("--devices", "2").device(1) == "cpu"


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


def test_one_task_drives_one_device(computer):
    alone = {**ELASTIC, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    assert computer(**alone).devices == 1
    with pytest.raises(UserError, match=r"started 1 rank here and --devices says 4; .*torchrun --nproc-per-node 4"):
        computer("--devices", "4")
