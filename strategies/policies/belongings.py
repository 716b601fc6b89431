"""What belongs to one player of a game, where players may share parameters that do not learn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter

import torch
from torch import Tensor, nn

from gan.files.errors import UserError
from gan.phase import MakeOptimizer, Phase, Player, parameters_of


@dataclass(frozen=True)
class Belongings:
    """The parameters that a player stores, and the modules through which code may read them.

    [Note: shared parameters]
    A parameter that several players have is stored by one of them (see `parameters_of`), under its policy: so it is
    sharded, counted and saved once. The others read it like any weight of another player. Code reads it through any
    module that has it, also one of another player, or of no player: then its player may be an `nn.ParameterList`,
    which has no forward. So `readers` are all modules of the game that have one of the parameters, directly or inside.
    """

    parameters: dict[str, nn.Parameter]
    readers: tuple[nn.Module, ...]
    modes_kept: tuple[nn.Module, ...] = ()  # of a frozen player: what a player with an optimizer has too
    optimizers: Mapping[str, MakeOptimizer] = field(default_factory=dict)  # of phases that have one of their own for it


def belongings_of(
    players: Mapping[str, Player], game: nn.Module, phases: Sequence[Phase] = ()
) -> dict[str, Belongings]:
    roots = [game, *(player.module for player in players.values())]
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    everywhere = {module: set(map(id, module.parameters())) for module in modules}
    learning = {module for player in players.values() if not player.frozen for module in player.module.modules()}
    found = {}
    for name, parameters in parameters_of(tuple(players.values())).items():
        player, own = players[name], set(map(id, parameters.values()))
        others = (module for module, inside in everywhere.items() if not own.isdisjoint(inside))
        readers = dict.fromkeys([*player.module.modules(), *others])
        modes_kept = tuple(module for module in player.module.modules() if module in learning) if player.frozen else ()
        optimizers = {each.name: each.optimizer for each in phases if name in each.learners and each.optimizer}
        found[name] = Belongings(parameters, tuple(readers), modes_kept, optimizers)
    return found


# [Note: requires_grad]
# Between steps every weight has the `requires_grad` that its author gave it. So an author may freeze and thaw weights
# there, as in plain torch. In a phase only the weights of learners require gradients. So when a player's turn ends, its
# switch remembers which of its weights required one. The next turn, or the end of the step, restores these and no
# others.
# A frozen weight gets no gradient. Then its optimizer skips it, and under each policy it is like a weight that the loss
# does not reach.

requires_grad = attrgetter("requires_grad")


class Switch:
    """Makes a player's weights require gradients, or not. Those that the author has frozen stay so.

    See [Note: requires_grad]. It also freezes what `Player(freeze=...)` names for a step.
    """

    def __init__(self, player: Player, weights: Mapping[str, nn.Parameter]) -> None:
        self.player, self.weights = player, list(weights.values())
        self.on = True
        self._learning: list[Tensor] = []  # while it is off: those that require gradients when it is on
        others = {name: each for name, each in player.module.named_parameters() if name not in weights}
        self._others = {} if player.frozen else others  # those without an optimizer
        self._frozen: list[nn.Parameter] = []  # in this step
        self._parts: tuple[tuple[str, ...], list[nn.Parameter]] = ((), [])  # the last names, and what they mean

    def turn(self, on: bool) -> None:
        if on == self.on:
            return
        self.on = on
        with torch._C.DisableTorchFunctionSubclass():  # a sharded weight would ask each time whether this is allowed
            if not on:
                self._learning = [weight for weight in self.weights if weight.requires_grad]
            for weight in self._learning:
                weight.requires_grad_(on)

    def begin_step(self, step: int) -> None:
        """Freeze the sub-modules that do not learn in this step."""
        if self.player.frozen:
            return
        self.refuse_new(step)
        with torch._C.DisableTorchFunctionSubclass():
            if self.player.freeze is not None:
                self._frozen = [weight for weight in self._named(step) if weight.requires_grad]
                for weight in self._frozen:
                    weight.requires_grad_(False)

    def refuse_new(self, step: int) -> None:
        """Refuse weights that have come to require gradients after the set-up."""
        with torch._C.DisableTorchFunctionSubclass():
            for name in compress(self._others, map(requires_grad, self._others.values())):
                raise UserError(
                    f"player '{self.player.name}': weight '{name}' requires a gradient at step {step}, but did not "
                    f"when training was set up, so the optimizer does not have it; let it require one from the "
                    f"beginning, and freeze it for the first steps by Player(freeze=...)"
                )

    def end_step(self) -> None:
        """Give the weights back to their author."""
        if self.player.frozen:
            return
        self.turn(True)
        for weight in self._frozen:
            weight.requires_grad_(True)
        self._frozen = []

    def _named(self, step: int) -> list[nn.Parameter]:
        """The weights of the sub-modules that do not learn in this step."""
        assert self.player.freeze is not None
        names = self.player.freeze(step)
        names = (names,) if isinstance(names, str) else tuple(names)
        if names != self._parts[0]:
            module = self.player.module
            known = dict(module.named_modules())
            unknown = [name for name in names if name not in known]
            if unknown:
                raise UserError(
                    f"player '{self.player.name}': freeze names '{unknown[0]}' at step {step}, and its "
                    f"{type(module).__name__} has no such module; known are {', '.join(filter(None, known))}"
                )
            self._parts = names, [weight for name in names for weight in known[name].parameters()]
        return self._parts[1]
