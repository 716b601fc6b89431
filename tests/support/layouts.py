"""Tiny data sets on disk, each in the exact layout of the published one."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from datasets import ADE20K, CelebAMask, Cityscapes, CocoStuff, Facades, FolderPairs


def put(path, values, mode=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = values if isinstance(values, Image.Image) else Image.fromarray(np.asarray(values, np.uint8))
    if mode:
        picture = picture.convert(mode)
    picture.save(path, **options)
    return path


def hollow_png(width, height, content=b""):
    """A PNG that says that it is so large, and has these bytes for its pixels."""
    size = struct.pack(">II", width, height) + b"\x08\x02\x00\x00\x00"
    chunks = []
    for name, data in ((b"IHDR", size), (b"IDAT", zlib.compress(content)), (b"IEND", b"")):
        chunks += [struct.pack(">I", len(data)), name + data, struct.pack(">I", zlib.crc32(name + data))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def pairs(root, *names, suffix="png"):
    for name in names:
        put(root / "images" / f"{name}.{suffix}", colours())
        put(root / "labels" / f"{name}.png", labels())
    return root


def colours(height=8, width=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3))


def labels(height=8, width=8, top=4, seed=1):
    return np.random.default_rng(seed).integers(0, top, (height, width))


@dataclass
class Written:
    """A data set on disk: how to open it, and the files of its first split in the order of their samples."""

    open: Callable[..., Any]
    pictures: list[Path]
    labels: list[Path]
    allowed: str = ""  # what is said of the range of its labels


def folder(root):
    """Names with and without a folder in them."""
    names = ["a", "b", "c/d"]
    return Written(
        lambda size=8, split="all": FolderPairs(root, 4, size, split=split, held_out=1),
        [put(root / "images" / f"{name}.jpg", colours(seed=k)) for k, name in enumerate(names)],
        [put(root / "labels" / f"{name}.png", labels(seed=k)) for k, name in enumerate(names)],
        "with 4 labels the allowed range is 0..3",
    )


def prepared(root):
    """CelebA-HQ as prepared for SEAN."""
    for split, first, number in (("train", 0, 3), ("test", 28000, 2)):
        for k in range(first, first + number):
            put(root / split / "images" / f"{k}.jpg", colours(16, 16, seed=k))
            put(root / split / "labels" / f"{k}.png", labels(16, 16, top=19, seed=k))
    return Written(
        lambda size=8, split="train": FolderPairs(root, 19, size, split=split),
        [root / "train" / "images" / f"{k}.jpg" for k in range(3)],
        [root / "train" / "labels" / f"{k}.png" for k in range(3)],
        "with 19 labels the allowed range is 0..18",
    )


def ade20k(root):
    base = root / "ADEChallengeData2016"
    for split, short, number in (("training", "train", 3), ("validation", "val", 2)):
        for k in range(1, number + 1):
            put(base / "images" / split / f"ADE_{short}_{k:08d}.jpg", colours(10, 12, seed=k))
            put(base / "annotations" / split / f"ADE_{short}_{k:08d}.png", labels(10, 12, top=151, seed=k))
    return Written(
        lambda size=8, split="train": ADE20K(root, split, size),
        [base / "images" / "training" / f"ADE_train_{k:08d}.jpg" for k in (1, 2, 3)],
        [base / "annotations" / "training" / f"ADE_train_{k:08d}.png" for k in (1, 2, 3)],
        "with 151 labels the allowed range is 0..150",
    )


def cityscapes(root):
    """Two cities; instances are 16-bit numbers, as published."""
    frames = [("aachen", "000001_000019"), ("aachen", "000000_000019"), ("zurich", "000000_000019")]
    frames = [(city, f"{city}_{frame}") for city, frame in frames]
    for split, some in (("train", frames), ("val", [("lindau", "lindau_000000_000019")])):
        for k, (city, frame) in enumerate(some):
            put(root / "leftImg8bit" / split / city / f"{frame}_leftImg8bit.png", colours(8, 16, seed=k))
            stem = root / "gtFine" / split / city / f"{frame}_gtFine"
            values = labels(8, 16, top=34, seed=k)
            put(Path(f"{stem}_labelIds.png"), values)
            put(Path(f"{stem}_instanceIds.png"), Image.fromarray((values * 1000 + 1).astype(np.uint16)))
            put(Path(f"{stem}_color.png"), colours(8, 16))
            Path(f"{stem}_polygons.json").write_text("{}")
    order = [frames[1], frames[0], frames[2]]
    return Written(
        lambda size=(8, 16), split="train", **options: Cityscapes(root, split, size, **options),
        [root / "leftImg8bit" / "train" / city / f"{frame}_leftImg8bit.png" for city, frame in order],
        [root / "gtFine" / "train" / city / f"{frame}_gtFine_labelIds.png" for city, frame in order],
        "with 35 labels the allowed range is 0..34, and 255 for 34",
    )


def coco(root):
    for split, number in (("train2017", 3), ("val2017", 1)):
        for k in range(number):
            values = labels(10, 12, top=182, seed=k)
            values[0, 0] = 255
            put(root / "images" / split / f"{k:012d}.jpg", colours(10, 12, seed=k))
            put(root / "stuffthingmaps" / split / f"{k:012d}.png", values)
            put(root / "instances" / split / f"{k:012d}.png", labels(10, 12, top=3, seed=k))
    return Written(
        lambda size=8, split="train", **options: CocoStuff(root, split, size, **options),
        [root / "images" / "train2017" / f"{k:012d}.jpg" for k in range(3)],
        [root / "stuffthingmaps" / "train2017" / f"{k:012d}.png" for k in range(3)],
        "with 183 labels the allowed range is 0..182, and 255 for 182",
    )


def facades(root):
    """Twelve fronts, eight of them of the base; picture and label map lie side by side."""
    names = [f"base/cmp_b{k:04d}" for k in range(1, 9)] + [f"extended/cmp_x{k:04d}" for k in range(1, 5)]
    for k, name in enumerate(names):
        put(root / f"{name}.jpg", colours(10, 12, seed=k))
        put(root / f"{name}.png", labels(10, 12, top=12, seed=k) + 1)
        (root / f"{name}.xml").write_text("<object/>")
    train = [name for k, name in enumerate(names) if k % 6 < 4]
    return Written(
        lambda size=8, split="train": Facades(root, split, size),
        [root / f"{name}.jpg" for name in train],
        [root / f"{name}.png" for name in train],
        "with 13 labels the allowed range is 0..12",
    )


ORIGINS = {0: 0, 1: 162771, 2: 162770, 3: 182638, 4: 182637, 2000: 119613}  # of pictures in CelebA


def celebamask(root, height=8, width=8):
    """Six faces of a few parts; the masks of the last lie in another folder."""
    base = root / "CelebAMask-HQ"
    base.mkdir(parents=True)
    rows = [f"{number} {origin} {origin + 1:06d}.jpg" for number, origin in ORIGINS.items()]
    (base / "CelebA-HQ-to-CelebA-mapping.txt").write_text("\n".join(["idx orig_idx orig_file", *rows, ""]))
    for number in ORIGINS:
        put(base / "CelebA-HQ-img" / f"{number}.jpg", colours(2 * height, 2 * width, seed=number))
        for part in ("skin", "nose", "l_eye", "hair"):
            put(mask(base, number, part), part_of_face(part, height, width))
    train = (0, 2, 2000)
    return Written(
        lambda size=8, split="train": CelebAMask(root, split, size),
        [base / "CelebA-HQ-img" / f"{number}.jpg" for number in train],
        [base / ".." / "CelebAMask-HQ.gan-cache" / "labels" / f"{number}.png" for number in train],
    )


def mask(base, number, part):
    return base / "CelebAMask-HQ-mask-anno" / str(number // 2000) / f"{number:05d}_{part}.png"


def part_of_face(part, height=8, width=8):
    """White where the part is: skin below, hair on top of its upper rows, nose and eye inside."""
    values = np.zeros((height, width))
    top, bottom, left, right = {
        "skin": (2, 8, 1, 7),
        "nose": (4, 6, 3, 5),
        "l_eye": (3, 4, 2, 3),
        "hair": (0, 3, 0, 8),
    }[part]
    values[top * height // 8 : bottom * height // 8, left * width // 8 : right * width // 8] = 255
    return values


LAYOUTS = {layout.__name__: layout for layout in (folder, prepared, ade20k, cityscapes, coco, facades, celebamask)}
