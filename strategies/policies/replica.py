"""A replica: a copy of the game for another device of the same process.

Made by copy.deepcopy. torch's replicate will not do: it refuses CPU tensors, gives its replicas no parameters(), and
leaves lists and attributes pointing at the networks of the first device.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gan.errors import UserError
from gan.module import GanModule
from strategies.policies.policy import Policy

STRUCTURE = ("_parameters", "_buffers", "_modules")
ADVICE = "type --strategy ddp"


class Replica:
    """One device's game. Replica 0 is the author's own game, on the first device.

    [Note: what a replica copies]
    A replica is to its thread what a game is to a rank of ddp: nothing that a step can change is shared. So the whole
    game is deep-copied, and the copy is asked for its own players and phases: a lambda in configure_phases then uses
    the copy's networks. The trainer, its strategy and its loggers are not copied. A function that is kept in the game
    cannot be copied with what it holds, so it is refused by name, and so is a lock or an open file.

    Before each step a replica copies by name the author's weights and buffers, and besides what was assigned to the
    author's game between steps. What a step itself assigns stays with its replica.
    """

    def __init__(self, game: GanModule, device: torch.device, number: int, first: torch.device) -> None:
        self.device, self.number, self.first = device, number, first
        self.name = f"replica {number} on {device}"
        self.logged: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.original = self.game = game
        self._modules: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, dict[str, list[Any]]] = {}
        if number > 0:
            _refuse_compiled(game)
            memo = {id(game.players): {}, id(game.phases): ()}
            self.game = self._copy(game, memo)
            self.game._trainer = game._trainer
            self._pair_tensors()
            self._finish_game()
            self.game.assemble()
            self.note()

    # ---- the author's objects and this replica's own ----

    def of(self, weight: Tensor) -> Tensor:
        """The replica's own of one of the author's parameters."""
        return weight if self.number == 0 else self._tensors[id(weight)][1]

    def own(self, module: nn.Module) -> nn.Module:
        """The replica's own of one of the author's modules."""
        return module if self.number == 0 else self._modules[id(module)][1]

    def stands_for(self, module: nn.Module) -> bool:
        """Whether this is one of the author's modules, of which the replica has its own."""
        return id(module) in self._modules

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for LightningModule.log until all replicas have logged."""
        self.logged.append((name, value, args, kwargs))

    # ---- within a step ----

    @torch.no_grad()
    def take(self, weights: Iterable[Tensor]) -> None:
        """Copy the values of these weights of the author's."""
        for weight in weights:
            _fill(self.of(weight), weight)

    def learn(self, policies: Mapping[str, Policy], learners: tuple[str, ...]) -> None:
        """Only the learners' weights require gradients."""
        for name, policy in policies.items():
            for weight in policy.requiring_grad.values():
                self.of(weight).requires_grad_(name in learners)

    @contextmanager
    def all_learning(self, policies: Mapping[str, Policy]) -> Iterator[None]:
        """The weights of all players that are not frozen require gradients."""
        weights = [self.of(weight) for policy in policies.values() for weight in policy.requiring_grad.values()]
        before = [weight.requires_grad for weight in weights]
        self.learn(policies, tuple(name for name, policy in policies.items() if not policy.player.frozen))
        try:
            yield
        finally:
            for weight, learning in zip(weights, before, strict=True):
                weight.requires_grad_(learning)

    # ---- between steps ----

    @torch.no_grad()
    def follow(self) -> None:
        """Copy what has changed in the author's game since the last step. See [Note: what a replica copies]."""
        changes = {}
        for original, own in self._modules.values():
            seen, now = self._seen[id(original)], vars(original)
            changes[id(own)] = {k: v for k, v in now.items() if k in STRUCTURE or _contents(v) != seen.get(k)}
            for name in seen.keys() - now.keys():
                vars(own).pop(name, None)
        pairs = [own for _, own in self._modules.values()]
        memo = {key: own for known in (self._modules, self._tensors) for key, (_, own) in known.items()}
        changes = self._copy(changes, memo)
        for own in pairs:
            vars(own).update(changes[id(own)])
        self._pair_tensors()
        for original, own in self._tensors.values():
            _fill(own, original)
            if isinstance(own, nn.Parameter):
                own.requires_grad_(original.requires_grad)
        self._finish_game()
        self.note()

    def note(self) -> None:
        """A step is over: do not copy what it has assigned to the author's game."""
        for original, _ in self._modules.values():
            self._seen[id(original)] = {name: _contents(value) for name, value in vars(original).items()}

    def _pair_tensors(self) -> None:
        """Parameters and buffers belong together by their names."""
        self._tensors = {
            id(tensor): (tensor, vars(own)[kind][name])
            for original, own in self._modules.values()
            for kind in ("_parameters", "_buffers")
            for name, tensor in vars(original)[kind].items()
            if tensor is not None
        }

    def _finish_game(self) -> None:
        for _, own in self._modules.values():
            if isinstance(vars(own).get("_device"), torch.device):
                vars(own)["_device"] = self.device
        vars(self.game)["log"] = self.log

    # ---- copying ----

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        """A deep copy on this device; `memo` says what is copied already."""
        trainer = self.original._trainer
        shared = [] if trainer is None else [trainer, trainer.strategy, *trainer.loggers]
        memo |= {id(each): each for each in shared}
        for module in self.original.modules():
            for attribute in vars(module).values():
                if isinstance(attribute, ModuleType):
                    memo[id(attribute)] = attribute
                elif isinstance(attribute, torch.Generator) and id(attribute) not in memo:
                    memo[id(attribute)] = self._generator(attribute)
        try:
            with _OnDevice(self.first, self.device):
                made = copy.deepcopy(value, memo)
                _refuse_functions(memo)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"strategy dp cannot copy {self._culprit()} for another device: {error}; make it outside of the game, "
                f"or {ADVICE}"
            ) from error
        copied = memo.get(id(memo), ())  # deepcopy keeps here what it has copied
        self._modules |= {id(each): (each, memo[id(each)]) for each in copied if isinstance(each, nn.Module)}
        return made
