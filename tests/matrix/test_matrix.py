"""The matrix: every game under every policy equals one device. `make matrix` runs it and writes its table."""

import math
import platform
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gan import GanModule
from gan.files.errors import UserError
from strategies.policies import POLICIES
from strategies.policies.ddp import Dp
from strategies.sharding import bucket
from tests.ranks.test_games import GAMES, pictures
from tests.scenes.losses import Contrast, MeanFlow, Slopes
from tests.scenes.words import SEVERAL, Followed
from tests.support.composite import MIXES
from tests.support.doubled import doubled
from tests.support.hard_games import HARD
from tests.support.parity import BROKEN, EXACT, distance, train, vectors, weights
from tests.support.sharing_games import SHARING
from tests.support.trained_on import ON_GPUS, description

WRITTEN = Path(__file__).parents[2] / "strategies" / ("GPU.md" if ON_GPUS else "MATRIX.md")

FORMULAS = {game.__name__: game for game in (Contrast, MeanFlow, Slopes)}  # of all ranks' samples, and of derivatives
PLAYED: dict[str, tuple[Any, Any]] = {
    **{name: (game, pictures) for name, game in GAMES.items()},
    **{name: (game, vectors) for name, game in (HARD | SHARING | SEVERAL | FORMULAS).items()},
}
SETTINGS = {"Followed": {"limit_train_batches": Followed.epoch}}  # of the Trainer
THERE = [policy.name for policy in POLICIES.values() if policy.package is None or find_spec(policy.package) is not None]
CHOICES = dict(zip(THERE, THERE, strict=True))
CHOICES |= {"zero3+offload": "zero3+offload", "zero3 in pieces": "zero3"}
PIECE = 4096  # bytes of a bucket there: players of many buckets are gathered one by one
CHOICES |= {f"mix {number}": mix for number, mix in enumerate(MIXES, 1)}
CHOICES |= {"pipeline by two": "pipeline+stages:2"}  # on four ranks: two pipelines of two stages
COLUMNS = [("single", 1), *((name, world) for name in CHOICES for world in (2, 4)), ("deaf", 2)]
COLUMNS.remove(("pipeline by two", 2))

SECOND, UNCALLED = "which does not go through a pipeline", "has no forward; type"
BY_A_PIPELINE = {
    **dict.fromkeys(["r3gan", "wgan_gp", "stylegan", "stylegan_ada", "vqgan", "vqgan_learned", "Contrast"], SECOND),
    **dict.fromkeys(["BatchNormPenalty", "Penalty", "Adapters", "SharedBase", "Slopes"], SECOND),
    **dict.fromkeys(["dmd2_lora", "SharedLayer", "TwoPhases", "OwnMethods"], UNCALLED),
    **dict.fromkeys(["cut", "fastcut"], "is called by itself, not by the forward of its ResnetGenerator"),
    "dmd2": "has no two layers between which a pipeline could cut it",
    "biggan": "type --ortho 0",
    "hifigan": "a pipeline goes through its stages once",
    "SometimesReached": "player 'discriminator': ",
    "OneModule": "has parameters that another player has too",
    "MeanFlow": "is differentiated by torch.func or in forward mode",
}
REFUSED = {  # what a game cannot be trained under, and in which words that is said
    "WholeWeights": dict.fromkeys(
        CHOICES.keys() - {"single", "ddp", "zero1", "dp", "pipeline", "pipeline by two"},
        "cuts weights into pieces, and ",
    ),
}

for name, words in BY_A_PIPELINE.items():
    REFUSED[name] = REFUSED.get(name, {}) | dict.fromkeys(["pipeline", "pipeline by two"], words)

Found = float | str  # the largest deviation, or the words of a refusal
Table = dict[tuple[str, tuple[str, int]], Found]


def title(column: tuple[str, int]) -> str:
    return f"{column[0]}@{column[1]}"


# ---- a cell ----


def attempt(
    game: Callable[[], GanModule], batches: Any, policy: Any, world: int, size: int = bucket.SIZE, **kwargs: Any
) -> Any:
    """What training makes, or the words in which it is refused."""
    try:
        with doubled(policy), mock.patch.object(bucket, "SIZE", size):
            return train(game, batches, policy, world, check=policy != "deaf", **kwargs)
    except UserError as error:
        return str(error)


def fitted(choice: str, players: list[str]) -> str:
    """A mix for a game whose players have other names: its generator is their first, its discriminator their second."""
    if "=" not in choice:
        return choice
    pairs = [pair.split("=") for pair in choice.split(",")]
    own = {"generator": players[0], "discriminator": players[1]}
    return ",".join(f"{name if name in (*players, '*') else own[name]}={policy}" for name, policy in pairs)


def deviation(alone: dict[str, Any], results: list[dict[str, Any]]) -> float:
    """The largest difference of any rank from one device; infinite where a number is none."""
    if any(value.isnan().any() for result in results for value in result.values()):
        return math.inf
    apart = [distance(weights(alone), weights(result)) for result in results[1:]]
    return max(distance(alone, results[0]), *apart, 0.0)


def measure(name: str, column: tuple[str, int], ranks: Any, alone: dict[str, Any]) -> Found:
    (game, batches), (label, world) = PLAYED[name], column
    policy = fitted(CHOICES.get(label, label), [player.name for player in game().configure_players()])
    arguments, settings = (attempt, game, batches, policy, world), SETTINGS.get(name, {})
    if label == "zero3 in pieces":
        whole = "+whole" if name == "SometimesReached" else ""  # whose ranks read different weights
        arguments = (attempt, game, batches, policy + whole, world, PIECE)
    if policy == Dp.name:
        results = [attempt(game, batches, policy, 1, devices=world, **settings)]  # it starts them itself
    else:
        results = ranks(world).run(*arguments, **settings) if world > 1 else [attempt(*arguments[1:], **settings)]
    return results[0] if isinstance(results[0], str) else deviation(alone, results)


def verdict(name: str, column: tuple[str, int], found: Found) -> str:
    """What stands in the table."""
    words = "trains on one device" if column in (("single", 2), ("single", 4)) else REFUSED.get(name, {}).get(column[0])
    if isinstance(found, str):
        return "refused" if words is not None and words in found else "FAILS (refused)"
    passes = words is None and (BROKEN < found < math.inf if column[0] == "deaf" else found < EXACT)
    number = f"{found:.0e}" if found else "0"
    return number if passes else f"FAILS ({number})"


# ---- the table ----


PAGE = """# The matrix

`make {target}` writes this file; do not edit it.

Each row is a game of `tests/ranks/test_games.py`, `tests/scenes/` or `tests/support/*_games.py`,
each column a policy at a number of ranks. A cell trains the game for ten steps in float64 on {device} and gives the
largest difference of any weight, average or optimizer state from the same training on one device, over all ranks (of
ranks other than the first, the weights). Below {exact:.0e} it passes. `single@1` is one device once more. DeepSpeed
computes in float32, and there the rounding of ten steps is up to 1e+00 under any policy, for Adam divides it by
itself; so for this table its engines are told to compute in float64 (`tests/support/doubled.py`).

`zero3 in pieces` has buckets of 4 kB, so that weights are gathered when they are read, let go and gathered again as
those of large players are; `SometimesReached`, whose ranks read different weights, has the option `whole` there.

{mixes}

In a game with other players, a mix's generator is the first of them and its discriminator the second.

{rows}

{cells} cells, of which {failing} fail.

**Control**: `deaf` is `ddp` with its synchronisation taken out, and passes where it differs by more than {broken:.0e}:
in {heard} of {games} games.

**Refused** at start-up, in these words:

{refusals}

Python {python}, torch {torch}, lightning {lightning}, gloo.
"""


def text(table: Table) -> str:
    """strategies/MATRIX.md."""
    verdicts = {place: verdict(*place, found) for place, found in table.items()}
    rows = [["game", *map(title, COLUMNS)], ["---"] * (len(COLUMNS) + 1)]
    rows += [[f"`{name}`", *(verdicts[name, column] for column in COLUMNS)] for name in PLAYED]
    refusals: dict[tuple[str, str], list[str]] = {}
    for column in COLUMNS:
        cells = {name: table[name, column] for name in PLAYED}
        for words in dict.fromkeys(found for found in cells.values() if isinstance(found, str)):
            games = [name for name, found in cells.items() if found == words]
            whose = "" if len(games) == len(PLAYED) else " of " + ", ".join(f"`{name}`" for name in games)
            refusals.setdefault((whose, words), []).append(title(column))
    return PAGE.format(
        target="gpu" if ON_GPUS else "matrix",
        device=description(),
        exact=EXACT,
        broken=BROKEN,
        mixes="\n".join(f"- **{name}**: `{choice}`" for name, choice in CHOICES.items() if name != choice),
        rows="\n".join("| " + " | ".join(row) + " |" for row in rows),
        cells=len(table),
        failing=sum(each.startswith("FAILS") for each in verdicts.values()),
        heard=sum(not verdicts[name, ("deaf", 2)].startswith("FAILS") for name in PLAYED),
        games=len(PLAYED),
        refusals="\n".join(f"- {', '.join(columns)}{whose}: {words}" for (whose, words), columns in refusals.items()),
        python=platform.python_version(),
        torch=version("torch"),
        lightning=version("lightning"),
    )


def write(table: Table, path: Path) -> None:
    """Write the table, if every cell ran: a part of it never takes the place of the whole."""
    if table.keys() == {(name, column) for name in PLAYED for column in COLUMNS}:
        path.write_text(text(table))


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """What the cells found, written once all have."""
    found: Table = {}
    yield found
    write(found, WRITTEN)


@pytest.fixture(scope="session")
def alone() -> Callable[[str], dict[str, Any]]:
    """Each game trained by one process, once."""
    return cache(lambda name: train(*PLAYED[name], "single", **SETTINGS.get(name, {})))


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS, ids=title)
@pytest.mark.parametrize("name", PLAYED)
def test_every_game_under_every_policy_equals_one_device(name, column, ranks, alone, table):
    table[name, column] = math.inf  # what a crash leaves
    table[name, column] = measure(name, column, ranks, alone(name))
    assert not verdict(name, column, table[name, column]).startswith("FAILS"), table[name, column]


# ---- the table itself ----


def complete() -> Table:
    """As if every cell had passed."""
    found: Table = {(name, column): 3e-14 for name in PLAYED for column in COLUMNS}
    for name in PLAYED:
        found[name, ("deaf", 2)] = 0.02
        for world in (2, 4):
            found[name, ("single", world)] = f"policy 'single' trains on one device and there are {world} ranks"
            for label, words in REFUSED.get(name, {}).items():
                if (label, world) in COLUMNS:
                    found[name, (label, world)] = f"it {words}"
    return found


def test_a_table_of_passing_cells_says_so_if_all_have_run(tmp_path):
    partial = complete()
    partial.pop(("sean", ("zero3", 4)))
    write(partial, tmp_path / "MATRIX.md")
    assert not (tmp_path / "MATRIX.md").exists()
    write(complete(), tmp_path / "MATRIX.md")
    written = (tmp_path / "MATRIX.md").read_text()
    assert "FAILS" not in written
    assert ", of which 0 fail." in written
    rows = [line for line in written.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(PLAYED)
    assert {tuple(row.split(" | ")[1:4]) for row in rows} == {("3e-14", "refused", "refused")}
    assert "deepspeed3@2, deepspeed3@4" in written
    assert " of `WholeWeights`: it cuts weights into pieces, and " in written
    assert "- single@2: policy 'single' trains on one device" in written


@pytest.mark.parametrize(
    ("name", "column", "found"),
    [
        ("sean", ("zero3", 4), 2e-10),
        ("sean", ("zero3", 4), "some refusal"),
        ("sean", ("single", 2), 0.0),
        ("sean", ("single", 2), "another refusal"),
        ("sean", ("deaf", 2), 1e-7),
        ("sean", ("deaf", 2), math.inf),
        ("WholeWeights", ("zero3", 4), 0.0),
    ],
)
def test_a_failing_cell_stands_in_the_table(name, column, found, tmp_path):
    write(complete() | {(name, column): found}, tmp_path / "MATRIX.md")
    (row,) = (line for line in (tmp_path / "MATRIX.md").read_text().splitlines() if line.startswith(f"| `{name}` |"))
    assert [cell.startswith("FAILS") for cell in row.split(" | ")[1:]] == [each == column for each in COLUMNS]


def test_a_cell_sees_every_rank_and_what_is_not_a_number(alone):
    one = alone("Plain")
    wrong = {name: value.clone() for name, value in one.items()}
    first = next(iter(wrong))
    wrong[first] += 1.0
    assert deviation(one, [one, weights(one)]) == 0
    assert deviation(one, [one, weights(one), weights(wrong)]) == pytest.approx(1.0)
    for place in wrong:
        nothing = {**one, place: one[place] * math.nan}
        assert deviation(one, [nothing]) == math.inf
