"""What belongs to one player of a game, where players may share parameters that do not learn."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from gan.phase import Player, parameters_of


@dataclass(frozen=True)
class Belongings:
    """The parameters that a player stores, and the modules through which code may read them.

    [Note: shared parameters]
    A parameter that several players have is stored by one of them (see `parameters_of`), under its policy: so it is
    sharded, counted and saved once. The others read it like any weight of another player. Code reads it through any
    module that has it, also one of another player, or of no player: then its player may be an `nn.ParameterList`,
    which has no forward. So `readers` are all modules of the game that have one of the parameters, directly or inside.

    `kept`: modules that a player with an optimizer has too. They keep their mode, although a frozen player has them.
    """

    parameters: dict[str, nn.Parameter]
    readers: tuple[nn.Module, ...]
    kept: tuple[nn.Module, ...] = ()


def belongings_of(players: Mapping[str, Player], game: nn.Module) -> dict[str, Belongings]:
    """What belongs to each player of a game."""
    everywhere = _with_parameters([game, *(player.module for player in players.values())])
    learning = {module for player in players.values() if not player.frozen for module in player.module.modules()}
    found = {}
    for name, parameters in parameters_of(tuple(players.values())).items():
        player, own = players[name], set(map(id, parameters.values()))
        readers = [module for module, inside in everywhere.items() if not own.isdisjoint(inside)]
        kept = tuple(module for module in player.module.modules() if module in learning) if player.frozen else ()
        found[name] = Belongings(parameters, tuple(dict.fromkeys([*player.module.modules(), *readers])), kept)
    return found


def _with_parameters(roots: Iterable[nn.Module]) -> dict[nn.Module, set[int]]:
    """All modules, each with the ids of the parameters that it has, directly or inside."""
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    return {module: set(map(id, module.parameters())) for module in modules}
