"""A game of two for the words of Player and Phase, and the same training as a loop by hand in plain torch."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam

from gan import GanModule, Phase, Player
from strategies import PhaseStrategy
from strategies.sharding import bucket
from tests.support.doubled import doubled
from tests.support.hard_games import mlp
from tests.support.parity import STEPS, Whole, snapshot, trainer, vectors
from tests.support.saved import Saves
from tests.support.scene import SMALL

adam = partial(Adam, lr=2e-2, betas=(0.5, 0.9))


def judge_network() -> nn.Module:
    return nn.ModuleDict({"trunk": mlp(6, 8), "head": nn.Linear(8, 1)})


class Duel(GanModule):
    """Adversarial learning on vectors. Subclasses say more about its players and phases."""

    of_judge: ClassVar[dict[str, Any]] = {}
    of_generator: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.judge = mlp(4, 6), judge_network()

    def configure_players(self) -> Iterator[Player]:
        yield Player("generator", self.generator, adam, **self.of_generator)
        yield Player("judge", self.judge, adam, **self.of_judge)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("judge", self.judging, "judge")
        yield Phase("fool", self.fooling, "generator")
        yield Phase("again", self.judging, "judge", every=3)

    def score(self, x: Tensor) -> Tensor:
        return self.judge["head"](torch.tanh(self.judge["trunk"](x)))

    def judging(self, batch: dict[str, Tensor]) -> Tensor:
        return judging(self.score, self.generator, batch["x"])

    def fooling(self, batch: dict[str, Tensor]) -> Tensor:
        return fooling(self.score, self.generator, batch["x"])


def judging(score: Any, generator: Any, x: Tensor) -> Tensor:
    return (softplus(score(generator(x[:, :4]).detach())) + softplus(-score(x))).mean()


def fooling(score: Any, generator: Any, x: Tensor) -> Tensor:
    return softplus(-score(generator(x[:, :4]))).mean()


class ByHand:
    """The loop by hand. A test changes it by what it does before a step, after an update and after a step."""

    clip: ClassVar[dict[str, float]] = {}
    turns: ClassVar[dict[str, tuple[str, ...]]] = {"judge": ("judge",), "fool": ("generator",), "again": ("judge",)}
    moments = ("step", "exp_avg", "exp_avg_sq")  # of the optimizers
    make_optimizer: ClassVar[Any] = staticmethod(adam)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator, self.judge = mlp(4, 6).double(), judge_network().double()
        self.take({"generator": self.generator, "judge": self.judge})
        self.kept: dict[str, Tensor] = {}  # what else is compared

    def take(self, networks: dict[str, nn.Module]) -> None:
        self.networks = networks
        self.optimizers = {name: self.make_optimizer(net.parameters()) for name, net in networks.items()}

    def before(self, step: int) -> None:
        """Before the turns of a step."""

    def due(self, turn: str, step: int) -> bool:
        return turn != "again" or step % 3 == 0

    def losses(self, turn: str) -> Callable[[Any, Any, Tensor], Tensor]:
        return fooling if turn == "fool" else judging

    def step(self, turn: str, name: str) -> None:
        self.optimizers[name].step()

    def updated(self, name: str) -> None:
        """After an update."""

    def after(self, step: int) -> None:
        """After the turns of a step."""

    def score(self, x: Tensor) -> Tensor:
        return self.judge["head"](torch.tanh(self.judge["trunk"](x)))

    def run(self, steps: int = STEPS) -> dict[str, Tensor]:
        """Weights and moments under the names of a snapshot."""
        for step in range(steps):
            self.before(step)
            for turn, learners in self.turns.items():
                if self.due(turn, step):
                    for net in self.networks.values():
                        net.zero_grad()
                    self.losses(turn)(self.score, self.generator, vectors(step)["x"]).backward()
                    for name in learners:
                        if name in self.clip:
                            nn.utils.clip_grad_norm_(self.networks[name].parameters(), self.clip[name])
                        self.step(turn, name)
                        with torch.no_grad():
                            self.updated(name)
            with torch.no_grad():
                self.after(step)
        found = dict(self.kept)
        for name, net in self.networks.items():
            found |= {f"weight {name}.{key}": value.detach().clone() for key, value in net.state_dict().items()}
        for name, optimizer in self.optimizers.items():
            named = {id(weight): key for key, weight in self.networks[name.partition(" ")[0]].named_parameters()}
            for weight, state in optimizer.state.items():
                key = f"optimizer {name}.{named[id(weight)]}"
                found |= {f"{key}.{moment}": state[moment] for moment in self.moments}
        return found


def fit(
    game: Callable[[], GanModule],
    policy: str,
    world: int,
    steps: int = STEPS,
    save: str | None = None,
    resume: str | None = None,
    check: bool = False,
    size: int = SMALL,
    batches: Callable[[int], Any] = vectors,
    at: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train on one rank, in small buckets: from a checkpoint, and to one `at` a step, or at the end."""
    callbacks = [*settings.pop("callbacks", ()), *([Saves(save, at)] if save and at else [])]
    seeded, sized = mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"), mock.patch.object(bucket, "SIZE", size)
    with doubled("" if "precision" in settings else policy), seeded, sized:
        module, strategy = game(), PhaseStrategy(policy, check=check)
        made = trainer(strategy, world, steps, callbacks=callbacks, **settings)
        made.fit(module, loader(policy, world, batches), ckpt_path=resume)
        if save and not at:
            made.save_checkpoint(save)
    return snapshot(module, strategy)


def loader(policy: str, world: int, batches: Callable[[int], Any] = vectors, kind: type[Whole] = Whole) -> Whole:
    """A rank's parts of batches. Under dp each rank reads whole batches, and gets its parts of them."""
    several = world > 1 and policy != "dp"
    return kind(40, dist.get_rank() if several else 0, world if several else 1, batches)


def of(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """What a loop by hand has too."""
    return {name: found[name] for name in expected}
