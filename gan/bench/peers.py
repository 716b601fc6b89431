"""The same small GAN under other frameworks and ours: who is exact, and how fast.

Two networks learn in turns, without a gradient penalty (plain) and with one (r1). Every peer is used as its
documentation says. It runs in processes of its own with a time limit, so that it may fail or hang.
  difference  of its weights after ten steps from those of one device. It is exact to 1e-10 in float64, and to 1e-6 for
              DeepSpeed, which computes in float32
  of by hand  its speed compared with a loop by hand in plain torch: 1.00 is as fast. The two run in turns in the same
              processes, in float32, and the fastest round of each counts
  payload     the bytes that collectives get on a rank in a step, of input and output the larger (a network needs
              twice as long to all-reduce a tensor as to gather or scatter it)
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from torch.utils.data import DataLoader

from gan.bench import frameworks
from gan.bench.harness import Benchmark, Cell, Column, Figures, in_world
from gan.bench.task import STEPS, Feed, Task, Weights
from gan.files.errors import UserError
from gan.files.system import cores
from strategies.policies import POLICIES

GAMES = ("plain", "r1")
THRESHOLD = {torch.float64: 1e-10, torch.float32: 1e-6}  # of the largest difference of a weight after ten steps


@dataclass(frozen=True)
class Peer:
    """A line of the table: how it plays a task, the packages that it needs, and its number format."""

    title: str
    way: Callable[[Task], Weights]
    needs: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return self.title


def peers() -> Iterator[Peer]:
    yield Peer("torch, by hand", frameworks.by_hand)
    yield Peer("torch, DDP", frameworks.torch_ddp)
    yield Peer("torch, FSDP2", frameworks.fsdp2)
    yield Peer("torch, FSDP2 kept gathered", partial(frameworks.fsdp2, held=True))
    for strategy in ("ddp", "ddp_find_unused_parameters_true"):
        yield Peer(f"Lightning {strategy}", partial(frameworks.lightning, strategy=strategy))
    yield Peer("Accelerate, DDP", frameworks.accelerate_ddp, ("accelerate",))
    for number, words in ((1, "one Accelerator"), (2, "two Accelerators")):
        way = partial(frameworks.accelerate_deepspeed, accelerators=number)
        needs = ("accelerate", "deepspeed", "transformers")
        yield Peer(f"Accelerate, DeepSpeed 2, {words}", way, needs, torch.float32)
    for stage in (1, 2, 3):
        way = partial(frameworks.deepspeed, stage=stage)
        yield Peer(f"DeepSpeed {stage}, two engines", way, ("deepspeed",), torch.float32)
    for name, policy in POLICIES.items():
        if name != "dp" and (policy.max_ranks is None or policy.max_ranks > 1):  # a rank of dp is one of ddp
            own = ((), torch.float64) if policy.package is None else ((policy.package,), torch.float32)
            yield Peer(f"ours, {name}", partial(frameworks.ours, policy=name), *own)


def measure(peer: Peer, task: Task, rounds: int, steps: int, limit: float = 180.0) -> Figures:
    """A peer's figures, by ranks of its own. What it needs and is not installed is an error."""
    missing = [package for package in peer.needs if find_spec(package) is None]
    if missing:
        raise UserError(f"skipped: {' and '.join(missing)} not installed")
    request = peer.way, replace(task, dtype=peer.dtype), rounds, steps
    found = in_world(compare, *request, ranks=task.ranks, threads=1, limit=limit, device=task.device)
    worst = next((own for own in found if own["verdict"] != "exact"), found[0])
    return {**found[0], "verdict": worst["verdict"], "difference": worst["difference"]}


def compare(way: Callable[[Task], Weights], task: Task, rounds: int, steps: int) -> Figures:
    """On each rank: compare the weights after ten steps with one device, then measure the speed."""
    task = replace(task, rank=dist.get_rank())

    # Is it exact?
    # pyrefly: ignore[bad-argument-type] - torch reads any sequence
    batches = DataLoader([task.batch(step) for step in range(STEPS)], batch_size=None)
    one = replace(task, rank=0, ranks=1)
    alone = frameworks.by_hand(replace(one, batches=map(one.batch, range(STEPS))))
    difference = distance(way(replace(task, batches=batches)), alone)
    verdict = "exact" if difference <= THRESHOLD[task.dtype] else "WRONG"

    # How fast is it? All are measured in the same number format.
    task = replace(task, dtype=torch.float32)
    feed = Feed(task, rounds, steps)
    way(replace(task, batches=feed))
    peer, hand = min(feed.peer_seconds), min(feed.hand_seconds)
    speed = {"steps/s": steps / peer, "of by hand": hand / peer, "payload, kB": feed.payload}
    return {"verdict": verdict, "difference": difference, **speed}


def distance(one: Weights, other: Weights) -> float:
    """The largest difference of a weight; NaN where a weight is NaN."""
    assert one.keys() == other.keys()
    return torch.stack([(one[name].double() - other[name].double()).abs().max() for name in other]).max().item()


class PeersBenchmark(Benchmark[Cell]):
    name, places = "peers", ("game", "peer")
    rounds = 1  # of processes; those of steps are in them
    columns = (
        *(Column("verdict"), Column("difference", ".0e")),
        *(Column("steps/s", ".1f"), Column("of by hand", ".2f"), Column("payload, kB", ".1f", 1000)),
    )

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--games", nargs="+", choices=GAMES, default=list(GAMES), help="with and without a penalty")
        add("--only", nargs="+", metavar="WORD", help="only peers whose line has one of these words, such as ours DDP")
        add("--width", type=PositiveInt, default=512, help="width of the networks' three hidden layers")
        add("--batch-size", type=PositiveInt, default=128, help="samples a step, of all ranks together")
        add("--ranks", type=PositiveInt, default=2, help="processes")
        add("--device", default="cpu", help="cpu, or cuda and the like: then each rank has one of its own")
        add("--rounds", type=PositiveInt, default=20, help="rounds that are timed")
        add("--steps", type=PositiveInt, default=5, help="steps of the peer and of the loop by hand in a round")
        add("--limit", type=float, default=180, help="seconds after which a peer is said to hang")

    def parse(self, argv: Sequence[str]) -> Namespace:
        own = super().parse(argv)
        if own.ranks < 2:
            raise UserError("peers differ on several ranks only; type --ranks 2 or more")
        if own.batch_size % own.ranks:
            fits = -(-own.batch_size // own.ranks) * own.ranks
            raise UserError(f"batch {own.batch_size} is not divisible by {own.ranks} ranks; try --batch-size {fits}")
        devices = torch.accelerator.device_count()
        if own.device != "cpu" and devices < own.ranks:
            words = f"{own.ranks} ranks need a device each, and there are {devices}"
            raise UserError(f"{words}; leave out --device {own.device}")
        own.peers = [peer for peer in peers() if not own.only or any(word in peer.title for word in own.only)]
        if not own.peers:
            raise UserError(f"no peer's line has {' or '.join(own.only)}; there are {'; '.join(map(str, peers()))}")
        return own

    def cells(self) -> Iterator[Cell]:
        return product(self.settings.games, self.settings.peers)

    def measure(self, cell: Cell) -> Figures:
        (game, peer), own = cell, self.settings
        task = Task(game == "r1", own.width, own.batch_size, torch.float64, 0, own.ranks, device=own.device)
        return measure(peer, task, own.rounds, own.steps, own.limit)

    def heading(self) -> str:
        own = self.settings
        return (
            f"{own.ranks} ranks on {own.device}, of one thread each, three hidden layers of {own.width}, batch "
            f"{own.batch_size}; {cores()} cores, load {os.getloadavg()[0]:.1f} at the end"
        )
