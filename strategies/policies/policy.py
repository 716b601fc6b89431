"""Policy: how one player lives on the devices. This file is also the policy of a single device."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gan.checkpoint import SavedTensor, Share, read
from gan.ema import Ema
from gan.errors import UserError
from gan.phase import Phase, Player
from strategies.loss_scale import LossScale
from strategies.options.compile import Compiled
from strategies.options.recompute import Recompute


@dataclass(frozen=True)
class World:
    """The ranks a player lives among; `local` of them are on this node."""

    size: int
    rank: int
    device: torch.device
    local: int = 1


class Policy:
    """One player on one device; a policy for many devices overrides the verbs in which it differs.

    The verbs, in the order in which `PhaseStrategy.run` says them: `adopt` once, then in every phase `begin`, and
    where the player learns `arm` before each backward, `finish` after the last and `update`. `hold` is around losses,
    backwards and updates of every phase, also where the player does not learn.

    `weights` are the author's own parameters that learn; `owned` is what this rank's optimizer and average work on,
    here the same.
    """

    name = "single"
    max_ranks: int | None = 1
    takes: frozenset[str] = frozenset({"compile", "recompute"})  # the options it knows, of strategies/choice.py
    package: str | None = None  # what must be installed for it; an extra of that name installs it

    def __init__(self, player: Player, world: World, options: Mapping[str, Any] | None = None) -> None:
        self.player = player
        self.world = world
        self.options = options or {}
        self.requiring_grad = {n: p for n, p in player.module.named_parameters() if p.requires_grad}
        self.weights = {} if player.frozen else self.requiring_grad
        self.owned = self.weights
        self.optimizer: Optimizer | None = None
        self.schedule: LRScheduler | None = None
        self.ema: Ema | None = None
        self.loss_scale: LossScale | None = None
        self.compiled: Compiled | None = None
        self.recompute: Recompute | None = None
        self.skipped = 0
        self.learning = True

    # ---- the verbs ----

    def adopt(self, training: bool) -> None:
        """Take the player in, whose weights are on the device and equal on all ranks."""
        if self.player.frozen:
            self.player.module.eval()
        if training:
            self.cut()
        if self.player.ema is not None:
            self.ema = Ema(self.owned, self.player.ema)
        if training and self.weights:
            self.optimizer = self.make_optimizer()
            if self.player.schedule is not None:
                self.schedule = self.player.schedule(self.optimizer)
        if {"compile", "recompute"} <= self.options.keys():
            raise UserError(
                f"player '{self.player.name}': options compile and recompute exclude each other, for torch.compile "
                f"itself chooses what backward computes again; type {self.name}+compile or {self.name}+recompute"
            )
        if training and "recompute" in self.options:
            self.recompute = Recompute(self.player)
        if "compile" in self.options:
            self.compiled = Compiled(self.player, self.world.device, self.gather)

    def cut(self) -> None:
        """Share the player out among the ranks, before its average and its optimizer are made; here all is owned."""

    def make_optimizer(self) -> Optimizer:
        """The optimizer of what this rank owns, by the player's recipe."""
        return self.player.optimizer(list(self.weights.values()))

    def begin(self, phase: Phase) -> None:
        """A phase begins: only its learners require gradients; gradient still flows through the others."""
        self.learn(self.player.name in phase.learners)
        if self.compiled is not None:
            self.compiled.use(not phase.second_order)

    def gather(self) -> None:
        """The author's parameters are whole until the player rests; here they always are."""

    def hold(self, phase: Phase) -> AbstractContextManager[Any]:
        """Around a phase, whether or not the player learns in it: weights are there when they are read."""
        return nullcontext()

    def agree(self) -> int | None:
        """What all ranks must have done alike in this phase, as a number; none where nothing could differ."""
        return None

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """Get ready for the backward of this loss, the phase's last or one of its micro-batches before."""
        return loss

    def finish(self, scale: float) -> Tensor:
        """Complete the gradients after the last backward; returns each one's norm, the same on all ranks."""
        gradients = self.gradients()
        if not gradients:
            return torch.zeros(0, device=self.world.device)
        if scale != 1:
            torch._foreach_mul_(gradients, 1 / scale)
        return torch.stack(torch._foreach_norm(gradients))

    def update(self, norm: Tensor) -> None:
        """Clip, step the optimizer, the schedule and the average."""
        if self.player.clip is not None:
            nn.utils.clip_grads_with_norm_(self.owned.values(), self.player.clip, norm)
        self.step()
        if self.recompute is not None:
            self.recompute.updates += 1
        if self.schedule is not None:
            self.schedule.step()
        if self.ema is not None:
            self.ema.update()

    def step(self) -> None:
        """The optimizer's step alone."""
        self.optimizer.step()

    def settle(self) -> None:
        """Training is over and nobody failed: the player's weights are whole from here on."""

    def release(self) -> None:
        """Let the player go: its parameters are as its author left them. Communicates nothing: a rank may be lost."""
        self.learn(True)
        self.drop_gradients()
        for option in (self.compiled, self.recompute):
            if option is not None:
                option.release()
        self.compiled = self.recompute = None
        if "group" in self.__dict__:
            dist.destroy_process_group(self.group)
            del self.group

    # ---- what they share ----

    @cached_property
    def group(self) -> Any:
        """A process group of the player's own: two players' collectives may meet in another order on another rank."""
        return dist.new_group()

    def gradients(self) -> list[Tensor]:
        """The gradients there are; a weight that the loss did not reach has none, as in plain torch."""
        return [weight.grad for weight in self.weights.values() if weight.grad is not None]

    def learn(self, learning: bool) -> None:
        """Whether the player's weights require gradients."""
        if learning == self.learning:
            return
        self.learning = learning
        for weight in self.requiring_grad.values():
            weight.requires_grad_(learning)

    def drop_gradients(self) -> None:
        """No gradient stays from one phase to the next."""
        for weight in self.weights.values():
            weight.grad = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The player with its averaged weights, where it keeps an average."""
        with nullcontext() if self.ema is None else self.ema.swapped():
            yield

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The author's parameters are whole for a while, on all ranks."""
        yield

    # ---- checkpoints: this rank's shares of tensors, under the names that plain torch gives them ----

    def shares(self) -> dict[nn.Parameter, Share | None]:
        """This rank's share of each parameter that is dealt out among ranks; the others are whole on all."""
        return {}

    def loaded(self) -> None:
        """New values were read into the shares."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the player beside weights, optimizer and schedule."""
        return {
            "ema": None if self.ema is None else self.average_state(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "skipped": self.skipped,
        }

    def average_state(self) -> dict[str, Share]:
        """This rank's share of each weight's average."""
        return {name: self.owned_share(name, average) for name, average in self.ema.state_dict().items()}

    def load_average(self, saved: Mapping[str, SavedTensor] | None) -> None:
        """Take over saved averages, or start at the weights."""
        if self.ema is None:
            return
        if saved is None:
            self.ema.load_state_dict(None)
        else:
            read({saved[name]: share for name, share in self.average_state().items()})

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state as plain torch has it, with names instead of numbers and shares instead of tensors."""
        packed = self.optimizer.state_dict()
        state = {}
        for number, name in enumerate(self._stepped()):
            if number in packed["state"]:
                values = packed["state"][number]
                state[name] = {key: self._shared(name, key, value) for key, value in values.items()}
        groups = zip(packed["param_groups"], self.group_names(), strict=True)
        return {**packed, "state": state, "param_groups": [{**group, "params": names} for group, names in groups]}

    def load_optimizer_state(self, saved: dict[str, Any]) -> None:
        """Take over this rank's part of a saved state."""
        if [group["params"] for group in saved["param_groups"]] != self.group_names():
            raise UserError(
                f"player '{self.player.name}': the checkpoint's optimizer has its weights in other groups than this "
                f"run's; resume with the settings it was trained with"
            )
        wanted: dict[SavedTensor, Share] = {}
        state = {
            number: {key: self._room(name, key, value, wanted) for key, value in saved["state"][name].items()}
            for number, name in enumerate(self._stepped())
            if name in saved["state"]
        }
        read(wanted)
        groups, first = [], 0
        for group, own in zip(saved["param_groups"], self.optimizer.param_groups, strict=True):
            groups.append({**group, "params": list(range(first, first + len(own["params"])))})
            first += len(own["params"])
        self.optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})

    def group_names(self) -> list[list[str]]:
        """The names of the weights in each of the optimizer's groups."""
        return self._names(self.weights)

    def _stepped(self) -> list[str]:
        """The names of what this rank's optimizer steps, in torch's numbers."""
        return [name for group in self._names(self.owned) for name in group]

    def _names(self, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in parameters.items()}
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]

    def owned_share(self, name: str, tensor: Tensor) -> Share:
        """Of something that has a number for each element of what this rank owns of a weight."""
        return Share.whole(tensor)

    def is_per_element(self, key: str) -> bool:
        """Whether what the optimizer keeps under a name is dealt out as its weight is."""
        return False

    def _shared(self, name: str, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.owned_share(name, value) if self.is_per_element(key) else Share.whole(value)

    def _room(self, name: str, key: str, value: Any, wanted: dict[SavedTensor, Share]) -> Any:
        """What is saved, or room for it, which is then wanted."""
        if not isinstance(value, SavedTensor):
            return value
        owned = self.owned[name]
        if self.is_per_element(key):
            share = self.owned_share(name, torch.empty(owned.shape, dtype=value.dtype, device=owned.device))
        else:
            share = Share.whole(value.empty())
        wanted[value] = share
        return share.tensor

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Take over the loss scale and the count of skipped updates."""
        self.skipped = state["skipped"]
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
