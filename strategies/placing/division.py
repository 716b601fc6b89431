"""Runs in which some ranks only serve players (`@` in --strategy): who trains, who serves which players, and how."""

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Player
from strategies import private
from strategies.placing.messages import Bridge
from strategies.placing.remote_player import Servers, leave
from strategies.placing.server import Server
from strategies.policies.choice import Choice, choose, ranks_as_typed
from strategies.policies.policy import Policy


@dataclass(frozen=True)
class Placement:
    """`serving` are the ranks that serve, by what was typed for whom: a player, or `*`."""

    size: int
    training: range
    serving: Mapping[str, range]

    def part(self, rank: int) -> range:
        """The ranks that do the same as this one."""
        return next(each for each in (self.training, *self.serving.values()) if rank in each)

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


def refuse_a_group() -> None:
    """Refuse a process group that is there before: torch's default group must be that of the part."""
    if dist.is_initialized():
        raise UserError(
            "players on ranks of their own need process groups of their own, and this process has one already; train "
            "with '@' in a program of its own, and without init_process_group"
        )


class Division:
    """The ranks that train and those that serve. Without '@' all ranks train, and there is no placement."""

    def __init__(self) -> None:
        self.placement: Placement | None = None
        self.part: range | None = None  # the ranks that do the same as this one, in torch's default group
        self.number = 0  # of this rank in it
        self.bridge: Bridge | None = None  # to the ranks of the other parts

    @property
    def trains(self) -> bool:
        return self.part is None or self.part.start == 0

    def take_part(self, rank: int, trains: Callable[..., Any], serves: Callable[..., Any]) -> Callable[..., Any]:
        """What this rank of the whole run does: one of the functions."""
        if self.placement is None:
            return trains
        if self.part is not None:
            raise UserError(
                "the ranks that serve players have ended with the first fit, validate, test or predict of this "
                "program; do the next one in a program of its own, or without '@' in its strategy"
            )
        self.part = self.placement.part(rank)
        self.number = rank - self.part.start
        return trains if self.trains else serves

    def end(self) -> None:
        """End a serving process where the training has ended. The program goes on on the ranks that have trained."""
        if not self.trains:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def connect(self, store: dist.Store, device: torch.device, backend: str, **options: Any) -> None:
        """Make the process group of this rank's part, and the bridge to all ranks of the run."""
        if self.part is not None and self.placement is not None:
            own = dist.PrefixStore(f"{'training' if self.trains else 'serving'} {ranks_as_typed(self.part)}", store)
            dist.init_process_group(backend, store=own, rank=self.number, world_size=len(self.part), **options)
            self.bridge = Bridge(store, self.part[self.number], self.placement.size, device)

    def leave_to_others(self, game: GanModule, choice: Mapping[str, Choice]) -> None:
        if self.placement is not None:
            game.assemble()
            for name, ranks in served(self.placement, choice, game).items():
                leave(game.players[name], f"ranks {ranks_as_typed(ranks)}")

    def servers(self, game: GanModule, choice: Mapping[str, Choice], wish: Callable[..., None]) -> dict[str, Servers]:
        """For each player that other ranks serve, the line to them."""
        if self.placement is None or self.bridge is None:
            return {}
        lines = {
            ranks: Servers(self.bridge, self.placement.training, ranks, wish)
            for ranks in dict.fromkeys(self.placement.serving.values())
        }
        return {name: lines[ranks] for name, ranks in served(self.placement, choice, game).items()}

    def served_here(self, game: GanModule, choice: Mapping[str, Choice]) -> dict[str, Choice]:
        """What was typed for the players that this rank serves."""
        assert self.placement is not None
        game.assemble()
        chosen, everywhere = choose(choice, game.players), served(self.placement, choice, game)
        return {name: replace(chosen[name], ranks=None) for name, at in everywhere.items() if at == self.part}

    def serve(self, policies: Mapping[str, Policy], signal: Callable[[], int]) -> None:
        for policy in policies.values():
            policy.switch.turn(False)
        assert self.bridge is not None and self.part is not None and self.placement is not None
        Server(self.bridge, self.placement.training, self.part, policies, signal).run()


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


def served(placement: Placement, choice: Mapping[str, Choice], game: GanModule) -> dict[str, range]:
    """By which ranks other players are served. Raises if one cannot be served."""
    found: dict[str, range] = {}
    for name, each in choose(choice, game.players).items():
        if each.ranks is not None and placement.serves(each):
            check(game.players[name], game.players, str(each))
            found[name] = each.ranks
    for typed, ranks in placement.serving.items():
        if ranks not in found.values():
            raise UserError(
                f"--strategy gives ranks {ranks_as_typed(ranks)} to '{typed}', and all players of this game are typed "
                f"by name; leave {typed}={choice[typed]} out, and have fewer devices"
            )
    return found


def part_of(game: GanModule, players: Collection[str]) -> GanModule:
    """The part of a game that has these players, and no phases. The others' weights are freed."""
    part = GanModule()
    part.players = {name: game.players[name] for name in players}
    part.networks = nn.ModuleList(player.module for player in part.players.values())
    for player in game.players.values():
        if player.name not in players:
            leave(player, "other ranks")
    return part
