"""What a scene is: a game, and what is true of it. The scenes are in tests/scenes/."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from strategies.sharding import bucket
from tests.support.parity import OFTEN, vectors

SMALL = 400  # bytes of a bucket: a player has several
POLICIES = {"single": 1, "ddp": 2, "zero1": 4, "zero2": 2, "zero3": 2, "fsdp": 2}  # and the ranks of each
PROMISED = "the training of one device, or a refusal by name"
ENGINES = {"deepspeed2": 2, "deepspeed3": 2}


@dataclass(frozen=True)
class Mutant:
    """What must give another training: another game, or other settings."""

    name: str
    policy: str = "single"
    game: Any = None  # in place of the scene's
    settings: dict[str, Any] = field(default_factory=dict)
    batches: Any = None
    callbacks: Any = None
    slow: bool = False
    ranks: int = 2


DEAF = Mutant("nothing is synchronised", "deaf")
RARELY_DEAF = replace(DEAF, slow=True)


def having(game: Any, **members: Any) -> Any:
    """A game with other methods or attributes."""
    return type(game.__name__, (game,), members)


def made_of(game: Any, **networks: Callable[[], Any]) -> Any:
    """A game with other networks."""

    def make(self: Any) -> None:
        game.__init__(self)
        for name, network in networks.items():
            setattr(self, name, network())

    return having(game, __init__=make)


def nothing(*_: Any) -> None:
    """In place of a function of ours."""


@dataclass(frozen=True)
class Refused:
    """What is refused, in which words, by all ranks."""

    game: Any
    policy: str  # or several, with spaces between them
    words: str | tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    unsaid: str = " nobody says this "
    check: bool = True
    slow: bool = False


@dataclass(frozen=True)
class Scene:
    """A game, and the answers to five questions. `tests/ranks/test_scenes.py` asks them.

    `by_hand`: a loop in plain torch, whose weights and averages have the names of a snapshot; else the game itself (or
    `alone`) is trained on one device. `checked`: under these policies the first step is tried, and nothing is said.
    `saved`: under these policies a checkpoint is made half way, and training goes on from it to the last bit.
    `arrives`: under these policies and ranks training goes on from the first of these checkpoints, as one device would.
    """

    game: Callable[[], Any]
    by_hand: Callable[[int], dict[str, Any]] | None = None  # of so many steps
    alone: Callable[[], Any] | None = None
    policies: dict[str, int] = field(default_factory=lambda: POLICIES)
    often: tuple[str, ...] = OFTEN  # the policies that `make test` plays
    four: tuple[str, ...] = ()  # those that `make matrix` plays on four ranks too
    checked: tuple[str, ...] = ()
    mutants: tuple[Mutant, ...] = (RARELY_DEAF,)
    refused: tuple[Refused, ...] = ()
    saved: tuple[str, ...] = ()
    arrives: tuple[tuple[str, int], ...] = ()
    promises: tuple[str, ...] = ()
    batches: Callable[[int], Any] = vectors
    steps: int = 4
    bucket: int = bucket.SIZE
    settings: dict[str, Any] = field(default_factory=dict)  # of the Trainer
    callbacks: Callable[[], list[Any]] = list
    travels_often: bool = True  # `make test` asks the questions of checkpoints too

    def refusals(self) -> list[Refused]:
        """Each under one policy."""
        return [replace(wrong, policy=policy) for wrong in self.refused for policy in wrong.policy.split()]
