"""Whether ranks hold the same values, and the error that names what differs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from gan.ema import Ema
from gan.files.checkpoint import Checksum, checksum
from gan.files.errors import UserError
from gan.module import GanModule
from strategies.optimizers.averages import EvalWeights
from strategies.policies.policy import Policy
from strategies.sharding.resharded_parameter import resharded, version_of
from strategies.world import World

Names = Sequence[tuple[str, str]]  # of weights, with their players


def compare_replicas(game: GanModule, policies: Mapping[str, Policy], world: World, when: str) -> None:
    """Raise on all ranks if a weight or a buffer of the game differs between them. `when` says after what."""
    codes: dict[str, Checksum] = {}
    named: set[int] = set()
    for name, player in game.players.items():
        with policies[name].gathered():
            there = [each for each in policies[name].belongings.parameters.items() if not resharded(each[1])]
            codes |= _codes("weight", there, f" of player '{name}'")
        codes |= _codes("buffer", player.module.named_buffers(), f" of player '{name}'")
        named |= {id(buffer) for buffer in player.module.buffers()}
    codes |= _codes("buffer", ((name, each) for name, each in game.named_buffers() if id(each) not in named))
    if (what := _first_difference(codes, world)) is not None:
        raise UserError(
            f"{when}, {what} differs between ranks; does it depend on the rank's own samples or random numbers? "
            f"Take sums over all ranks with gan.ranks, and noise from gan.noise"
        )


def compare_settings(policies: Mapping[str, Policy], world: World, step: int) -> None:
    """Raise if an update took something else on each rank, such as another rate.

    Under sharded policies no weight shows that: each rank updates its own, and all ranks gather them.
    """
    own: dict[str, str] = {}
    for name, policy in policies.items():
        for updater in policy.updaters.values():
            for number, group in enumerate(updater.optimizer.param_groups):
                settings = {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}
                settings |= {k: v.item() for k, v in group.items() if isinstance(v, Tensor) and v.numel() == 1}
                own |= {f"player '{name}': '{k}' of group {number} is": repr(v) for k, v in settings.items()}
        if isinstance(policy.average, Ema):
            own[f"player '{name}': the decay of its average is"] = repr(policy.average.used)
    everyone = world.gather(own)
    for what, value in own.items():
        if other := next((each[what] for each in everyone if each.get(what, value) != value), None):
            raise UserError(
                f"after step {step}, {what} {value} on one rank and {other} on another; what schedules, hooks and ema= "
                f"read must be the same on all ranks: keep gan.ranks.mean(x) in place of x"
            )


class Writes:
    """Finds what is written inside `gathered()`. With `write` all ranks must write the same; without it, nothing."""

    def __init__(self, players: Mapping[str, Policy], write: bool, world: World) -> None:
        self.players, self.write, self.world = players, write, world
        self.begin()

    def begin(self) -> None:
        """From here on it is the author's code that may write."""
        self.before = {id(weight): _state(weight) for _, weight in _weights(self.players)}

    def look(self, averaged: bool) -> Callable[[], None]:
        """What raises if code has written what it may not. `averaged`: in `averaged()`, so averages are written."""
        now = dict(_weights(self.players))
        new = [key for key, weight in now.items() if id(weight) not in self.before]
        written = [key for key, weight in now.items() if self.before.get(id(weight)) != _state(weight)]
        codes = {_called(*key): checksum(weight) for key, weight in now.items()} if self.write and not new else {}
        return partial(self._judge, averaged, new, written, codes)

    def _judge(self, averaged: bool, new: Names, written: Names, codes: dict[str, Checksum]) -> None:
        if new:  # its name may be another one, as after a parametrization was removed
            raise UserError(
                f"{_called(*new[0])} was replaced by another parameter, and its player trains the one before; copy "
                f"values into it, e.g. by load_state_dict without assign=True"
            )
        if not self.write:
            if written:
                raise UserError(f"{_called(*written[0])} was written inside gathered(); type gathered(write=True)")
            return
        for player, name in written:
            if averaged and isinstance(self.players[player].ema, EvalWeights):
                raise UserError(
                    f"{_called(player, name)} was written inside averaged(), where the player's optimizer computes it "
                    f"from other weights; write it outside of averaged()"
                )
        if (what := _first_difference(codes, self.world)) is not None:
            raise UserError(
                f"inside gathered(write=True), {what} was written with other values on another rank; write the same on "
                f"all ranks, e.g. what trainer.strategy.broadcast(values) returns"
            )


def _weights(players: Mapping[str, Policy]) -> Iterator[tuple[tuple[str, str], nn.Parameter]]:
    for player, policy in players.items():
        for name, weight in policy.player.module.named_parameters():
            if not resharded(weight):  # a player that other ranks serve
                yield (player, name), weight


def _state(weight: Tensor) -> tuple[int, int]:
    """It changes when the values are written, or when other memory takes their place."""
    return weight.data_ptr(), version_of(weight)


def _called(player: str, name: str) -> str:
    return f"weight '{name}' of player '{player}'"


def _codes(kind: str, tensors: Any, of: str = "") -> dict[str, Checksum]:
    return {f"{kind} '{name}'{of}": checksum(tensor) for name, tensor in tensors}


def _first_difference(codes: dict[str, Checksum], world: World) -> str | None:
    """The first name whose code is not the same on all ranks."""
    every = world.gather(codes)
    names = dict.fromkeys(name for each in every for name in each)
    return next((name for name in names if len({each.get(name) for each in every}) > 1), None)
