"""What to type where a player cannot have its policy."""

import pytest

from strategies import advice
from strategies.advice import type_instead
from strategies.policies import POLICIES
from strategies.policies.choice import choices

TWO = {"generator": "generator", "teacher": "generator", "discriminator": "discriminator"}


@pytest.mark.parametrize(
    ("typed", "leaders", "asked", "answer"),
    [
        ("pipeline", TWO, ("generator", "zero3"), "generator=zero3,*=pipeline"),
        ("pipeline", TWO, ("teacher", "zero3"), "generator=zero3,*=pipeline"),
        ("discriminator=pipeline,*=ddp", TWO, ("discriminator", "zero3"), "discriminator=zero3,*=ddp"),
        ("discriminator=pipeline,generator=ddp", TWO, ("teacher", "zero2"), "generator=zero2,discriminator=pipeline"),
        ("generator=pipeline,*=ddp", TWO, ("discriminator", "zero1"), "discriminator=zero1,generator=pipeline"),
        ("pipeline+stages:2", {"net": "net"}, ("net", "zero3"), "zero3"),
        (
            "zero3+recompute+hybrid:2",
            TWO,
            ("generator", "", "recompute"),
            "generator=zero3+hybrid:2,*=zero3+recompute+hybrid:2",
        ),
        ("generator=ddp+compile@0-1,*=ddp", TWO, ("generator", "", "compile"), "generator=ddp@0-1,*=ddp"),
    ],
)
def test_all_players_keep_what_they_have_but_one(monkeypatch, typed, leaders, asked, answer):
    for name in ("_typed", "_leaders"):
        monkeypatch.setattr(advice, name, {})
    advice.note_typed({name: str(each) for name, each in choices(typed, POLICIES).items()}, leaders)
    assert type_instead(*asked) == f"--strategy {answer}"
    choices(answer, POLICIES)  # it can be typed
