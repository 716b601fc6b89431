"""One rank of one peer, in a process of its own: compares weights and measures the speed."""

import importlib
import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from gan.bench.peers.game import STEPS, Feed, HandLoop, Task
from gan.files import whole_file

THRESHOLD = {torch.float64: 1e-10, torch.float32: 1e-6}  # of the largest difference of a weight after ten steps


def main(folder: str, request: str, environment: dict[str, str]) -> None:
    """Run the peer, and write its result and what it printed to the folder."""
    os.environ.update(environment)
    os.setsid()
    place = Path(folder, f"rank-{os.environ['RANK']}.json")
    with place.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        result = play(**json.loads(request))
    except BaseException as error:  # noqa: BLE001 - any error is the peer's result
        traceback.print_exc()
        result = {"failure": first_line(error)}
    with whole_file(place) as part:
        part.write_text(json.dumps({**result, "at": time.time()}))
    # A normal exit could wait for ever, for a peer's threads or a broken process group.
    os._exit(0)


def play(
    way: str, settings: dict[str, Any], dtype: str, penalty: bool, width: int, batch_size: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Compare the weights after ten steps with one device, then measure the speed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module, _, name = way.partition(":")
    run: Callable[[Task], dict[str, Tensor]] = partial(getattr(importlib.import_module(module), name), **settings)
    task = Task(penalty, width, batch_size, getattr(torch, dtype), rank, ranks)

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


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")
