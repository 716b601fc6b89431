"""A replica: a copy of the game for another device of the same process.

It is made by copy.deepcopy. torch's replicate cannot be used: it refuses CPU tensors, its replicas have no
parameters(), and their lists and attributes still refer to the networks of the first device.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gan.files.errors import UserError
from gan.module import GanModule
from strategies.options.compile import compiled_by_author
from strategies.policies.belongings import Switch
from strategies.policies.deep_copy import ADVICE, deep_copy
from strategies.policies.policy import Policy

T = TypeVar("T")

STRUCTURE = ("_parameters", "_buffers", "_modules")


class Replica:
    """One device's game. Replica 0 is the author's own game, on the first device.

    [Note: what a replica copies]
    As under ddp each rank has its own game, here each thread has its own: nothing that a step can change is shared. So
    the whole game is deep-copied. The copy makes its own phases, so that a lambda in configure_phases uses the copy's
    networks. The trainer, its strategy and its loggers are not copied. deepcopy does not copy functions. So a function
    that is kept in the game and holds an object of it, for example a lambda as a hook, is refused by name. So is a lock
    or an open file.

    Before each step a replica copies the author's weights and buffers, by their names, and what was assigned to the
    author's game between steps. What a replica assigns during a step stays in that replica.
    """

    def __init__(self, game: GanModule, device: torch.device, number: int, first: torch.device) -> None:
        self.device, self.number, self.first = device, number, first
        self.name = f"replica {number} on {device}"
        self.logged: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.original = self.game = game
        self._modules: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, dict[str, list[Any]]] = {}
        self._switches: dict[str, Switch] = {}  # by player; made anew in each step
        if number > 0:
            _refuse_compiled(game)
            without = {id(game.players): {}, id(game.phases): ()}
            # A player may be an nn.ParameterList that the game itself does not have.
            networks = [player.module for player in game.players.values()]
            modules = dict.fromkeys(module for each in (game, *networks) for module in each.modules())
            self.game, *_ = self._copy([game, *networks], without, [vars(module) for module in modules])
            self.game.trainer = game._trainer
            self._complete()
            self.game.players = {n: replace(p, module=self.own(p.module)) for n, p in game.players.items()}
            self.game.phases = tuple(self.game.configure_phases())
            self.note()

    # ---- the author's objects and this replica's own ----

    def of(self, weight: Tensor) -> Tensor:
        """The replica's copy of one of the author's parameters."""
        return weight if self.number == 0 else self._tensors[id(weight)][1]

    def own(self, module: nn.Module) -> nn.Module:
        """The replica's copy of one of the author's modules."""
        return module if self.number == 0 else self._modules[id(module)][1]

    def stands_for(self, module: nn.Module) -> bool:
        """Whether this is one of the author's modules, of which the replica has a copy."""
        return id(module) in self._modules

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces LightningModule.log during a step. The values are kept until all replicas have logged."""
        self.logged.append((name, value, args, kwargs))

    # ---- within a step ----

    @torch.no_grad()
    def take(self, weights: Iterable[Tensor]) -> None:
        """Copy the values of these weights, which are the author's."""
        for weight in weights:
            _fill(self.of(weight), weight)

    @torch.no_grad()
    def take_module(self, module: nn.Module) -> None:
        """Copy all parameters and buffers of one of the author's modules."""
        own = self.own(module)
        pairs = zip(chain(own.parameters(), own.buffers()), chain(module.parameters(), module.buffers()), strict=True)
        for tensor, original in pairs:
            _fill(tensor, original)

    def learn(self, policies: Mapping[str, Policy], learners: tuple[str, ...]) -> None:
        """Only the learners' weights require gradients."""
        for name, switch in self._own_switches(policies).items():
            switch.turn(name in learners)

    @contextmanager
    def all_learning(self, policies: Mapping[str, Policy]) -> Iterator[None]:
        """The weights of all players that are not frozen require gradients."""
        switches = self._own_switches(policies)
        before = {name: switch.on for name, switch in switches.items()}
        self.learn(policies, tuple(name for name, policy in policies.items() if not policy.player.frozen))
        try:
            yield
        finally:
            for name, switch in switches.items():
                switch.turn(before[name])

    def _own_switches(self, policies: Mapping[str, Policy]) -> dict[str, Switch]:
        """A switch for this replica's weights of each player."""
        if not self._switches:
            for name, policy in policies.items():
                self._switches[name] = Switch(self.of(weight) for weight in policy.requiring_grad.values())
        return self._switches

    # ---- between steps ----

    @torch.no_grad()
    def follow(self) -> None:
        """Copy what has changed in the author's game since the last step. See [Note: what a replica copies]."""
        known = {key: own for pairs in (self._modules, self._tensors) for key, (_, own) in pairs.items()}
        changed = {}
        for key, (original, own) in self._modules.items():
            seen, now = self._seen[key], vars(original)
            changed[key] = {k: v for k, v in now.items() if k in STRUCTURE or _differ(seen.get(k), _contents(v))}
            for name in seen.keys() - now.keys():
                vars(own).pop(name, None)
        for key, attributes in self._copy(changed, known, changed.values()).items():
            vars(self._modules[key][1]).update(attributes)
        self._complete()
        self._switches = {}
        for original, own in self._tensors.values():
            _fill(own, original)
            if isinstance(own, nn.Parameter):
                own.requires_grad_(original.requires_grad)
        self.note()

    def note(self) -> None:
        """Remember the author's game as it is after a step, so that `follow` copies only what changes later."""
        for key, (original, _) in self._modules.items():
            self._seen[key] = {name: _contents(value) for name, value in vars(original).items()}

    def _complete(self) -> None:
        """Pair tensors by their names; give the copies this replica's device and log."""
        self._tensors = {}
        for original, own in self._modules.values():
            for kind in ("_parameters", "_buffers"):
                theirs, ours = vars(original)[kind], vars(own)[kind]
                self._tensors |= {id(t): (t, ours[name]) for name, t in theirs.items() if t is not None}
            if isinstance(vars(own).get("_device"), torch.device):
                vars(own)["_device"] = self.device
        vars(self.game)["log"] = self.log

    def _copy(self, value: T, known: Mapping[int, Any], attributes: Iterable[Mapping[str, Any]]) -> T:
        trainer = self.original._trainer
        shared = [] if trainer is None else [trainer, trainer.strategy, *trainer.loggers]
        known = {**known, **{id(each): each for each in shared}}
        own, modules = deep_copy(value, known, self._device_for, attributes)
        self._modules |= modules
        return own

    def _device_for(self, value: Tensor | torch.Generator) -> torch.device:
        return self.device if value.device == self.first else value.device


def _refuse_compiled(game: GanModule) -> None:
    for module in game.modules():
        if isinstance(module, torch.jit.ScriptModule) or compiled_by_author(module):
            raise UserError(f"strategy dp makes no replicas of compiled networks ({type(module).__name__}); {ADVICE}")


def _fill(own: Tensor, tensor: Tensor) -> None:
    # Through `.data`, so that autograd does not count a change: a fake that phases share stays usable.
    own.data.copy_(tensor.data, non_blocking=True)


def _contents(value: Any) -> list[Any]:
    """A value and what is directly inside it. `_differ` compares two of these lists."""
    if isinstance(value, dict):
        return [value, *value, *value.values()]
    if isinstance(value, (list, set)):
        return [value, *value]
    if isinstance(value, Tensor):
        return [value, 0 if value.is_inference() else value._version]
    return [value, *getattr(value, "__dict__", {}).values()]


def _differ(before: list[Any] | None, now: list[Any]) -> bool:
    if before is None or len(before) != len(now):
        return True
    return any(a is not b and not (type(a) is type(b) is int and a == b) for a, b in zip(before, now, strict=True))
