"""The devices that a command computes on."""

import os
from dataclasses import dataclass

import torch
from jsonargparse import Namespace
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

from gan.app.run import options
from gan.files.errors import UserError
from gan.files.system import WINDOWS, check_ranks, cores
from strategies.accelerator import GPUS, TorchAccelerator, best_device, device_noun, say_devices
from strategies.processes.launchers import launched

LEFT_OUT = ("mps", "tpu")  # Lightning's class for mps refuses our strategy, that for tpu needs an older package


@dataclass(frozen=True)
class Computer:
    """The devices that a run computes on, of one type. `chosen` are their numbers; without them it takes the first."""

    accelerator: Accelerator
    kind: str
    devices: int
    nodes: int
    chosen: tuple[int, ...] = ()

    @property
    def processes(self) -> int:
        return self.devices * self.nodes

    @property
    def words(self) -> str:
        word = self.kind.upper() if self.kind not in GPUS else "GPU"
        return f"{self.processes} {word} process{'es' if self.processes > 1 else ''}"

    def device(self, local_rank: int) -> str:
        if self.kind == "cpu":
            return "cpu"
        return f"{self.kind}:{self.chosen[local_rank] if self.chosen else local_rank}"


def machine(settings: Namespace) -> Computer:
    """The devices to compute on: those of the settings, or else those of this machine. Refuses what is not there."""
    accelerator = _accelerator(settings.accelerator)
    kind = accelerator.get_parallel_devices(accelerator.parse_devices(1))[0].type
    on_cpu, there = kind == "cpu", accelerator.auto_device_count()
    if on_cpu and settings.precision == "16-mixed":
        raise UserError("--precision 16-mixed needs a GPU; type --precision bf16-mixed")
    chosen = _chosen(settings.devices, kind, there)
    devices, place = len(chosen) or settings.devices, launched()
    if place is not None:
        if devices not in ("auto", place.local_size):
            advice = f"leave --devices out, or {place.advice(devices)}"
            raise UserError(f"{place} and --devices says {settings.devices}; {advice}")
        if not on_cpu and place.local_size > there:
            advice = f"{place.advice(there)}{place.launcher.see}, or type --accelerator cpu"
            raise UserError(f"{place}, and the {device_noun(kind)}s that each sees are {there}; {advice}")
        devices, nodes = place.local_size, place.nodes
    else:
        if devices == "auto":
            single = settings.strategy == "single" or WINDOWS
            devices = 1 if single else min(2, cores()) if on_cpu else there
        if not on_cpu and devices > there:
            raise UserError(f"--devices {devices}: this machine has {say_devices(there, kind)}; type --devices {there}")
        devices, nodes = int(devices), options.nodes(settings.nodes)[1]  # Lightning takes no number of jsonargparse's
        check_ranks(devices * nodes, nodes)
    if on_cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // devices))  # each rank of this host has its part of the CPUs
    return Computer(accelerator, kind, devices, nodes, chosen)


def _accelerator(name: str) -> Accelerator:
    """What Lightning is given for a name: its own class of that name, or ours for whatever torch has found here."""
    here = best_device()
    if name == "auto" or (name == "gpu" and here in GPUS):
        name = here
    known = {name: each["accelerator"] for name, each in AcceleratorRegistry.items() if name not in LEFT_OUT}
    if name in known and known[name].is_available():
        return known[name]()
    if name == here:
        return TorchAccelerator()
    if name not in {"gpu", *LEFT_OUT, *known}:
        raise UserError(f"--accelerator {name} is not known; type {', '.join(sorted({'auto', 'gpu', here, *known}))}")
    raise UserError(f"there is no {device_noun(name)} here; type --accelerator {here}")


def _chosen(devices: int | str, kind: str, there: int) -> tuple[int, ...]:
    """The numbers of devices in `0,2`; none where `devices` is a number of devices or auto."""
    if isinstance(devices, int) or devices == "auto":
        return ()
    chosen = tuple(int(number) for number in devices.split(",") if number)
    if kind == "cpu":
        raise UserError(f"--devices {devices} chooses GPUs, and this is for the CPU; type --devices {len(chosen)}")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"--devices {devices} names a {device_noun(kind)} twice; each rank needs one of its own")
    if max(chosen) >= there:
        raise UserError(f"--devices {devices}: the {device_noun(kind)}s here have numbers from 0 to {there - 1}")
    return chosen
