"""`gan.fit --slurm`: the script of a Slurm job that trains, and its submission."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace

from gan.app.run.command_line import without
from gan.app.run.options import nodes
from gan.files.errors import UserError, explained
from gan.runs import short_name
from strategies.processes import slurm

AHEAD = 120  # seconds from the warning to the time limit: a step and a checkpoint. Slurm may warn a minute earlier
CPUS = 4  # of each task, if the run does not want more workers
GIVEN = ("--slurm", "--submit", "--devices", "--nodes", "--num_nodes", "--accelerator", "--rendezvous")

SCRIPT = """\
#!/bin/bash
# Trains {name} on {machines}. Submit it: sbatch FILE. What is typed with it overrides the lines below:
#   sbatch --partition=NAME --account=NAME --time=8:00:00 FILE

# The name in the queue.
#SBATCH --job-name={name}
# The machines.
#SBATCH --nodes={nodes}
# A task for each device.
#SBATCH --ntasks-per-node={tasks}
{gpus}# The CPUs of each task: one for the task itself, the others prepare its batches (--workers).
#SBATCH --cpus-per-task={cpus}
# Where gan.fit was typed. All machines must share this folder.
#SBATCH --chdir={here}
# What the run prints goes here.
#SBATCH --output={name}-%j.log
# A job that starts again writes on in the same file.
#SBATCH --open-mode=append
# So many seconds before its time limit Slurm warns all tasks. They end their step, save, and requeue the job.
#SBATCH --signal={warning}@{ahead}
# The job may start again, and then goes on: after its time limit, or when its machines were needed for other jobs.
#SBATCH --requeue

{threads}# Starts all tasks. They take the machines, the devices and the CPUs from Slurm.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {command}
"""
GPUS = """\
# The GPUs of each machine.
#SBATCH --gres=gpu:{}
"""
THREADS = """\
# A task computes on all of its CPUs.
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
"""


def script(argv: Sequence[str], settings: Namespace, is_dp: bool) -> str:
    if (job := slurm.job()) is not None:
        raise UserError(f"this is inside of job {job}; leave --slurm out, or type it outside of the job")
    devices = 1 if settings.strategy == "single" and settings.devices == "auto" else settings.devices
    if not isinstance(devices, int):
        raise UserError("the devices of the cluster are not seen from here; type --devices N, for each machine")
    least, most = nodes(settings.nodes)
    machines, on_cpu = str(most) if least == most else f"{least}-{most}", settings.accelerator == "cpu"
    if is_dp and machines != "1":
        raise UserError(f"strategy dp trains on one machine, and there are {machines}; leave --nodes out")
    name, kind = short_name(settings.run), "gpu" if settings.accelerator == "auto" else settings.accelerator
    typed = without(argv, GIVEN)  # but for what the script says itself, and Slurm tells a task
    return SCRIPT.format(
        name=name,
        machines=f"{machines} x {devices} {'CPU processes' if on_cpu else 'GPUs'}",
        nodes=machines,
        tasks=devices,
        gpus="" if on_cpu else GPUS.format(devices),
        cpus=max(CPUS, (settings.get("workers") or 0) + 1),
        here=shlex.quote(str(Path.cwd())),
        warning="USR1",  # WARNING of stopping.py, which Windows does not have
        ahead=AHEAD,
        threads=THREADS if on_cpu else "",
        command=shlex.join([sys.executable, "-m", "gan.fit", *typed, "--accelerator", kind]),
    )


def submit(text: str) -> str:
    """Give the script to sbatch; what to say about it."""
    absent = "this machine has no sbatch; type --slurm without --submit, and submit the script where there is one"
    with explained(absent, FileNotFoundError):
        done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"sbatch refused the job: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    return f"job {job} is in the queue; to save and end it: scancel {job}"
