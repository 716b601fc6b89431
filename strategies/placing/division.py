"""Runs in which some ranks only serve players (`@` in --strategy): which part a rank has, and what a server does."""

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gan.files.errors import UserError
from gan.module import GanModule
from strategies.choice import Choice, choose, ranks_as_typed
from strategies.placing.messages import Bridge
from strategies.placing.placement import Part, Placement, check
from strategies.placing.remote_player import Servers, leave
from strategies.placing.server import Server
from strategies.policies.policy import Policy


class Division:
    """The ranks that train and those that serve. Without '@' all ranks train, and there is no placement."""

    def __init__(self) -> None:
        self.placement: Placement | None = None
        self.part: Part | None = None  # of which this rank is one; its process group is torch's default group
        self.bridge: Bridge | None = None  # to the ranks of the other parts

    @property
    def trains(self) -> bool:
        return self.part is None or self.part.trains

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
        return trains if self.part.trains else serves

    def end(self) -> None:
        """End a serving process where the training has ended. The program goes on on the ranks that have trained."""
        if not self.trains:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def connect(self, store: dist.Store, device: torch.device, backend: str, **options: Any) -> None:
        """Make the process group of this rank's part, and the bridge to all ranks of the run."""
        if self.part is not None and self.placement is not None:
            part, own = self.part, dist.PrefixStore(self.part.name, store)
            dist.init_process_group(backend, store=own, rank=part.rank, world_size=len(part.ranks), **options)
            self.bridge = Bridge(store, part.ranks[part.rank], self.placement.size, device)

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
        assert self.placement is not None and self.part is not None
        game.assemble()
        chosen, everywhere = choose(choice, game.players), served(self.placement, choice, game)
        return {name: replace(chosen[name], ranks=None) for name, at in everywhere.items() if at == self.part.ranks}

    def serve(self, policies: Mapping[str, Policy], signal: Callable[[], int]) -> None:
        for policy in policies.values():
            policy.switch.turn(False)
        assert self.bridge is not None and self.placement is not None and self.part is not None
        Server(self.bridge, self.placement.training, self.part.ranks, policies, signal).run()


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
