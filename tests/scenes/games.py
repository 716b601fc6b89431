"""Built-in games that are quick, or look at the whole batch; `make matrix` has all under every policy, and `deaf`."""

from typing import Any

from tests.ranks.test_games import hifigan, pictures, stylegan, vqgan
from tests.support.scene import Scene


def built_in(game: Any, **more: Any) -> Scene:
    return Scene(game, batches=pictures, **more)


BUILT_IN = {
    "vqgan": built_in(vqgan, policies={"ddp": 2, "zero3": 2}, often=("ddp",), steps=4, checked=("zero3",)),
    "hifigan": built_in(hifigan, policies={"zero3": 2}, bucket=2**13, steps=2),
    "stylegan": built_in(  # its discriminator compares samples
        stylegan, policies={"zero3": 2, "zero2": 2, "zero2+recompute": 2}, often=("zero3",), four=("zero2",)
    ),
}  # fmt: skip
