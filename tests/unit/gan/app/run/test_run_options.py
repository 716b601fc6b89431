"""What is typed for commands that play a run: strategies in a list."""

import pytest

from gan.app.run.run_options import strategies


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ddp"], ["ddp"]),
        (["ddp,zero3", "zero1+offload"], ["ddp", "zero3", "zero1+offload"]),
        (["generator=zero3,*=ddp"], ["generator=zero3,*=ddp"]),
        (["ddp,zero3,generator=zero3,*=ddp"], ["ddp", "zero3", "generator=zero3,*=ddp"]),
        (["a=zero1,*=ddp", "a=zero2,*=ddp", "ddp"], ["a=zero1,*=ddp", "a=zero2,*=ddp", "ddp"]),
        (["ddp,ddp", "ddp"], ["ddp"]),
    ],
)
def test_strategies_are_separated_by_commas_or_spaces(words, found):
    assert strategies(words) == found
