"""What each phase of a training gave, in a few numbers a tensor, to be compared with another training."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning import Callback, Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gan.files.checkpoint import checksum
from gan.module import GanModule
from gan.phase import Phase
from strategies import PhaseStrategy, random_state
from strategies.check.trial import norms_by_name
from strategies.micro_batches import tensors
from strategies.processes import world
from strategies.sharding.resharded_parameter import resharded


class Moment(NamedTuple):
    """What was recorded, and where in the training. `phase` is empty for what belongs to the whole step.

    `kind` is batch, loss, gradient, buffer, weight or average.
    """

    step: int
    phase: str
    kind: str
    name: str


@dataclass
class Record:
    """One rank's training. `moments` are in the order in which they happened.

    A loss is a number, a gradient its norm; of a buffer, weight or average there are two numbers (see `digest`); of a
    batch there is a number for each row.
    """

    moments: dict[Moment, tuple[float, ...]] = field(default_factory=dict)
    drew: set[str] = field(default_factory=set)  # phases that drew other numbers on each rank, from torch's generator
    last: dict[str, Tensor] = field(default_factory=dict)  # weights, buffers and averages after the last step
    elsewhere: set[str] = field(default_factory=set)  # weights of players that other ranks serve
    cast: bool = False  # whether a phase makes float32 of float64
    distances: dict[str, float] = field(default_factory=dict)  # of the last tensors from one device's, by their names
    seconds: float = 0.0


def digest(tensor: Tensor) -> tuple[float, float]:
    """The norm, and a sum in which each element has a weight of its own: moving or exchanging elements changes it."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = values.detach().reshape(-1).double()
    ramp = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
    return flat.norm().item(), torch.dot(flat, ramp).item()


class Casts(TorchDispatchMode):
    """Notes whether float64 becomes float32 inside, which rounds a training in float64 in its middle."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float32:
            self.record.cast |= any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in args)
        return made


class Recorder(Callback):
    """Records a training. `Recorded` tells it of each phase, Lightning of the rest."""

    def __init__(self, last_step: int, sees_casts: bool = False) -> None:
        """The training stops after `last_step`. `sees_casts`: note whether float64 is cast to float32 by hand."""
        self.last_step, self.record = last_step, Record()
        self.watching = Casts(self.record) if sees_casts else nullcontext()
        self.step = 0
        self.norms: dict[str, float] = {}  # of the gradients in this phase

    def on_train_batch_start(self, trainer: Trainer, game: GanModule, batch: Any, batch_idx: int) -> None:
        self.step = game.step
        for number, tensor in enumerate(tensors(batch)):
            if tensor.ndim:
                self._note("", "batch", str(number), tuple(checksum(row)[1] for row in tensor))

    def on_before_optimizer_step(self, trainer: Trainer, game: GanModule, optimizer: Any) -> None:
        """The learner's gradients are reduced now, and not clipped yet."""
        for name, policy in trainer.strategy.policies.items():
            if policy.optimizer is optimizer:
                norms = norms_by_name(policy, policy.norms())
                self.norms |= {f"{name}.{weight}": norm for weight, norm in norms.items()}

    def after(self, phase: Phase, strategy: PhaseStrategy) -> None:
        """The phase has been played, with the updates of its learners."""
        game = strategy.lightning_module
        for name, loss in strategy.steps.losses.items():
            if name.startswith(f"{phase.name}/") and not name.endswith("_grad_norm"):
                self._note(phase.name, "loss", name.removeprefix(f"{phase.name}/"), (loss.item(),))
        for name, norm in self.norms.items():
            self._note(phase.name, "gradient", name, (norm,))
        self.norms = {}
        for name, buffer in named(game, "buffers"):
            self._note(phase.name, "buffer", name, digest(buffer))
        with strategy.gathered():
            for name, weight in named(game, "parameters"):
                if resharded(weight):
                    self.record.elsewhere.add(name)
                else:
                    self._note(phase.name, "weight", name, digest(weight))

    def on_train_batch_end(self, trainer: Trainer, game: GanModule, *_: Any) -> None:
        """The run's own `max_steps` stays what it is for the game, so the training is stopped here."""
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.last_step
        with trainer.strategy.averaged():
            for name, average in _averages(trainer.strategy).items():
                self._note("", "average", name, digest(average))

    def on_train_end(self, trainer: Trainer, game: GanModule) -> None:
        """Keep everything whole."""
        found = {f"buffer '{name}'": buffer for name, buffer in named(game, "buffers")}
        with trainer.strategy.gathered():
            here = {name: weight for name, weight in named(game, "parameters") if name not in self.record.elsewhere}
            found |= {f"weight '{name}'": weight for name, weight in here.items()}
            self.record.last = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
        with trainer.strategy.averaged():
            for name, average in _averages(trainer.strategy).items():
                self.record.last[f"average '{name}'"] = average.detach().cpu().clone()

    def _note(self, phase: str, kind: str, name: str, numbers: tuple[float, ...]) -> None:
        self.record.moments[Moment(self.step, phase, kind, name)] = numbers


class Recorded(PhaseStrategy):
    """PhaseStrategy, with a recorder that is told of each phase."""

    def __init__(self, policy: str, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        self.recorder = recorder

    def run(self, phase: Phase, batch: Any) -> None:
        world.here(f"step {self.recorder.step}, phase '{phase.name}'")
        before = random_state.capture()
        with self.recorder.watching:
            super().run(phase, batch)
        if self.steps.trial is not None:
            return
        if random_state.changed(before):
            self.recorder.record.drew.add(phase.name)
        self.recorder.after(phase, self)


def named(game: GanModule, kind: str) -> Iterator[tuple[str, Tensor]]:
    """All "parameters" or "buffers" of a game: first the players', by the player's name and their own, then others."""
    seen: set[int] = set()
    modules = {f"{name}.": player.module for name, player in game.players.items()}
    for place, module in {**modules, "": game}.items():
        for name, tensor in getattr(module, f"named_{kind}")():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield place + name, tensor


def _averages(strategy: PhaseStrategy) -> dict[str, Tensor]:
    """What players keep an average of, by the players' names. To be called within `averaged()`."""
    found: dict[str, Tensor] = {}
    for player, policy in strategy.policies.items():
        module, buffers = policy.player.module, policy.player.ema_buffers == "averaged"
        if policy.ema is not None:
            kept = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
            found |= {f"{player}.{name}": tensor for name, tensor in kept}
    return found
