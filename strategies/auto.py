"""auto: chooses a policy for each player, from the memory it would need on a rank and the memory available."""

import math
import resource
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from gan.phase import Player
from strategies.choice import Choice
from strategies.optimizers import ELEMENTWISE, has_modes
from strategies.policies.policy import Policy
from strategies.sharding import bucket

USABLE = 0.5  # of the free memory; the rest is for activations, whose size is not known yet
WHOLE_BUCKETS = 7  # how many whole buckets zero2 (of gradients) or zero3 (of weights) holds at the same time

# From the least communication to the least memory. The three numbers are for the weights, for the gradients, and for
# optimizer state with average. Each rank holds on its device: 1 all, 0 its shard, None nothing.
LEVELS = {
    "ddp": (1, 1, 1),
    "zero1": (1, 1, 0),
    "zero2": (1, 0, 0),
    "zero3": (0, 0, 0),
    "zero3+offload": (0, 0, None),
}


@dataclass(frozen=True)
class Size:
    """A player's bytes: weights, gradients, and optimizer state with average."""

    weights: int
    gradients: int
    state: int
    shardable: bool

    @property
    def levels(self) -> list[str]:
        """The levels that this player can have and that differ for it, from the least communication on."""
        if not self.shardable:
            return ["ddp"]
        return list(LEVELS) if self.gradients else ["ddp", "zero3", "zero3+offload"]

    def on_a_rank(self, level: str, ranks: int) -> int:
        """Bytes on the device of one rank, if there are `ranks`. A policy that is not in LEVELS counts as ddp."""
        weights, gradients, state = LEVELS.get(level, LEVELS["ddp"])
        held = self.weights if weights else 0 if state is None else -(-self.weights // ranks)
        held += self.gradients if gradients else -(-self.gradients // ranks)
        held += self.state if state else 0 if state is None else -(-self.state // ranks)
        if weights and (gradients or not self.gradients):
            return held
        return held + min(WHOLE_BUCKETS * bucket.SIZE, self.weights + self.gradients)


@dataclass(frozen=True)
class Decision:
    """The policy that is chosen for a player."""

    player: str
    level: str
    size: Size
    ranks: int

    def choice(self, asked: Choice) -> Choice:
        """The choice as if the user had typed it, with the options that the user typed."""
        name, *options = self.level.split("+")
        return Choice(name, {**dict.fromkeys(options), **asked.options})

    @property
    def bytes(self) -> int:
        return self.size.on_a_rank(self.level, self.ranks)

    @property
    def next(self) -> "Decision | None":
        """The next policy that needs less memory."""
        levels = self.size.levels
        later = [replace(self, level=level) for level in levels[levels.index(self.level) + 1 :]]
        return next((each for each in later if each.bytes < self.bytes), None)


def size_of(player: Player, parameters: Iterable[nn.Parameter]) -> Size:
    """The bytes of a player that stores these parameters.

    One step of its optimizer on a small weight shows how much state it keeps.
    """
    parameters = list(parameters)
    learning = [] if player.frozen else [p for p in parameters if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in learning)
    kind, kept = _kept(player)
    return Size(
        sum(p.numel() * p.element_size() for p in parameters),
        gradients,
        round(gradients * (kept + (player.ema is not None))),
        player.frozen or kind in ELEMENTWISE,
    )


def _kept(player: Player) -> tuple[type | None, float]:
    """The class of a player's optimizer, and the bytes of state that it keeps per byte of weights."""
    if player.frozen:
        return None, 0.0
    trial = nn.Parameter(torch.zeros(64, 64))
    optimizer = player.optimizer([trial])
    trial.grad = torch.zeros_like(trial)
    if has_modes(optimizer):
        optimizer.train()
    optimizer.step()
    tensors = [value for value in optimizer.state[trial].values() if isinstance(value, torch.Tensor)]
    return type(optimizer), sum(t.nbytes for t in tensors if t.numel() > 1) / trial.nbytes


class Auto(Policy):
    """A placeholder until the players are known and a policy is chosen. It takes the options that all policies take."""

    name = "auto"
    max_ranks = None


def decide(players: Mapping[str, Size], taken: int, free: float, ranks: int) -> list[Decision]:
    """Choose the policies that fit with the least communication.

    All players begin with ddp. While they do not fit, the player that saves most memory takes its next policy. `taken`
    is the number of bytes of the players whose policy the user has chosen.
    """
    decisions = {name: Decision(name, "ddp", size, ranks) for name, size in players.items()}
    while taken + sum(each.bytes for each in decisions.values()) > free * USABLE and ranks > 1:
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
    """Free bytes for a rank: on its GPU, with torch's unused cache, or on CPU its part of this machine's memory.

    On CPU a limit of the process counts too, such as that of `ulimit -v`.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with open("/proc/meminfo") as file:
        available = next(line for line in file if line.startswith("MemAvailable"))
    return min(int(available.split()[1]) * 1024 / local, *_left())


def _left() -> Iterator[float]:
    """What the limits of this process leave."""
    with open("/proc/self/status") as file:
        used = dict(line.split(":", 1) for line in file)
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        yield math.inf if soft == resource.RLIM_INFINITY else max(0, soft - int(used[name].split()[0]) * 1024)


def told(decisions: Iterable[Decision], free: float) -> str:
    """A table of what was chosen, and why."""
    decisions = list(decisions)
    budget, all_ = free * USABLE, sum(each.bytes for each in decisions)
    as_ddp = sum(each.size.on_a_rank("ddp", each.ranks) for each in decisions)
    rows = [("player", "chosen", "weights", "gradients", "optimizer, average", "on a rank", "as ddp")]
    for each in decisions:
        parts = (each.size.weights, each.size.gradients, each.size.state)
        amounts = [*parts, each.bytes, each.size.on_a_rank("ddp", each.ranks)]
        rows.append((each.player, each.level, *map(_readable, amounts)))
    wide = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, wide, strict=True)))
        for row in rows
    ]
    if as_ddp <= budget:
        why = f"ddp fits: {_readable(as_ddp)} a rank"
    elif all_ <= budget:
        why = f"ddp would need {_readable(as_ddp)} a rank; sharded as below it is {_readable(all_)}"
    else:
        why = f"it may not fit: {_readable(all_)} a rank; use more ranks"
    return "\n".join(
        [f"auto: {why}, of {_readable(budget)} ({_readable(free)} free, half left for activations)", *lines]
    )


def _readable(bytes_: float) -> str:
    power = min(3, max(0, int(math.log10(max(1, bytes_) * 1.0005) // 3)))
    return f"{bytes_ / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
