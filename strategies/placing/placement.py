"""Which ranks train, which serve players to them, and which players can be served."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from gan.files.errors import UserError
from gan.phase import Player
from strategies import private
from strategies.choice import Choice, ranks_as_typed


@dataclass(frozen=True)
class Part:
    """The ranks of a run that do the same: those that train, or some that serve. `rank` is this one's number there."""

    ranks: range
    rank: int

    @property
    def trains(self) -> bool:
        return self.ranks.start == 0

    @property
    def name(self) -> str:
        return ("training" if self.trains else "serving") + f" {ranks_as_typed(self.ranks)}"


@dataclass(frozen=True)
class Placement:
    """`serving` are the ranks that serve, by what was typed for whom: a player, or `*`."""

    size: int
    training: range
    serving: Mapping[str, range]

    def part(self, rank: int) -> Part:
        ranks = next(each for each in (self.training, *self.serving.values()) if rank in each)
        return Part(ranks, rank - ranks.start)

    def serves(self, choice: Choice) -> bool:
        """Whether a player for which this was typed is served."""
        return choice.ranks in self.serving.values()


def placement_of(choice: Mapping[str, Choice], ranks: int) -> Placement | None:
    """What was typed with `@`, for a run of so many ranks; None if nothing was."""
    typed = {player: each.ranks for player, each in choice.items() if each.ranks is not None}
    if not typed:
        return None
    parts = set(typed.values())
    if len(typed) < len(choice):  # players without @ have what is left, which must be the first ranks
        parts.add(range(ranks - sum(part.stop - part.start for part in parts)))
    training, *others = sorted(parts, key=lambda part: part.start)
    starts, stops = [part.start for part in (training, *others)], [part.stop for part in (training, *others)]
    if not all(parts) or not others or [0, *stops] != [*starts, ranks]:
        devices = f"--devices {stops[-1]}, or " if others and starts == [0, *stops[:-1]] and ranks != stops[-1] else ""
        raise UserError(
            f"--strategy does not place {ranks} ranks: each must be in one part, players without @ have those that are "
            f"left, and rank 0's part trains; type {devices}e.g. teacher=zero3@2-3,*=ddp@0-1"
        )
    return Placement(ranks, training, {player: own for player, own in typed.items() if own != training})


def rounds(training: range, serving: range, number: int) -> list[tuple[int, bool]]:
    """Whose calls the serving rank of this number answers, in order; False where it only runs them with the others."""
    slots = range(number, number + len(serving) * -(-len(training) // len(serving)), len(serving))
    return [(training[slot % len(training)], slot < len(training)) for slot in slots]


def refuse_a_group() -> None:
    """Refuse a process group that is there before: torch's default group must be that of the part."""
    if dist.is_initialized():
        raise UserError(
            "players on ranks of their own need process groups of their own, and this process has one already; train "
            "with '@' in a program of its own, and without init_process_group"
        )


def check(player: Player, others: Mapping[str, Player], typed: str) -> None:
    """Refuse a player that other ranks cannot serve. `typed` is its policy with its ranks."""
    policy, _, where = typed.partition("@")
    what = f"player '{player.name}' is on ranks of its own ({where})"
    if not player.frozen or player.follows is not None:
        raise UserError(
            f"{what}, and only frozen players can be, for a learner's gradients, averages and checkpoints would "
            f"have to travel with every call; type {player.name}={policy}, without ranks"
        )
    if player.weights is None:
        raise UserError(
            f"{what}, so its weights must come from a file that those ranks read: Player('{player.name}', ..., "
            f"weights='{player.name}.safetensors'); write one with "
            f"safetensors.torch.save_file(network.state_dict(), '{player.name}.safetensors')"
        )
    own = set(player.module.parameters())
    for other in others.values():
        if other is not player and not own.isdisjoint(other.module.parameters()):
            raise UserError(
                f"{what}, and player '{other.name}' has some of its weights too; leave @{where} out, or give both "
                f"networks of their own"
            )
    for name, module in player.module.named_modules():
        if any(not type(hook).__module__.startswith("torch.") for hook in private.module_hooks(module)):
            raise UserError(
                f"{what}, and '{name or type(module).__name__}' has a forward hook, which would run there and not "
                f"here; return from forward what the hook collects, or leave @{where} out"
            )
