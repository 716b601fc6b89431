"""SEAN's whole step in both ways. Each way has a process of its own, which waits while the other has its turn."""

import argparse
import multiprocessing as mp
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from gan.bench.sean import steps
from gan.errors import UserError

HEAD = (
    f"{'batch':>5}  {'':22}{'seconds':>9}{'generator':>11}{'discriminator':>15}{'times as fast':>15}"
    f"{'kept MB':>9}{'share':>7}{'peak MB':>9}{'share':>7}{'of limit':>10}{'difference':>12}"
)


def measure(settings: argparse.Namespace) -> None:
    """Train both ways for some steps at each batch size, and print a line for each way."""
    sizes = {name: getattr(settings, name) for name in ("size", "labels", "width", "hidden", "style")}
    for number, batch in enumerate(settings.batches):
        found = play(list(steps.WAYS), settings.repeats, batch=batch, **sizes)
        if not number:
            place, rate = found["ours"]["place"], found["ours"]["rate"] / 1e9
            print(f"SEAN's whole step at {settings.size} px, on {place}; a plain convolution has {rate:.0f} GFLOP/s")
            print(HEAD)
        for line in lines(batch, found):
            print(line, flush=True)


def play(ways: list[str], repeats: int, **sizes: int) -> dict[str, dict[str, Any]]:
    """The figures of each way: the fastest of its steps, after one that is not counted."""
    context = mp.get_context("spawn")
    players = {}
    try:
        for way in ways:
            ours, theirs = context.Pipe()
            process = context.Process(target=steps.WAYS[way], args=(theirs, 1 + repeats, sizes), daemon=True)
            process.start()
            theirs.close()
            players[way] = process, ours
        found: dict[str, dict[str, Any]] = {}
        with tqdm(total=(1 + repeats) * len(ways), desc=f"batch {sizes['batch']}", unit="step", leave=False) as bar:
            for _ in range(1 + repeats):
                for way, (_, line) in players.items():
                    figures = _turn(way, line)
                    found.setdefault(way, figures | {"seconds": []})["seconds"] += figures["seconds"]
                    bar.update()
        for way, (process, line) in players.items():
            found[way] |= line.recv()
            process.join()
    finally:
        for process, _ in players.values():
            process.kill()
    return {way: figures | {"seconds": min(figures["seconds"][1:], key=sum)} for way, figures in found.items()}


def _turn(way: str, line: Connection) -> dict[str, Any]:
    try:
        line.send(None)
        return line.recv()
    except (EOFError, ConnectionError):
        raise UserError(f"{way} ended without a word; is there too little memory? try --batches 1") from None


def lines(batch: int, found: dict[str, dict[str, Any]]) -> list[str]:
    """The table's lines for a batch size; shares are of the first way."""
    first = next(iter(found.values()))
    made = []
    for way, own in found.items():
        generator, discriminator = own["seconds"]
        whole = generator + discriminator
        faster = sum(first["seconds"]) / whole
        limit = f"{own['flops'] / own['rate'] / whole:9.0%}" if "rate" in own else " " * 9
        apart = abs(own["loss"] / first["loss"] - 1)
        made.append(
            f"{batch:5}  {way:22}{whole:9.2f}{generator:11.2f}{discriminator:15.2f}{faster:15.2f}"
            f"{own['kept'] / 2**20:9.0f}{own['kept'] / first['kept']:7.2f}"
            f"{own['peak'] / 2**20:9.0f}{own['peak'] / first['peak']:7.2f} {limit}{apart:12.1e}"
        )
    return made
