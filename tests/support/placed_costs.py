"""A distillation whose teacher other ranks serve: what each rank holds and moves, measured and planned."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from gan.phase import Player
from nets.denoiser import Head, OneStep
from samples.distillation import Distillation, Transformer
from strategies.cost.budget import Budget, Cost, Serving
from strategies.cost.tracing import traces
from strategies.placing.division import Placement, placement_of
from strategies.placing.server import Server
from strategies.policies import POLICIES
from strategies.policies.choice import choices, ranks_as_typed
from strategies.training.assignment import choose
from strategies.world import World
from tests.support.parity import Whole
from tests.support.planned import BUCKET, ROWS, SIDE, STEPS, pictures
from tests.support.scales import Scale, Weighed, weighed_on
from tests.support.worlds import apart

SHAPE = SIDE, 8, 256, 5  # of a transformer


class Taught(Distillation):
    """The student also learns through its teacher, which is read from a file."""

    file: Path | None = None

    def configure_players(self) -> Iterator[Player]:
        for player in super().configure_players():
            yield replace(player, weights=self.file) if player.name == "teacher" else player

    def distil(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        fake = self.draw(batch["image"])
        seen = self.teacher(*self.diffuse(fake))
        return super().distil(batch) | {"seen": (seen - batch["image"]).square().mean()}


def taught(file: Path | None) -> Taught:
    torch.manual_seed(0)
    student, fake_score, teacher = (Transformer(*SHAPE) for _ in range(3))
    players = OneStep(student, SIDE, 10.0), fake_score, Head(SHAPE[2]), teacher
    game = Taught(*players, size=SIDE, batch_size=ROWS, ema=0.999)
    game.student_every, game.file = 1, file
    return game


def write(file: Path) -> None:
    save_file(Transformer(*SHAPE).state_dict(), file)


class WeighedServer(Server):
    """Writes what it held at most, over all phases, and the payload of its collectives."""

    def run(self) -> None:
        with Scale() as scale:
            super().run()
        found = {"highest": scale.peak, "payload": scale.payload}
        Path(os.environ["WEIGHED"], f"{self.bridge.rank}.json").write_text(json.dumps(found))


def _fit(file: Path, policy: str, training: int, ranks: int) -> list[Weighed]:
    os.environ["WEIGHED"] = str(file.parent)
    loader = partial(Whole, STEPS, int(os.environ["RANK"]), training, pictures)
    with mock.patch("strategies.placing.division.Server", WeighedServer):
        return weighed_on(loader, partial(taught, file), policy, ranks, BUCKET)


def measured(file: Path, policy: str, ranks: int) -> tuple[list[list[Weighed]], list[dict[str, Any]]]:
    """Of each rank that trains, the phases of the last step; and of each that serves, all of them together."""
    training = len(placed(policy, ranks).training)
    fit = partial(_fit, file, policy, training, ranks)
    found = apart(fit, ranks, limit=200)
    serving = [json.loads((file.parent / f"{rank}.json").read_text()) for rank in range(training, ranks)]
    return found[:training], serving


def placed(policy: str, ranks: int) -> Placement:
    return placement_of(choices(policy, POLICIES), ranks)


def planned(file: Path, policy: str, ranks: int) -> tuple[Cost, dict[range, Cost]]:
    """Of a rank that trains, and of those that serve."""
    typed, placement = choices(policy, POLICIES), placed(policy, ranks)
    training = len(placement.training)
    with mock.patch("strategies.sharding.bucket.SIZE", BUCKET):
        with torch.device("meta"):
            game = taught(file)
        game.assemble()
        batch = {"image": torch.empty(ROWS // training, 3, SIDE, SIDE, device="meta")}
        chosen = choose(typed, game.players)
        serving = {name: each.ranks for name, each in chosen.items() if placement.serves(each)}
        where = {name: ranks_as_typed(each) for name, each in serving.items()}
        made = World(training, 0, torch.device("cpu"), ranks)
        served = {name: Serving(each, training) for name, each in serving.items()}
        budget = Budget(game, made, lambda recompute: traces(game, batch, recompute, served=where), served)
        return budget.cost(chosen), budget.serving(chosen)
