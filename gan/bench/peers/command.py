"""The same small GAN under other frameworks and ours: who is exact, and how fast.

Two networks learn in turns, without a gradient penalty and with one (R1). Every peer is used as its documentation
says. It runs in processes of its own with a time limit, so that it may fail or hang.
  exact       its weights after ten steps are the same as on one device: to 1e-10 in float64, and to 1e-6 for
              DeepSpeed, which computes in float32
  of by hand  its speed compared with a loop by hand in plain torch: 1.00 is as fast. The two run in turns in the same
              processes, in float32, and the fastest round of each counts
  payload     the bytes that collectives get on a rank in a step, of input and output the larger (a network needs
              twice as long to all-reduce a tensor as to gather or scatter it)
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from gan.app.run.parser import PlainParser
from gan.bench.peers import worker
from gan.files.errors import UserError
from strategies.policies import POLICIES
from strategies.processes import world

WAYS = "gan.bench.peers.frameworks"
GAMES = {"plain": "without a gradient penalty", "r1": "with a gradient penalty (R1)"}


@dataclass(frozen=True)
class Peer:
    """A line of the table: the function to run (`way`), its settings, the packages it needs and its number format."""

    title: str
    way: str
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    dtype: str = "float64"


def peers() -> Iterator[Peer]:
    """All peers. Ours are the last: every policy that works on more than one rank."""
    yield Peer("torch, by hand", f"{WAYS}:by_hand")
    yield Peer("torch, DDP", f"{WAYS}:torch_ddp")
    yield Peer("torch, FSDP2", f"{WAYS}:fsdp2")
    yield Peer("torch, FSDP2 kept gathered", f"{WAYS}:fsdp2", {"held": True})
    for strategy in ("ddp", "ddp_find_unused_parameters_true"):
        yield Peer(f"Lightning {strategy}", f"{WAYS}:lightning", {"strategy": strategy})
    yield Peer("Accelerate, DDP", f"{WAYS}:accelerate_ddp", needs=("accelerate",))
    both = {"needs": ("accelerate", "deepspeed", "transformers"), "dtype": "float32"}
    yield Peer("Accelerate, DeepSpeed 2, one Accelerator", f"{WAYS}:accelerate_deepspeed", **both)
    yield Peer("Accelerate, DeepSpeed 2, two Accelerators", f"{WAYS}:accelerate_deepspeed_two", **both)
    for stage in (1, 2, 3):
        yield Peer(f"DeepSpeed {stage}, two engines", f"{WAYS}:deepspeed", {"stage": stage}, ("deepspeed",), "float32")
    for name, policy in POLICIES.items():
        if policy.max_ranks is None or policy.max_ranks > 1:
            needs = () if policy.package is None else (policy.package,)
            yield Peer(f"ours, {name}", f"{WAYS}:ours", {"policy": name}, needs, "float32" if needs else "float64")


def main(argv: list[str]) -> int:
    """Run every peer in both games, and print a table."""
    parser = PlainParser(
        prog="python -m gan.bench peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--games", nargs="+", choices=GAMES, default=list(GAMES), help="with and without a penalty (plain r1)")
    add("--only", nargs="+", metavar="WORD", help="only peers whose line has one of these words, such as ours DDP")
    add("--width", type=int, default=512, help="width of the networks' three hidden layers (512)")
    add("--batch-size", type=int, default=128, help="samples a step, of all ranks together (128)")
    add("--ranks", type=int, default=2, help="processes (2)")
    add("--device", default="cpu", help="cpu, or cuda and the like: then each rank has one of its own (cpu)")
    add("--rounds", type=int, default=20, help="rounds that are timed (20)")
    add("--steps", type=int, default=5, help="steps of the peer and of the loop by hand in a round (5)")
    add("--limit", type=float, default=180, help="seconds after which a peer is said to hang (180)")
    settings = parser.parse_args(argv)
    for name, least in (("width", 1), ("batch_size", 1), ("ranks", 2), ("rounds", 1), ("steps", 1)):
        if getattr(settings, name) < least:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {getattr(settings, name)} is too small; type {option} {least} or more")
    if settings.batch_size % settings.ranks:
        fits = -(-settings.batch_size // settings.ranks) * settings.ranks
        raise UserError(
            f"batch {settings.batch_size} is not divisible by {settings.ranks} ranks; try --batch-size {fits}"
        )
    if settings.device != "cpu" and torch.accelerator.device_count() < settings.ranks:
        raise UserError(
            f"{settings.ranks} ranks need a device each, and there are {torch.accelerator.device_count()}; leave out "
            f"--device {settings.device}"
        )
    chosen = [peer for peer in peers() if not settings.only or any(word in peer.title for word in settings.only)]
    if not chosen:
        raise UserError(
            f"no peer's line has {' or '.join(settings.only)}; there are {'; '.join(p.title for p in peers())}"
        )

    sizes = {name: getattr(settings, name) for name in ("width", "batch_size", "rounds", "steps")}
    print(
        f"{settings.ranks} ranks on {settings.device}, of one thread each, three hidden layers of {settings.width}, "
        f"batch {settings.batch_size}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    for game in settings.games:
        print(f"\n{GAMES[game]:44}{'difference':>12}{'steps/s':>10}{'of by hand':>12}{'payload, kB':>13}", flush=True)
        for peer in chosen:
            result = measure(peer, settings.ranks, settings.limit, settings.device, penalty=game == "r1", **sizes)
            print(f"{peer.title:44}{_line(result)}", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    return 0


def measure(peer: Peer, ranks: int, limit: float, device: str = "cpu", **sizes: Any) -> dict[str, Any]:
    """A peer's figures, or why there are none: under `skipped`, `failure` or `hang`."""
    missing = [package for package in peer.needs if find_spec(package) is None]
    if missing:
        return {"skipped": f"{' and '.join(missing)} not installed"}
    request = {"way": peer.way, "settings": peer.settings, "dtype": peer.dtype, "device": device, **sizes}
    try:
        preload = [worker.__name__, WAYS]
        results = world.call(worker.play, request, ranks=ranks, limit=limit, preload=preload, device=device)
    except world.WorldFailed as failed:
        return {"failure": str(failed)}
    except world.WorldHangs as hangs:
        return {"hang": str(hangs)}
    worst = next((result for result in results if not result["exact"]), results[0])
    return {**results[0], "difference": worst["difference"], "exact": worst["exact"]}


def _line(result: dict[str, Any]) -> str:
    for kind, said in (("skipped", "skipped"), ("failure", "fails"), ("hang", "hangs")):
        if kind in result:
            return f"{said}: {result[kind]}"
    verdict = "exact" if result["exact"] else "WRONG"
    return (
        f"{verdict} {result['difference']:6.0e}{result['rate']:10.1f}{result['ratio']:12.2f}"
        f"{result['payload'] / 1000:13.1f}"
    )
