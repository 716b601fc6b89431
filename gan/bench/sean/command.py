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

from datasets.drawn.faces import Faces
from gan.bench.sean import generator, whole
from gan.errors import UserError
from gan.fit.parser import PlainParser


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
    (whole if settings.whole else generator).measure(settings)
    return 0
