"""What Slurm tells the processes of a job by environment variables, and how a job gets back into the queue."""

import os
import re
import subprocess
from collections.abc import Mapping


def started_by_srun(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of the tasks that srun started, each of which is a rank.

    The script of a job is no task of srun, and has no step. A shell that a person works in (`salloc`, `srun --pty
    bash`) may be the task of a step. What is typed there is no rank. The name of the job does not tell: srun calls
    its job "bash" too when it starts a script, and inside `salloc` all jobs are called "interactive".
    """
    return "SLURM_STEP_ID" in variables and not _in_a_shell(variables)


def _in_a_shell(variables: Mapping[str, str]) -> bool:
    """Whether the task is not this process, and reads from a terminal."""
    task = variables.get("SLURM_TASK_PID", "")
    try:
        return task != str(os.getpid()) and os.readlink(f"/proc/{task}/fd/0").startswith("/dev/pts/")
    except OSError:  # the task is not seen from inside of a container
        return False


def tasks_here(variables: Mapping[str, str] = os.environ) -> int:
    """How many tasks srun started on this node. Slurm writes those of all nodes: `2(x3),1` is 2, 2, 2, 1."""
    nodes = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables["SLURM_STEP_TASKS_PER_NODE"])
    counts = [int(count) for count, times in nodes for _ in range(int(times or 1))]
    return counts[int(variables["SLURM_NODEID"])]


def cpus(variables: Mapping[str, str] = os.environ) -> int | None:
    """How many CPUs each rank has. None where srun did not start the ranks."""
    if not started_by_srun(variables):
        return None
    if "SLURM_CPUS_PER_TASK" in variables:
        return int(variables["SLURM_CPUS_PER_TASK"])
    return max(1, int(variables.get("SLURM_CPUS_ON_NODE", 1)) // tasks_here(variables))


def job(variables: Mapping[str, str] = os.environ) -> str | None:
    """The job that this process belongs to. None outside of Slurm.

    The last job of an array has the number of the whole array, so a job of an array is named by both numbers.
    """
    if "SLURM_ARRAY_JOB_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables.get('SLURM_ARRAY_TASK_ID', '')}"
    return variables.get("SLURM_JOB_ID")


def is_preempted() -> bool:
    """Whether Slurm takes this job's machines for another job, and leaves it some time: the GraceTime of a partition.

    Slurm sends SIGTERM then, as for `scancel`. A job that ends in this time is complete, unless it is put back.
    """
    asked = ["scontrol", "show", "job", job() or ""]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = dict(re.findall(r"(\w+)=(\S*)", said))
    preempted = found.get("PreemptTime", "None") != "None"
    return preempted and found.get("JobState") == "RUNNING" and found.get("Requeue") == "1"


def requeue() -> str | None:
    """Put this job back into the queue; why not, where Slurm refuses. Slurm ends the job at once, so call it last."""
    try:
        done = subprocess.run(["scontrol", "requeue", job() or ""], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or None
