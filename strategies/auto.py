"""auto: chooses a policy for each player, from the memory it would need on a rank and the memory available.

What a player needs is what its policies say, `Policy.at_most`: the model of cost that `gan.plan` goes by too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from gan.files.system import LINUX, free_memory, resource
from strategies.amounts import Held, readable
from strategies.choice import Choice
from strategies.policies.policy import Policy

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
        """The next policy that needs less memory."""
        levels = list(self.needs)
        later = [replace(self, level=level) for level in levels[levels.index(self.level) + 1 :]]
        return next((each for each in later if each.bytes < self.bytes), None)


class Auto(Policy):
    """A placeholder until the players are known and a policy is chosen. It takes the options that all policies take."""

    name = "auto"
    max_ranks = None


def decide(players: Mapping[str, Needs], taken: float, free: float) -> list[Decision]:
    """Choose the policies that fit with the least communication.

    All players begin with ddp. While they do not fit, the player that saves most memory takes its next policy. `taken`
    is the number of bytes of the players whose policy the user has chosen.
    """
    decisions = {name: Decision(name, "ddp", needs) for name, needs in players.items()}
    while taken + sum(each.bytes for each in decisions.values()) > free * USABLE:
        steps = [
            ("offload" not in each.next.level, each.bytes - each.next.bytes, name)  # offload is slow, so it comes last
            for name, each in decisions.items()
            if each.next is not None
        ]
        if not steps:
            break
        *_, name = max(steps)
        decisions[name] = decisions[name].next
    return list(decisions.values())


def memory(device: torch.device, local: int) -> float:
    """Free bytes for a rank: on its device, with torch's unused cache, or on CPU its part of this machine's memory.

    On CPU a limit of the process counts too, such as that of `ulimit -v`.
    """
    if device.type not in ("cpu", "mps"):  # Apple's devices compute in the machine's own memory
        free, _ = torch.accelerator.get_memory_info(device)
        return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return min([free_memory() / local, *_left()])


def _left() -> Iterator[float]:
    """What the limits of this process leave."""
    if not LINUX:  # only Linux says how much of a limit is used
        return
    with open("/proc/self/status") as file:
        used = dict(line.split(":", 1) for line in file)
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        yield math.inf if soft == resource.RLIM_INFINITY else max(0, soft - int(used[name].split()[0]) * 1024)


def told(decisions: Iterable[Decision], free: float) -> str:
    """A table of what was chosen, and why."""
    decisions = list(decisions)
    budget, all_ = free * USABLE, sum(each.bytes for each in decisions)
    as_ddp = sum(each.needs["ddp"].bytes for each in decisions)
    rows = [("player", "chosen", "weights", "gradients", "optimizer, average", "on a rank", "as ddp")]
    for each in decisions:
        whole = each.needs["ddp"]
        amounts = [whole.weights, whole.gradients, whole.optimizer + whole.average, each.bytes, whole.bytes]
        rows.append((each.player, each.level, *map(readable, amounts)))
    wide = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, wide, strict=True)))
        for row in rows
    ]
    if as_ddp <= budget:
        why = f"ddp fits: {readable(as_ddp)} a rank"
    elif all_ <= budget:
        why = f"ddp would need {readable(as_ddp)} a rank; sharded as below it is {readable(all_)}"
    else:
        why = f"it may not fit: {readable(all_)} a rank; use more ranks"
    room = f", of {readable(budget)} ({readable(free)} free, half left for activations)" if free < math.inf else ""
    return "\n".join([f"auto: {why}{room}", *lines])
