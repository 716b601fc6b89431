"""Which devices a run computes on."""

import os

import pytest
import torch

from gan.errors import UserError
from gan.fit import options
from gan.fit.computer import machine
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
        (("--devices", "5"), "--devices 5: there are 4 GPUs here; type --devices 4"),
    ],
)
def test_gpus_that_are_not_there_are_refused(typed, words, computer):
    with pytest.raises(UserError, match=words):
        computer(*typed, gpus=4)


def test_ranks_that_were_started_are_the_devices(computer):
    assert (computer(**ELASTIC).devices, computer().nodes) == (2, 2)
    assert computer("--devices", "1,3", gpus=4).device(1) == "cuda:3"
    with pytest.raises(UserError, match="torchrun started 2 ranks here and --devices says 4; leave --devices out"):
        computer("--devices", "4")
    with pytest.raises(UserError, match=r"2 ranks here, and the GPUs that each sees are 1; .*-node 1, or"):
        computer(gpus=1)
    assert computer("--accelerator", "cpu", gpus=1).accelerator == "cpu"


def test_one_task_drives_several_devices_where_the_policy_can(computer):
    alone = {**ELASTIC, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    assert computer("--strategy", "dp", "--devices", "4", **alone).devices == 4
    with pytest.raises(UserError, match=r"started 1 rank here and --devices says 4; .*torchrun --nproc-per-node 4"):
        computer("--devices", "4")
