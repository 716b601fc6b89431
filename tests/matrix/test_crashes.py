"""Ranks killed at random moments, by `make crashes`: nothing is lost, also where runs go on by themselves.

Set CRASHES_SEED to see one again.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strategies.processes.board import NEVER, VARIABLE, Board
from tests.support.crashes import ARGUMENTS, FIVE, assert_named, made, newest, some_moment, train
from tests.support.parity import EXACT, distance
from tests.support.worlds import ROOT

pytestmark = pytest.mark.slow
WORLDS = [(policy, size) for policy in ("ddp", "zero1", "zero2", "zero3") for size in (2, 3)]
FIFTY, KILLS = 50, 200
STEPS = 150  # of a run that goes on by itself


def exact(size):
    """Of three numbers the order of a sum matters, and DDP lays its buckets anew after its first backward."""
    return 0 if size == 2 else EXACT


def shares(number):
    """How many of so many kills are in each world."""
    return [(*world, number // len(WORLDS) + (place < number % len(WORLDS))) for place, world in enumerate(WORLDS)]


@pytest.fixture
def say(capsys):
    def say(*words):
        with capsys.disabled():
            print(*words, flush=True)

    return say


@pytest.fixture
def chance(say):
    seed = int(os.environ.get("CRASHES_SEED", time.time()))
    say(f"CRASHES_SEED={seed}")
    return random.Random(seed)


def test_the_control_without_a_lifeline_nobody_is_named(tmp_path):
    ended = train(tmp_path, 2, *FIVE, "--strategy", "ddp", victim=0, itself="forward", tied=False)
    assert ended.process is not None
    with pytest.raises(AssertionError):
        assert_named(ended, 0)


@pytest.mark.promise("a rank is killed in training, while it writes, or anywhere")
def test_fifty_ranks_killed_at_random_moments_lose_nothing(tmp_path, say, chance):
    seconds, differences, saving = [], [], 0
    for number, (policy, size, kills) in enumerate(shares(FIFTY)):
        every = chance.choice("12")
        settings = "--max-steps", "24", "--save-every", every, "--strategy", policy
        unbroken = train(tmp_path / f"unbroken{number}", size, *settings)
        assert unbroken.statuses == [0] * size, unbroken.said
        runs = 0
        while kills:
            runs += 1
            folder, ended = tmp_path / f"broken{number}-{runs}", None
            while ended is None or ended.process is not None:
                victim, (words, kill) = chance.randrange(size), some_moment(chance)
                before = newest(folder)
                ended = train(folder, size, *settings, **(dict(victim=victim, kill=kill) if kills else {}))
                if before is not None:
                    assert f"from {before.relative_to(folder)}" in ended.said[0], ended.said
                if ended.process is not None:
                    assert_named(ended, victim)
                    kills -= 1
                    seconds.append(ended.seconds)
                    saving += "save" in words
                    saved = newest(folder)
                    say(
                        f"{len(seconds):3} {policy} on {size}, saved every {every}: rank {victim} killed {words}; the "
                        f"others ended after {ended.seconds:.1f} s; the newest checkpoint is {saved and saved.name}"
                    )
            assert ended.statuses == [0] * size, ended.said
            difference = distance(made(folder), made(tmp_path / f"unbroken{number}"))
            assert difference <= exact(size)
            differences.append(difference)
            say(f"    {policy} on {size}: the run that was resumed differs from the unbroken one by {difference:.0e}")
    say(
        f"{len(seconds)} killed, {saving} of them while saving; the others ended within {max(seconds):.1f} s; the "
        f"largest difference is {max(differences):.0e}"
    )
    assert len(seconds) == FIFTY


def start(folder, policy, size, every):
    folder.mkdir(exist_ok=True)
    settings = f"--max-steps {STEPS} --save-every {every} --strategy {policy} --devices {size} --restarts 1000"
    return subprocess.Popen(
        [sys.executable, "-m", "gan.fit", *ARGUMENTS.split(), *settings.split(), "--check", "false"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
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
    "all start again by themselves, from the last checkpoint; the third failure at one step is the last; "
    "so is an error that comes there twice",
)
def test_two_hundred_kills_with_restarts_lose_nothing(tmp_path, say, chance):
    differences = []
    for place, (policy, size, wanted) in enumerate(shares(int(os.environ.get("CRASHES", KILLS)))):
        every = chance.choice("12")
        unbroken = start(tmp_path / f"unbroken{place}", policy, size, every)
        assert unbroken.wait(600) == 0
        folder = tmp_path / f"broken{place}"
        process = start(folder, policy, size, every)
        kills, setups = 0, 0
        while kills < wanted:
            if process.poll() is not None:
                # By chance three kills in a row came at one step, which ends the run.
                assert "This was the third failure there" in (folder / "out.txt").read_text()[-500:]
                process = start(folder, policy, size, every)
            setup = setups < 2 and chance.random() < 0.2  # a third failure before the first step would end the run
            if kill_one(process, size, chance, setup):
                kills += 1
                setups = setups + 1 if setup else 0
        code = process.wait(600)
        said = (folder / "out.txt").read_text()
        assert code == 0, said[-3000:]
        restarts = len(re.findall(r"^restart \d+ of 1000|third failure there", said, re.MULTILINE))
        assert restarts == kills, said[-3000:]
        assert len(list((folder / "runs").iterdir())) == 1
        assert newest(folder).name == f"step-{STEPS:06d}.ckpt"
        difference = distance(made(folder), made(tmp_path / f"unbroken{place}"))
        assert difference <= exact(size)
        differences.append(difference)
        say(f"{policy} on {size}, saved every {every}: {kills} killed, {restarts} restarts; off by {difference:.0e}")
    say(f"the largest difference is {max(differences):.0e}")
