"""Games that nobody has thought of train as one device does, wherever their players are, or are refused by name."""

import os
from functools import partial
from random import Random, SystemRandom
from typing import Any

import pytest

from gan.files.errors import UserError
from tests.support.duel import fit
from tests.support.parity import equals, often
from tests.support.random_games import RandomGame, placement
from tests.support.scene import PROMISED

FIRST = int(os.environ.get("GAMES_SEED") or SystemRandom().randrange(10**6))
STEPS = 4


def play(seed: int, placed: str, world: int, check: bool = False, **checkpoint: str) -> dict[str, Any] | str:
    """What training makes of a game on one rank, or the words in which it is refused."""
    how = {"check": check, "size": 64 if seed % 2 else 2**20, "at": STEPS // 2, **checkpoint}
    try:
        return fit(partial(RandomGame, seed), placed, world, STEPS, **how)
    except UserError as error:
        return str(error)


@pytest.mark.promise("a game that nobody has thought of", PROMISED)
@pytest.mark.parametrize("number", often(range(200), range(1)))
def test_a_random_game_trains_and_travels_as_on_one_device(number, ranks, tmp_path):
    seed, save = FIRST + number, str(tmp_path / "half.ckpt")
    chance, alone = Random(seed), play(seed, "single", 1)
    size = chance.choice((2, 2, 4)) if number > 1 else 2
    places = [(placement(chance), size, {}), (placement(chance), 2, {"resume": save})]
    for placed, world, checkpoint in places:
        checked = chance.random() < 0.5 and (number > 0 or not checkpoint)
        how = {"check": checked, **(checkpoint or {"save": save})}
        found = ranks(world).run(play, seed, placed, world, **how)
        try:
            if isinstance(found[0], str):
                assert found[0] == alone or ("pipeline" in placed and "as one device does" not in found[0])
                break
            equals(found, alone)
        except AssertionError as error:
            raise AssertionError(
                f"GAMES_SEED={FIRST}, game {number}: {placed} on {world} ranks; {str(found)[:500]}"
            ) from error
