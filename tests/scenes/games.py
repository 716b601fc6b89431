"""Built-in games that are quick, or look at the whole batch; `make matrix` has all under every policy, and `deaf`."""

from dataclasses import replace
from typing import Any

from tests.ranks.test_games import byol, pictures, r3gan, vqgan
from tests.support.scene import DEAF, Scene

SLOW = (replace(DEAF, slow=True),)


def built_in(game: Any, **more: Any) -> Scene:
    return Scene(game, batches=pictures, steps=6, **more)


BUILT_IN = {
    "r3gan": built_in(r3gan, policies={"ddp": 2}, mutants=(DEAF,)),
    "vqgan": built_in(vqgan, policies={"ddp": 2, "zero3": 2}, checked=("zero3",), mutants=SLOW),
    "byol": built_in(byol, policies={"zero3": 2}, checked=("zero3",), mutants=SLOW),
}
