"""How many pictures a second are read, resized, augmented and given to the trainer.

The pictures are like those of CelebAMask-HQ: JPEG of 1024 px and label maps of 512 px. A few files are read again and
again from memory, so the figures do not depend on the disk.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from datasets import Augment, Faces, FolderPairs, GanData
from datasets.augment import Prepared, to_tensors
from datasets.files.pairs import read_map, read_picture, resize_map, resize_picture
from gan.app.run.parser import PlainParser

DRAWN = 8  # different pictures
WORKERS = (0, 1, 2)


def main(argv: list[str]) -> int:
    """Draw a data set, measure each step of reading it, and print a table."""
    parser = PlainParser(prog="python -m gan.bench loading", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="height and width of what is trained on")
    parser.add_argument("--stored", type=int, default=1024, help="height and width of the JPEG pictures")
    parser.add_argument("--pictures", type=int, default=256, help="how many to read for each line of the table")
    settings = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker process
    try:
        with tempfile.TemporaryDirectory() as folder:
            _report(Path(folder), settings.size, settings.stored, settings.pictures)
    finally:
        torch.set_num_threads(threads)
    return 0


def _report(folder: Path, size: int, stored: int, pictures: int) -> None:
    kilobytes = _draw(folder, stored, pictures)
    print(
        f"{pictures} pictures, JPEG of {stored} px ({kilobytes:.0f} kB each) and PNG of {stored // 2} px, to {size} px"
    )
    for start in ("first", "second"):
        began = time.perf_counter()
        pairs = FolderPairs(folder, Faces.num_labels, size, Faces.flip_pairs)
        seconds = time.perf_counter() - began
        print(f"{start} start: {seconds:.2f} s, {pictures / seconds:.0f} pictures/s")

    print(f"\n{'one process':34}{'ms':>8}{'pictures/s':>12}")
    for name, stage in _stages(pairs).items():
        rate = _rate(stage, pictures)
        print(f"{name:34}{1000 / rate:8.3f}{rate:12.0f}")

    print(f"\n{'the loader, batches of 8':34}{'pictures/s':>12}{'a worker':>12}")
    for workers in WORKERS:
        rate = _loader_rate(pairs, workers)
        print(f"{f'{workers} workers':34}{rate:12.0f}{rate / max(1, workers):12.0f}")


def _draw(folder: Path, stored: int, pictures: int) -> float:
    """Draw faces with the noise of a camera and link each under many names; gives the kilobytes of a picture."""
    faces, dice = Faces(DRAWN, max(16, stored // 2), seed=5), np.random.default_rng(5)
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    drawn = []
    for face in range(min(DRAWN, pictures)):
        image, label = folder / f"{face}.jpg", folder / f"{face}.png"
        pixels = np.asarray(faces.draw(face).resize((stored, stored), Image.Resampling.BICUBIC))
        noise = dice.normal(0, 4, pixels.shape)
        Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(image, quality=85)
        faces.label(face).resize((stored // 2, stored // 2), Image.Resampling.NEAREST).save(label)
        drawn.append((image, label))
    for number, (image, label) in zip(range(pictures), itertools.cycle(drawn)):
        os.link(image, folder / "images" / f"{number:05d}.jpg")
        os.link(label, folder / "labels" / f"{number:05d}.png")
    return sum(image.stat().st_size for image, _ in drawn) / len(drawn) / 1000


def _stages(pairs: FolderPairs) -> dict[str, Callable[[int], object]]:
    """The steps from a file to tensors, each by itself and all together."""
    picture, label = pairs.paths(0)
    image, values, item = read_picture(picture), read_map(label), pairs[0]
    augment = Augment(flip_pairs=pairs.flip_pairs)
    whole = Prepared(pairs, Augment(crop=True, flip_pairs=pairs.flip_pairs))
    return {
        "decode the picture": lambda k: read_picture(pairs.paths(k)[0]),
        "decode the label map": lambda k: read_map(pairs.paths(k)[1]),
        "resize the picture, bicubic": lambda _: resize_picture(image, pairs.size),
        "resize the label map, nearest": lambda _: resize_map(values, pairs.size),
        "mirror, and make tensors": lambda k: to_tensors(augment(item, 0, k)),
        "all, with the cut of 286 to 256": lambda k: whole[0, k],
    }


def _rate(stage: Callable[[int], object], pictures: int) -> float:
    stage(0)
    began = time.perf_counter()
    for number in range(pictures):
        stage(number)
    return pictures / (time.perf_counter() - began)


def _loader_rate(pairs: FolderPairs, workers: int) -> float:
    """Pictures a second in the second pass over the data; the first pass starts the workers."""
    data = GanData(pairs, batch_size=min(8, len(pairs)), workers=workers, crop=True)
    loader = data.train_dataloader()

    def one_pass(epoch: int) -> Iterator[int]:
        loader.sampler.set_epoch(epoch)
        return (len(batch["image"]) for batch in loader)

    sum(one_pass(0))
    began = time.perf_counter()
    return sum(one_pass(1)) / (time.perf_counter() - began)
