"""On a real Slurm: a job over two nodes is warned, saves, goes back into the queue, and ends as if never disturbed."""

import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from lightning.pytorch.utilities import rank_zero_only

from gan import fit as fit
from gan.app.run.folder import RunFolder
from tests.support import forked, parity
from tests.support.parity import BROKEN, EXACT
from tests.support.saved import tensors
from tests.support.slurm import cluster as started

ROOT = Path(__file__).parents[2]
STEPS = 8
ON_CPU = "--accelerator", "cpu", "--precision", "64-true"
OPTIONS = "--run", "tests.support.placed_run:placed", *ON_CPU, "--sample-every", "100"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started(tmp_path_factory.mktemp("slurm")) as one:
        yield one


def script(capsys, *more, devices=2):
    """What gan.fit prints for two machines with so many devices each."""
    assert fit.main([*OPTIONS, "--slurm", "--nodes", "2", "--devices", str(devices), *more]) == 0
    return capsys.readouterr().out


def submit(cluster, text, *more):
    """The number of the job. The nodes have no names of their own on this machine."""
    Path("job.sh").write_text(text)
    environment = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", forked.SERVER: forked.named()}
    return cluster.call("sbatch", "--parsable", "--cpus-per-task=1", *more, "job.sh", **environment)


def told(cluster, job, ranks, number):
    """Send a signal to all ranks of a job, which wait for it in their third step."""
    begun(cluster, "waits", ranks)
    cluster.call("scancel", f"--signal={number}", job)


def begun(cluster, what, ranks):
    cluster.until("the ranks do not come so far", lambda: len(list(Path().glob(f"{what}-*"))) == ranks, 180)


def goes_on(cluster, job, log=None):
    """What a job has said that went back into the queue once, and came to its end."""
    ended, said = cluster.wait(job, 240), Path(log or f"placed-{job}.log").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    return said


def place(begins, rank):
    """Rank, local rank, world size and node as a process had them, and the step at which it began."""
    return json.loads(Path(f"place-{begins}-{rank}").read_text())


def distance(one, other, step=STEPS):
    """Between weights, averages and optimizers of two runs at their ends."""
    found, wanted = tensors(RunFolder(Path(one)).checkpoint(STEPS)), tensors(RunFolder(Path(other)).checkpoint(step))
    assert len(found) > 30
    return parity.distance(found, wanted)


def without_slurm(folder, out, *more, ranks=1):
    """The same training by ranks that are there, or by one process."""
    os.chdir(folder)
    rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))
    place = {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": str(ranks)} if "LOCAL_RANK" in os.environ else {}
    with mock.patch.dict(os.environ, place):
        assert fit.main([*OPTIONS, "--out", out, *more]) == 0


def alone(here, *more):
    """One device, with checkpoints of the end and of the step before it."""
    without_slurm(here, "alone", "--strategy", "single", "--check", "false", "--save-every", str(STEPS - 1), *more)


@pytest.mark.promise(
    "a job of Slurm is warned or its machine is taken away",
    "saved, back in the queue, and goes on to the same end",
)
@pytest.mark.parametrize(
    ("devices", "limit"),
    [(1, ()), pytest.param(2, ("--time=2", "--signal=USR1@10"), marks=pytest.mark.slow)],
)
def test_a_job_that_is_warned_goes_on_by_itself_and_ends_as_one_that_was_not(
    devices, limit, cluster, here, ranks, capsys
):
    """Two machines, warned by hand, where a task is a fork, or by Slurm itself before a time limit of two minutes."""
    size = 2 * devices
    words = "--strategy", "zero3", "--check", "false"
    text = script(capsys, *words, devices=devices)
    task = f'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {sys.executable} -m '
    assert f"{task}gan.fit " in text
    job = submit(cluster, text if limit else text.replace(task, f"{task}{forked.__name__} "), *limit)
    if not limit:
        told(cluster, job, size, "USR1")
    ranks(size).run(without_slurm, here, "unbroken", *words, "--devices", str(size), ranks=size)
    alone(here)
    said = goes_on(cluster, job)
    assert f"job {job} goes back into the queue, to go on by itself\n" in said
    (stopped,) = map(int, re.findall(r"^stopped at step (\d), all saved", said, re.MULTILINE))
    assert stopped in (3, 4)
    for begins, step in ((0, 0), (1, stopped)):
        places = [place(begins, rank) for rank in range(size)]
        assert places == [[rank, rank % devices, size, rank // devices, step] for rank in range(size)]
    assert distance("runs/001-placed", "unbroken/001-placed") == 0
    assert distance("runs/001-placed", "alone/001-placed") < EXACT
    assert distance("runs/001-placed", "alone/001-placed", STEPS - 1) > BROKEN  # a step that was lost


@pytest.mark.slow
def test_a_job_that_is_warned_before_it_trains_starts_again(cluster, here, capsys):
    job = submit(cluster, script(capsys, "--strategy", "zero3", "--slow", "true"))
    begun(cluster, "builds", 4)
    cluster.call("scancel", "--signal=USR1", job)
    assert goes_on(cluster, job).count("goes back into the queue, to go on by itself") == 1
    assert place(1, 3) == [3, 1, 4, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "options", "words"),
    [("TERM", (), None), ("USR1", ("--no-requeue",), "Slurm did not take it: ")],
)
def test_a_job_that_may_not_go_on_by_itself_is_saved_and_ends(number, options, words, cluster, here, capsys):
    """A person has ended it, or does not want it back in the queue."""
    job = submit(cluster, script(capsys, "--strategy", "zero3"), *options)
    told(cluster, job, 4, number)
    ended, said = cluster.wait(job, 60), Path(f"placed-{job}.log").read_text()
    assert ended["Restarts"] == "0", said
    assert ("goes back into the queue" in said) == (words is not None)
    assert words is None or words in said
    assert re.search(r"^stopped at step [34], all saved", said, re.MULTILINE)
    assert len(list(here.glob("runs/001-placed/checkpoints/*.ckpt"))) == 1


@pytest.mark.promise("a job of Slurm is warned or its machine is taken away")
@pytest.mark.slow
def test_a_job_whose_machine_is_taken_away_is_saved_and_goes_on_too(cluster, here, capsys):
    """Slurm ends the tasks by SIGTERM, and puts the job back into the queue by itself."""
    job = submit(cluster, script(capsys, "--strategy", "zero3"))
    begun(cluster, "waits", 4)
    cluster.call("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    alone(here)
    cluster.wait(job, 30, {"PENDING"})
    cluster.call("scontrol", "update", "nodename=node2", "state=resume", check=False)  # or it is back by itself
    goes_on(cluster, job)
    assert place(1, 3) in ([3, 1, 4, 1, 3], [3, 1, 4, 1, 4])
    assert distance("runs/001-placed", "alone/001-placed") < EXACT


@pytest.mark.slow
def test_a_job_whose_machines_an_urgent_one_takes_after_some_time_is_saved_and_goes_on_too(cluster, here, capsys):
    """In the time of grace Slurm sends SIGTERM, and would take the end of the training for its completion."""
    job = submit(cluster, script(capsys, "--strategy", "zero3"))
    begun(cluster, "waits", 4)
    cluster.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=urgent", "--wrap", "sleep 1")
    alone(here)
    assert f"job {job} goes back into the queue, to go on by itself\n" in goes_on(cluster, job)
    assert place(1, 3) in ([3, 1, 4, 1, 3], [3, 1, 4, 1, 4])
    assert distance("runs/001-placed", "alone/001-placed") < EXACT


STEPS_OF_A_JOB = """#!/bin/bash
export OMP_NUM_THREADS=1
mkdir -p one two
srun true
cd one; srun -n2 --exact {0} & cd ../two; srun -n2 --exact {0} --strategy ddp & wait
"""


@pytest.mark.slow
def test_steps_of_one_job_train_runs_of_their_own_and_go_on_with_them(cluster, here, capsys):
    """By `-n`, side by side, and after another step, as after data are copied: the numbers of the steps say nothing."""
    command = f"{sys.executable} -m gan.fit {' '.join(OPTIONS)} --out ../runs --devices 2"
    job = submit(cluster, STEPS_OF_A_JOB.format(command), "-n4", "--output=said", "--open-mode=append", "--requeue")
    cluster.until("the ranks do not come so far", lambda: len(list(here.glob("*/waits-*"))) == 4, 180)
    settings = {run: (run / "settings.yaml").read_text() for run in here.glob("runs/*")}
    cluster.call("scontrol", "requeue", job)
    alone(here)
    goes_on(cluster, job, "said")
    assert len(settings) == 2 and settings == {run: (run / "settings.yaml").read_text() for run in here.glob("runs/*")}
    assert max(distance(run, "alone/001-placed") for run in settings) < EXACT


# ---- what is a rank, and what is a person at a terminal ----

ASKS = f"""{sys.executable} -c 'import runpy; s = runpy.run_path("{ROOT}/strategies/processes/slurm.py")
print("rank" if s["started_by_srun"]() else "no rank", s["cpus"]())'"""


def in_a_terminal(cluster, command):
    """What a command prints that has a terminal."""
    said = cluster.call("script", "--quiet", "--command", command, "/dev/null", SHELL="/bin/bash")
    return [line.strip("\0^@") for line in said.splitlines() if "rank" in line]


@pytest.mark.slow
def test_tasks_of_srun_are_ranks_and_shells_of_persons_are_not(cluster, here):
    """By the job's name, as Lightning tells them apart, srun inside of `salloc` and srun of a script are no ranks."""
    Path("asks").write_text(f"#!/bin/bash\n{ASKS}\n")
    Path("asks").chmod(0o755)
    assert in_a_terminal(cluster, "salloc -Q -n2 ./asks") == ["no rank None"]
    assert in_a_terminal(cluster, "srun -n2 --pty bash -c './asks; true'") == ["no rank None"]
    assert in_a_terminal(cluster, "srun -n2 --pty bash -c 'srun --overlap -n2 ./asks; true'") == ["rank 1"] * 2
    assert in_a_terminal(cluster, "salloc -Q -N2 --ntasks-per-node=2 -c3 srun -c3 bash ./asks") == ["rank 3"] * 4
    assert cluster.call("srun", "-N2", "-n3", "bash", "./asks").split("\n") == ["rank 1"] * 3
    cluster.call("sbatch", "--wait", "-n2", "--output=said", "asks")
    assert Path("said").read_text() == "no rank None\n"
