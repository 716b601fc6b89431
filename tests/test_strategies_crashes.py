"""Ranks that are killed: the others end and name them, the last whole checkpoint loads, and nothing is lost."""

import os
import random
import re
import time

import pytest
import torch

from tests.crashes import assert_named, made, newest, some_moment, train


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(
    ("policy", "size", "victim", "itself"),
    [
        ("ddp", 2, 0, "forward"),
        ("zero3", 3, 1, "collective"),
        ("zero1", 2, 0, "writes"),
    ],
)
def test_the_others_of_a_killed_rank_end_by_its_name_and_the_run_goes_on(policy, size, victim, itself, tmp_path):
    steps = "--max-steps", "5", "--save-every", "1", "--strategy", policy
    ended = train(tmp_path, size, *steps, victim=victim, itself=itself)
    assert_named(ended, victim)
    speaker = ended.said[1 if victim == 0 else 0]
    assert re.search(r"go on from the last whole checkpoint with\n  python -m gan.fit --resume runs/001-wgan", speaker)
    saved = newest(tmp_path)
    assert saved.is_relative_to(tmp_path / "runs" / "001-wgan-gp-faces")
    again = train(tmp_path, size, *steps)
    assert again.statuses == [0] * size, again.said
    assert f"from {saved.relative_to(tmp_path)}" in again.said[0]
    unbroken = train(tmp_path / "unbroken", size, *steps)
    assert unbroken.statuses == [0] * size, unbroken.said
    same(made(tmp_path), made(tmp_path / "unbroken"))


# ---- fifty times: `make crashes` ----

WORLDS = [(policy, size) for policy in ("ddp", "zero1", "zero2", "zero3") for size in (2, 3)]
FIFTY = 50


@pytest.mark.slow
def test_fifty_ranks_killed_at_random_moments_lose_nothing(tmp_path, capsys):
    """Set CRASHES_SEED to see one again."""
    seed = int(os.environ.get("CRASHES_SEED", time.time()))
    chance = random.Random(seed)
    seconds, saving, lines = [], 0, [f"seed {seed}"]

    def say(line):
        with capsys.disabled():
            print(line, flush=True)

    say(lines[0])
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
            same(made(folder), made(tmp_path / f"unbroken{number}"))
            say(f"    {policy} on {size}: equal to the unbroken run, bit for bit")
    say(f"{len(seconds)} killed, {saving} of them while saving; the others ended within {max(seconds):.1f} s")
    assert len(seconds) == FIFTY
