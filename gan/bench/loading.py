"""How many pictures a second are read, resized, augmented and given to the trainer.

The pictures are like those of CelebAMask-HQ: JPEG of 1024 px and label maps of 512 px. A few files are read again and
again from memory, so the figures do not depend on the disk. All is measured in one process of one thread; the loader
gives batches of 8, by so many worker processes.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from datasets import Augment, Faces, FolderPairs, GanData
from datasets.augment import Prepared, to_tensors
from datasets.files.pairs import read_map, read_picture, resize_map, resize_picture
from gan.bench.harness import Benchmark, Cell, Column, Figures

DRAWN = 8  # different pictures
WORKERS = (0, 1, 2)


class LoadingBenchmark(Benchmark[Cell]):
    """A start of the data set, each step from a file to tensors by itself and all together, and the loader."""

    name, places = "loading", ("step",)
    columns = (Column("ms", ".3f", 1e-3), Column("pictures/s", ".0f"), Column("a worker", ".0f"))

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--size", type=int, default=256, help="height and width of what is trained on")
        add("--stored", type=int, default=1024, help="height and width of the JPEG pictures")
        add("--pictures", type=int, default=256, help="how many to read for each line of the table")

    def play(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker process
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.kilobytes = _draw(Path(folder), self.settings.stored, self.settings.pictures)
                self.starts = {}
                for start in ("first start", "second start"):
                    began = time.perf_counter()
                    self.pairs = FolderPairs(Path(folder), Faces.num_labels, self.settings.size, Faces.flip_pairs)
                    self.starts[start] = time.perf_counter() - began
                self.stages = _stages(self.pairs)
                super().play()
        finally:
            torch.set_num_threads(threads)

    def cells(self) -> Iterator[Cell]:
        return ((step,) for step in (*self.starts, *self.stages, *(f"{number} workers" for number in WORKERS)))

    def measure(self, cell: Cell) -> Figures:
        (step,), a_worker = cell, None
        if step in self.starts:
            rate = self.settings.pictures / self.starts[step]
        elif step in self.stages:
            rate = _rate(self.stages[step], self.settings.pictures)
        else:
            workers = int(step.split()[0])
            rate = _loader_rate(self.pairs, workers)
            a_worker = rate / max(1, workers)
        return {"ms": 1 / rate, "pictures/s": rate, "a worker": a_worker}

    def heading(self) -> str:
        stored = self.settings.stored
        return (
            f"{self.settings.pictures} pictures, JPEG of {stored} px ({self.kilobytes:.0f} kB each) and PNG of "
            f"{stored // 2} px, to {self.settings.size} px"
        )


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

    def one_pass(epoch: int) -> int:
        loader.sampler.set_epoch(epoch)
        return sum(len(batch["image"]) for batch in loader)

    one_pass(0)
    began = time.perf_counter()
    return one_pass(1) / (time.perf_counter() - began)
