"""Ranks killed at random moments, by `make crashes`: each run reaches its end by itself, and nothing is lost."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gan.app.run.folder import RunFolder
from strategies.processes.board import NEVER, VARIABLE, Board
from tests.support.crashes import ARGUMENTS
from tests.support.parity import EXACT, distance
from tests.support.saved import tensors

WORLDS = [(policy, size) for policy in ("ddp", "zero1", "zero2", "zero3") for size in (2, 3)]
KILLS = 200
STEPS = 150
ROOT = Path(__file__).parents[2]


def start(folder, policy, size, every):
    folder.mkdir(exist_ok=True)
    settings = f"--max-steps {STEPS} --save-every {every} --strategy {policy} --devices {size} --restarts 1000"
    return subprocess.Popen(
        [sys.executable, "-m", "gan.fit", *ARGUMENTS.split(), *settings.split(), "--check", "false"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=(folder / "out.txt").open("a"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(process):
    """The processes of the ranks that the agent has started and that live."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def step_of(rank, size):
    """The furthest step of all ranks, from the board that their agent reads."""
    for variable in Path(f"/proc/{rank}/environ").read_bytes().split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name.decode() == VARIABLE:
            return Board(Path(value.decode()), size).furthest()
    return NEVER


def kill_one(process, size, chance, setup):
    """Kill a rank, at some moment of its set-up or of its next few steps. False if the run has ended before."""
    further = None
    until = chance.uniform(0, 6) if setup else chance.randint(1, 4)
    began = time.monotonic()
    while process.poll() is None:
        try:
            ranks = ranks_of(process)
            if len(ranks) == size:
                if setup and time.monotonic() - began > until:
                    break
                step = step_of(ranks[0], size)
                if not setup and step != NEVER:
                    further = step + until if further is None else further
                    if step >= further:
                        break
        except OSError:
            continue
        time.sleep(0.002)
    else:
        return False
    time.sleep(0 if setup else chance.uniform(0, 0.1))
    try:
        os.kill(chance.choice(ranks), signal.SIGKILL)
    except ProcessLookupError:
        return False
    while process.poll() is None and set(ranks) & set(ranks_of(process)):
        time.sleep(0.01)
    return True


@pytest.mark.promise(
    "a rank of `gan.fit` is killed or crashes",
    "all start again by themselves, from the last checkpoint; the third failure at one step is the last",
)
@pytest.mark.slow
def test_two_hundred_kills_with_restarts_lose_nothing(tmp_path, capsys):
    """Set CRASHES_SEED to see one again."""
    seed = int(os.environ.get("CRASHES_SEED", time.time()))
    number = int(os.environ.get("CRASHES", KILLS))
    chance = random.Random(seed)
    killed, differences = 0, []

    def say(line):
        with capsys.disabled():
            print(line, flush=True)

    say(f"CRASHES_SEED={seed}")
    for place, (policy, size) in enumerate(WORLDS):
        every = chance.choice("12")
        unbroken = start(tmp_path / f"unbroken{place}", policy, size, every)
        assert unbroken.wait(600) == 0
        folder = tmp_path / f"broken{place}"
        process = start(folder, policy, size, every)
        kills, setups, wanted = 0, 0, number // len(WORLDS) + (place < number % len(WORLDS))
        while kills < wanted:
            if process.poll() is not None:
                # By chance three kills in a row came at one step, which ends the run.
                assert "This was the third failure there" in (folder / "out.txt").read_text()[-500:]
                process = start(folder, policy, size, every)
            setup = setups < 2 and chance.random() < 0.2  # a third failure before the first step would end the run
            if kill_one(process, size, chance, setup):
                kills += 1
                setups = setups + 1 if setup else 0
        killed += kills
        code = process.wait(600)
        said = (folder / "out.txt").read_text()
        assert code == 0, said[-3000:]
        restarts = len(re.findall(r"^restart \d+ of 1000|third failure there", said, re.MULTILINE))
        assert restarts == kills, said[-3000:]
        assert len(list((folder / "runs").iterdir())) == 1
        one, other = (
            tensors(RunFolder(next((tmp_path / f"{kind}{place}" / "runs").iterdir())).checkpoint(STEPS))
            for kind in ("broken", "unbroken")
        )
        difference = distance(one, other)
        # Of three numbers the order of a sum matters, and DDP lays its buckets anew after its first backward.
        assert difference <= (0 if size == 2 else EXACT)
        differences.append(difference)
        say(f"{policy} on {size}, saved every {every}: {kills} killed, {restarts} restarts; off by {difference:.0e}")
    say(f"{killed} killed; the largest difference is {max(differences):.0e}")
    assert killed == number
