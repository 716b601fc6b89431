"""Fifty ranks that are killed at random moments, by `make crashes`: nothing is lost."""

import os
import random
import time

import pytest

from tests.support.crashes import FIVE, assert_named, made, newest, some_moment, train
from tests.support.parity import EXACT, distance

WORLDS = [(policy, size) for policy in ("ddp", "zero1", "zero2", "zero3") for size in (2, 3)]
FIFTY = 50


@pytest.mark.slow
def test_the_control_without_a_lifeline_nobody_is_named(tmp_path):
    ended = train(tmp_path, 2, *FIVE, "--strategy", "ddp", victim=0, itself="forward", tied=False)
    assert ended.process is not None
    with pytest.raises(AssertionError):
        assert_named(ended, 0)


@pytest.mark.promise("a rank is killed in training, while it writes, or anywhere")
@pytest.mark.slow
def test_fifty_ranks_killed_at_random_moments_lose_nothing(tmp_path, capsys):
    """Set CRASHES_SEED to see one again."""
    seed = int(os.environ.get("CRASHES_SEED", time.time()))
    chance = random.Random(seed)
    seconds, differences, saving = [], [], 0

    def say(line):
        with capsys.disabled():
            print(line, flush=True)

    say(f"CRASHES_SEED={seed}")
    for number, (policy, size) in enumerate(WORLDS):
        kills = FIFTY // len(WORLDS) + (number < FIFTY % len(WORLDS))
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
            # Of three numbers the order of a sum matters, and DDP lays its buckets anew after its first backward.
            assert difference <= (0 if size == 2 else EXACT)
            differences.append(difference)
            say(f"    {policy} on {size}: the run that was resumed differs from the unbroken one by {difference:.0e}")
    say(
        f"{len(seconds)} killed, {saving} of them while saving; the others ended within {max(seconds):.1f} s; the "
        f"largest difference is {max(differences):.0e}"
    )
    assert len(seconds) == FIFTY
