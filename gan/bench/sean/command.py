"""SEAN's generator, or its whole step with --whole, against the published way of computing it.

The published way is a plain reference: loops over pictures and labels, whole style maps, nothing recomputed. Both
have the same weights and see the same pictures. They run in turns, and the fastest turn of each counts.

  kept        what a forward pass keeps for the backward pass, without the weights
  difference  between the pictures of both; with --whole between the generator's losses, as a share
With --whole, a step is what a training waits for: the generator's turn and the discriminator's turn, forward,
backward and update, without VGG. Each way has a process of its own. Ours trains by Lightning and PhaseStrategy.
  peak        the most memory that the process had, or that it had of the GPU
  of limit    the time that the step's multiplications take at the machine's own rate, as a share of the time that
              it took; the rate is that of a plain convolution, measured in the same run
"""

import argparse
import multiprocessing as mp
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from datasets.drawn.faces import Faces
from gan.app.run.parser import PlainParser
from gan.bench.sean import generator, steps
from gan.files.errors import UserError

HEAD = (
    f"{'batch':>5}  {'':22}{'seconds':>9}{'generator':>11}{'discriminator':>15}{'times as fast':>15}"
    f"{'kept MB':>9}{'share':>7}{'peak MB':>9}{'share':>7}{'of limit':>10}{'difference':>12}"
)


def measure_whole(settings: argparse.Namespace) -> None:
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


def main(argv: list[str]) -> int:
    """Measure, and print a table."""
    parser = PlainParser(
        prog="python -m gan.bench sean", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--whole", action="store_true", help="the whole step, in place of the generator")
    add("--size", type=int, default=256, help="height and width of the pictures (256)")
    add("--batches", type=int, nargs="+", default=[1, 4], help="pictures at a time (1 4)")
    add("--masks", nargs="+", choices=generator.MASKS, help="drawn faces, random blocks of 16 px, random pixels (all)")
    add("--repeats", type=int, default=3, help="turns of each, after one that does not count (3)")
    add("--labels", type=int, default=19, help="labels of the random masks (19)")
    add("--width", type=int, default=64, help="channels of the last block (64)")
    add("--hidden", type=int, default=128, help="channels of the mask branch (128)")
    add("--style", type=int, default=512, help="length of a style code (512)")
    settings = parser.parse_args(argv)
    if settings.whole and settings.masks not in (None, ["faces"]):
        raise UserError(f"--whole trains on drawn faces; leave out --masks {' '.join(settings.masks)}")
    settings.masks = settings.masks or generator.MASKS
    if (settings.whole or "faces" in settings.masks) and settings.labels != Faces.num_labels:
        advice = "leave out --labels" if settings.whole else "type --masks blocks random"
        raise UserError(f"the drawn faces have {Faces.num_labels} labels; {advice}")
    measure = measure_whole if settings.whole else generator.measure
    measure(settings)
    return 0
