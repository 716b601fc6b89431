"""The devices that a command computes on."""

import os
from dataclasses import dataclass

import torch
from jsonargparse import Namespace

from gan.errors import UserError
from gan.fit import options
from gan.system import WINDOWS, check_ranks
from strategies.processes.launched import launched


@dataclass(frozen=True)
class Computer:
    """The devices that a run computes on. `chosen` are the numbers of its GPUs; without them it takes the first."""

    accelerator: str
    devices: int
    nodes: int
    chosen: tuple[int, ...] = ()

    @property
    def processes(self) -> int:
        """On all nodes together."""
        return self.devices * self.nodes

    def device(self, local_rank: int) -> str:
        if self.accelerator == "cpu":
            return "cpu"
        return f"cuda:{self.chosen[local_rank] if self.chosen else local_rank}"


def machine(settings: Namespace) -> Computer:
    """The devices to compute on: those of the settings, or else those of this machine. Refuses what is not there."""
    gpus = torch.cuda.device_count()
    accelerator = settings.accelerator if settings.accelerator != "auto" else ("gpu" if gpus else "cpu")
    if accelerator == "gpu" and not gpus:
        raise UserError("there is no GPU here; type --accelerator cpu")
    if accelerator == "cpu" and settings.precision == "16-mixed":
        raise UserError("--precision 16-mixed needs a GPU; type --precision bf16-mixed")
    chosen, devices = _chosen(settings.devices, accelerator, gpus), settings.devices
    if chosen:
        devices = len(chosen)
    place = launched()
    if place is not None and not (settings.strategy == "dp" and place.world_size == 1):
        if devices not in ("auto", place.local_size):
            advice = f"leave --devices out, or {place.advice(devices)}"
            raise UserError(f"{place} and --devices says {settings.devices}; {advice}")
        if accelerator == "gpu" and place.local_size > gpus:
            bound = ", or let each task see all GPUs: srun --gpu-bind=none" if place.by == "slurm" else ""
            advice = f"{place.advice(gpus)}{bound}, or type --accelerator cpu"
            raise UserError(f"{place}, and the GPUs that each sees are {gpus}; {advice}")
        _share_cpus(accelerator, place.local_size)
        return Computer(accelerator, place.local_size, place.nodes, chosen)
    if devices == "auto":
        single = settings.strategy == "single" or (WINDOWS and settings.strategy != "dp")
        devices = 1 if single else gpus if accelerator == "gpu" else min(2, os.cpu_count() or 1)
    if accelerator == "gpu" and devices > gpus:
        raise UserError(f"--devices {devices}: there are {gpus} GPUs here; type --devices {gpus}")
    _share_cpus(accelerator, devices)
    computer = Computer(accelerator, devices, options.nodes(settings.nodes)[1], chosen)
    if settings.strategy != "dp":
        check_ranks(computer.processes, computer.nodes)
    return computer


def _share_cpus(accelerator: str, ranks: int) -> None:
    """Give each rank of this host its part of the CPUs, unless OMP_NUM_THREADS says how many it has."""
    if accelerator == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))


def _chosen(devices: int | str, accelerator: str, gpus: int) -> tuple[int, ...]:
    """The numbers of GPUs in `0,2`; none where `devices` is a number of devices or auto."""
    if isinstance(devices, int) or devices == "auto":
        return ()
    chosen = tuple(int(number) for number in devices.split(",") if number)
    if accelerator == "cpu":
        raise UserError(f"--devices {devices} chooses GPUs, and this is for the CPU; type --devices {len(chosen)}")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"--devices {devices} names a GPU twice; each rank needs one of its own")
    if max(chosen) >= gpus:
        raise UserError(f"--devices {devices}: the GPUs here have numbers from 0 to {gpus - 1}")
    return chosen
