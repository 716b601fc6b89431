"""`python -m gan.env`: what somebody who helps must know: versions, devices, and the settings of a run."""

import os
import platform
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from jsonargparse import Namespace

from gan.app.command import command
from gan.app.outputs import run, say
from gan.app.run import folder
from gan.app.run.parser import Parser
from gan.app.run.settings_file import MOST
from gan.files.disk import read_text
from gan.files.errors import table
from gan.files.system import cores, version_of

PACKAGES = "coordinated-gans torch torchvision lightning torchmetrics jsonargparse safetensors numpy pillow deepspeed"
_table = partial(table, left=(0, 1))
VARIABLES = ("CUDA", "GLOO", "MASTER", "NCCL", "OMP", "RANK", "SLURM_JOB", "SLURM_NTASKS", "TORCH", "WORLD")


@command
def main(argv: list[str]) -> None:
    settings = parse(argv)
    of_run = list(_run(settings))
    versions = {name: version_of(name) or "not installed" for name in PACKAGES.split()}
    versions["torch"] = str(torch.__version__)  # which says for which CUDA
    say(*_table([("system", platform.platform()), ("python", platform.python_version()), *versions.items()]))
    say("", *_table(list(_devices())))
    if variables := sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES)):
        say("", *_table(variables))
    say("", *of_run)


def parse(argv: list[str]) -> Namespace:
    what = "Print versions, devices and the settings of a run, to be put into a report of a problem."
    parser = Parser("python -m gan.env", "[RUN] [options]", what)
    what = "a run's folder, a checkpoint inside one, or auto: the newest run"
    parser.add_argument("which", metavar="RUN", nargs="?", default="auto", help=what)
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("runs"), help="where to look for that")
    return parser.parse_args(argv)


def _devices() -> Iterator[tuple[str, str]]:
    yield "cpu", f"{platform.machine()}, {cores()} cores, torch takes {torch.get_num_threads()} threads"
    for number in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(number)
        yield f"cuda:{number}", f"{of.name}, {of.total_memory / 1e9:.0f} GB"
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type != "cuda":
        yield other.type, str(torch.accelerator.device_count())
    backends = ("gloo", "nccl", "xccl", "mpi") if dist.is_available() else ()
    yield "backends", ", ".join(filter(dist.is_backend_available, backends)) or "none"


def _run(settings: Namespace) -> Iterator[str]:
    found = folder.find(settings.which, settings.out, None)
    if found is None:
        yield f"no run with a checkpoint in '{settings.out}'"
        return
    yield f"{found[0].path}, {found[1].name}"
    yield from ("  " + line for line in read_text(found[0].settings, MOST).splitlines())


if __name__ == "__main__":
    run(main)
