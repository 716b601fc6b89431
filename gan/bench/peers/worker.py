"""One rank of one peer, in a process of its own: compares weights and measures the speed."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from gan.bench.peers.game import STEPS, Feed, HandLoop, Task

THRESHOLD = {torch.float64: 1e-10, torch.float32: 1e-6}  # of the largest difference of a weight after ten steps


def play(request: dict[str, Any]) -> dict[str, Any]:
    """The result for what `measure` asks for."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return compare(**request)


def compare(
    way: str,
    settings: dict[str, Any],
    dtype: str,
    penalty: bool,
    width: int,
    batch_size: int,
    rounds: int,
    steps: int,
    device: str,
) -> dict[str, Any]:
    """Compare the weights after ten steps with one device, then measure the speed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module, _, name = way.partition(":")
    run: Callable[[Task], dict[str, Tensor]] = partial(getattr(importlib.import_module(module), name), **settings)
    task = Task(penalty, width, batch_size, getattr(torch, dtype), rank, ranks, device=device)

    # Is it exact?
    found = run(replace(task, batches=DataLoader([task.batch(step) for step in range(STEPS)], batch_size=None)))
    difference = distance(found, alone(task))
    result = {"difference": difference, "exact": difference <= THRESHOLD[task.dtype], "dtype": dtype}

    # How fast is it? All are measured in the same number format.
    task = replace(task, dtype=torch.float32)
    feed = Feed(task, rounds, steps)
    run(replace(task, batches=feed))
    peer, hand = min(feed.peer_seconds), min(feed.hand_seconds)
    return {**result, "ratio": hand / peer, "rate": steps / peer, "payload": feed.payload}


def alone(task: Task) -> dict[str, Tensor]:
    """The weights of one device after ten steps over the whole batches."""
    hand = HandLoop(replace(task, rank=0, ranks=1))
    for step in range(STEPS):
        hand.step(hand.task.batch(step))
    return hand.weights()


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of a weight; NaN where a weight is NaN."""
    assert one.keys() == other.keys()
    return torch.stack([(one[name].double() - other[name].double()).abs().max() for name in other]).max().item()
