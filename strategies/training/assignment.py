"""Gives each player of a game its policy: the one that was typed, or one that `auto` chooses by memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision

from gan.files.errors import UserError, table
from gan.files.system import LINUX, free_memory, in_proc, resource
from gan.module import GanModule
from gan.phase import Player
from strategies.advice import note_typed
from strategies.placing.division import Placement
from strategies.placing.remote_player import RemotePlayer, Servers
from strategies.policies import POLICIES
from strategies.policies.amounts import Held, readable_bytes
from strategies.policies.belongings import Belongings, belongings_of
from strategies.policies.choice import Choice, choose
from strategies.policies.policy import Policy
from strategies.world import World


def is_dp(choice: Mapping[str, Choice]) -> bool:
    """Whether the strategy is dp. It is for all players or for none, because it starts the ranks of the training."""
    policies = {each.policy for each in choice.values()}
    if "dp" in policies and len(policies) > 1:
        raise UserError(
            f"strategy dp is for all players together, and some have {', '.join(sorted(policies - {'dp'}))}; type "
            f"--strategy dp, or ddp in place of dp"
        )
    return "dp" in policies


def check_ranks(choice: Mapping[str, Choice], ranks: int, placement: Placement | None = None) -> None:
    """Refuse a policy that does not support this number of ranks, before any process is started."""
    if placement is not None:
        ranks = len(placement.training)
    for player, each in choice.items():
        if placement is not None and placement.serves(each):
            continue
        if each.policy in POLICIES and (POLICIES[each.policy].max_ranks or ranks) < ranks:
            whose = "all players" if player == "*" else f"player '{player}'"
            raise UserError(
                f"policy '{each.policy}' of {whose} trains on one device and there are {ranks} ranks; "
                f"type --strategy ddp, or --devices 1"
            )


def assign(
    choice: Mapping[str, Choice], game: GanModule, world: World, precision: Precision, served: Mapping[str, Servers]
) -> dict[str, Policy]:
    """A policy for each player, the same on all ranks. `served` are the players that other ranks serve."""
    players = game.players
    note_typed({name: str(each) for name, each in choice.items()}, {n: p.follows or n for n, p in players.items()})
    belongings = belongings_of(players, game, game.phases)
    chosen = {name: each for name, each in choose(choice, players).items() if name not in served}
    if any(each.policy == "auto" for each in chosen.values()):
        free = min(world.gather(memory(world.device, world.per_node)))
        decisions = decide(chosen, players, belongings, world, free)
        if world.rank == 0:
            print(in_a_table(decisions, free), flush=True)
        chosen |= {each.player: each.choice(chosen[each.player]) for each in decisions}
    chosen |= {name: chosen[player.follows] for name, player in players.items() if player.follows is not None}
    policies = {
        name: RemotePlayer(player, world, {}, belongings[name], servers=served[name])
        if name in served
        else POLICIES[chosen[name].policy](player, world, chosen[name].options, belongings[name])
        for name, player in players.items()
    }
    _lend(policies)
    for name, policy in policies.items():
        if (followed := players[name].follows) is not None:
            policy.followed = policies[followed]
        if "bf16" in policy.options and precision.precision != "bf16-mixed":
            raise UserError(
                f"player '{name}': with option bf16 layers compute with bfloat16 weights, which needs autocast; "
                f"type --precision bf16-mixed, or leave bf16 out"
            )
    return policies


def _lend(policies: Mapping[str, Policy]) -> None:
    """Let each policy know the others that store parameters of its player's network."""
    for name, policy in policies.items():
        has = set(map(id, policy.player.module.parameters()))
        others = [other for key, other in policies.items() if key != name]
        policy.lenders = [other for other in others if has & set(map(id, other.belongings.parameters.values()))]
        for other in policy.lenders if "recompute" in policy.options else ():
            if other.weights and has.intersection(map(id, other.weights.values())):
                raise UserError(
                    f"player '{name}': option recompute would run its blocks again, and player '{other.player.name}' "
                    f"may have changed weights in them; leave recompute out for '{name}'"
                )


def decide(
    chosen: Mapping[str, Choice],
    players: Mapping[str, Player],
    belongings: Mapping[str, Belongings],
    world: World,
    free: float,
) -> "list[Decision]":
    """What `auto` takes for each player that has it, if so many bytes are free on a rank."""

    def need(name: str, text: str, options: Mapping[str, Any]) -> Held:
        """Of a player and of those that follow it, under a policy."""
        kind, *more = text.split("+")
        made: dict[str, Policy] = {}
        for key in sorted(players, key=lambda key: key != name):
            if name in (key, players[key].follows):
                taken = {option: each for option, each in options.items() if option in POLICIES[kind].takes}
                made[key] = POLICIES[kind](players[key], world, {**dict.fromkeys(more), **taken}, belongings[key])
                made[key].followed = None if key == name else made[name]
        return sum((policy.in_a_phase() for policy in made.values()), Held())

    decided = {name: choice for name, choice in chosen.items() if choice.policy != "auto"}
    taken = sum(need(name, choice.policy, choice.options).bytes for name, choice in decided.items())
    needs = {}
    for name in [name for name in chosen if name not in decided]:
        levels = levels_of(POLICIES["ddp"](players[name], world, {}, belongings[name]))
        needs[name] = {level: need(name, level, chosen[name].options) for level in levels}
    return choose_levels(needs, taken, free)


# ---- auto: from the memory that a player would need on a rank, and the memory available ----

# What a player needs is what its policies say, `Policy.in_a_phase`, for which no phase is played.
USABLE = 0.5  # of the free memory; the rest is for activations, whose size is not known before the first batch

# From the least communication to the least memory.
LEVELS = ("ddp", "zero1", "zero2", "zero3", "zero3+offload")
Needs = Mapping[str, Held]  # by level: what a rank needs for a player


def levels_of(policy: Policy) -> tuple[str, ...]:
    """The levels that this policy's player can have and that differ for it, from the least communication on."""
    if policy.world.size == 1 or not policy.optimizer_cost.elementwise:
        return LEVELS[:1]
    return LEVELS if policy.weights else ("ddp", "zero3", "zero3+offload")


@dataclass(frozen=True)
class Decision:
    """The policy that is chosen for a player. `needs` has its levels in their order."""

    player: str
    level: str
    needs: Needs

    def choice(self, asked: Choice) -> Choice:
        """The choice as if the user had typed it, with the options that the user typed."""
        name, *options = self.level.split("+")
        return Choice(name, {**dict.fromkeys(options), **asked.options})

    @property
    def bytes(self) -> float:
        return self.needs[self.level].bytes

    @property
    def next(self) -> "Decision | None":
        levels = list(self.needs)
        later = [replace(self, level=level) for level in levels[levels.index(self.level) + 1 :]]
        return next((each for each in later if each.bytes < self.bytes), None)


class Auto(Policy):
    """A placeholder until the players are known and a policy is chosen. It takes the options that all policies take."""

    name = "auto"
    max_ranks = None


def choose_levels(players: Mapping[str, Needs], taken: float, free: float) -> list[Decision]:
    """Choose the policies that fit with the least communication.

    All players begin with ddp. While they do not fit, the player that saves most memory takes its next policy. `taken`
    is the number of bytes of the players whose policy the user has chosen.
    """
    decisions = {name: Decision(name, "ddp", needs) for name, needs in players.items()}
    while taken + sum(each.bytes for each in decisions.values()) > free * USABLE:
        smaller = {name: then for name, each in decisions.items() if (then := each.next) is not None}
        if not smaller:
            break
        # Offload is slow, so it comes last.
        name = max(smaller, key=lambda n: ("offload" not in smaller[n].level, decisions[n].bytes - smaller[n].bytes, n))
        decisions[name] = smaller[name]
    return list(decisions.values())


def memory(device: torch.device, local: int) -> float:
    """Free bytes for a rank: on its device, with torch's unused cache, or on CPU its part of this machine's memory.

    On CPU a limit of the process counts too, such as that of `ulimit -v`.
    """
    if device.type not in ("cpu", "mps"):  # Apple's devices compute in the machine's own memory
        free, _ = torch.accelerator.get_memory_info(device)
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    left = [free_memory() / local]
    if LINUX:  # only Linux says how much of a limit is used
        for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            soft, _ = resource.getrlimit(limit)
            if soft != resource.RLIM_INFINITY:
                left.append(max(0, soft - in_proc("self/status", name)))
    return min(left)


def in_a_table(decisions: Sequence[Decision], free: float) -> str:
    budget, all_ = free * USABLE, sum(each.bytes for each in decisions)
    as_ddp = sum(each.needs["ddp"].bytes for each in decisions)
    rows: list[tuple[str, ...]] = [
        ("player", "chosen", "weights", "gradients", "optimizer, average", "on a rank", "as ddp")
    ]
    for each in decisions:
        whole = each.needs["ddp"]
        amounts = [whole.weights, whole.gradients, whole.optimizer + whole.average, each.bytes, whole.bytes]
        rows.append((each.player, each.level, *map(readable_bytes, amounts)))
    if as_ddp <= budget:
        why = f"ddp fits: {readable_bytes(as_ddp)} a rank"
    elif all_ <= budget:
        why = f"ddp would need {readable_bytes(as_ddp)} a rank; sharded as below it is {readable_bytes(all_)}"
    else:
        why = f"it may not fit: {readable_bytes(all_)} a rank; use more ranks"
    room = (
        f", of {readable_bytes(budget)} ({readable_bytes(free)} free, half left for activations)"
        if free < math.inf
        else ""
    )
    return "\n".join([f"auto: {why}{room}", *table(rows, left=(0, 1))])
