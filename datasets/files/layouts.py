"""Data sets of pictures with label maps that need no preparation: published ones, and any folder."""

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import Cityscapes as Published

from datasets.drawn.drawing import FLIP_PAIRS, LABELS
from datasets.files import pairs
from datasets.files.cache import MAX_PROBLEMS, all_files, cache_folder, raise_problems, remember
from datasets.files.pairs import PICTURES, Column, Fit, Pairs, Size, look_up_split, opened, read_map, unpacked_folder
from datasets.files.pictures import in_share
from gan.files.disk import read_text
from gan.files.errors import UserError, explained

ADE20K_NAMES = """
other wall building sky floor tree ceiling road bed windowpane grass cabinet sidewalk person earth door table
mountain plant curtain chair car water painting sofa shelf house sea mirror rug field armchair seat fence desk rock
wardrobe lamp bathtub railing cushion base box column signboard chest_of_drawers counter sand sink skyscraper fireplace
refrigerator grandstand path stairs runway case pool_table pillow screen_door stairway river bridge bookcase blind
coffee_table toilet flower book hill bench countertop stove palm kitchen_island computer swivel_chair boat bar
arcade_machine hovel bus towel light truck tower chandelier awning streetlight booth television_receiver airplane
dirt_track apparel pole land bannister escalator ottoman bottle buffet poster stage van ship fountain conveyer_belt
canopy washer plaything swimming_pool stool barrel basket waterfall tent bag minibike cradle oven ball food step tank
trade_name microwave pot animal bicycle lake dishwasher screen blanket sculpture hood sconce vase traffic_light tray
ashcan fan pier crt_screen plate monitor bulletin_board shower radiator glass clock flag"""


class ADE20K(Pairs):
    """ADE20K scene parsing (Zhou et al. 2017): 20,210 + 2,000 pictures of scenes, 150 classes and 'other'.

    `images/{training,validation}/*.jpg` with `annotations/{training,validation}/*.png`. They lie in `root` or in
    `root/ADEChallengeData2016`. Splits are "train" and "val". Labels are numbered as in the files: 0 is 'other', and 1
    to 150 are the classes.
    """

    label_names = tuple(name.replace("_", " ") for name in ADE20K_NAMES.split())
    num_labels = len(label_names)

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256) -> None:
        part = look_up_split(split, {"train": "training", "val": "validation"})
        pictures = Column("picture", (f"images/{part}",), suffixes=PICTURES)
        maps = Column("label map", (f"annotations/{part}",))
        super().__init__(unpacked_folder(root, "ADEChallengeData2016"), (pictures, maps), size)


STREET_CLASSES = sorted(Published.classes, key=lambda kind: kind.id % 35)  # the last is -1, the licence plate


class Cityscapes(Pairs):
    """Cityscapes (Cordts et al. 2016): 2,975 + 500 street scenes with fine annotations, 35 labels and instances.

    `leftImg8bit/{split}/{city}/X_leftImg8bit.png` with `gtFine/{split}/{city}/X_gtFine_labelIds.png`. With `edges`,
    also `X_gtFine_instanceIds.png` beside the label maps. Splits are "train" and "val"; the test set has no labels.
    Labels are the published ids. The licence plate has the id -1, which is 255 in a byte; it becomes 34.
    """

    label_names = tuple(kind.name for kind in STREET_CLASSES)
    num_labels = len(label_names)
    void = {255: 34}  # noqa: RUF012

    def __init__(self, root: str | Path, split: str = "train", size: Size = (256, 512), edges: bool = True) -> None:
        look_up_split(split, {"train": None, "val": None})
        maps = (f"gtFine/{split}",)
        columns = [
            Column("picture", (f"leftImg8bit/{split}",), "_leftImg8bit", (".png", ".jpg")),
            Column("label map", maps, "_gtFine_labelIds"),
        ]
        if edges:
            columns.append(Column("instance map", maps, "_gtFine_instanceIds"))
        super().__init__(Path(root).expanduser(), columns, size)


COCO_NAMES = """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, street
sign, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, hat, backpack,
umbrella, shoe, eye glasses, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball
glove, skateboard, surfboard, tennis racket, bottle, plate, wine glass, cup, fork, knife, spoon, bowl, banana, apple,
sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, mirror, dining table,
window, desk, toilet, door, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink,
refrigerator, blender, book, clock, vase, scissors, teddy bear, hair drier, toothbrush, hair brush, banner, blanket,
branch, bridge, building-other, bush, cabinet, cage, cardboard, carpet, ceiling-other, ceiling-tile, cloth, clothes,
clouds, counter, cupboard, curtain, desk-stuff, dirt, door-stuff, fence, floor-marble, floor-other, floor-stone,
floor-tile, floor-wood, flower, fog, food-other, fruit, furniture-other, grass, gravel, ground-other, hill, house,
leaves, light, mat, metal, mirror-stuff, moss, mountain, mud, napkin, net, paper, pavement, pillow, plant-other,
plastic, platform, playingfield, railing, railroad, river, road, rock, roof, rug, salad, sand, sea, shelf, sky-other,
skyscraper, snow, solid-other, stairs, stone, straw, structural-other, table, tent, textile-other, towel, tree,
vegetable, wall-brick, wall-concrete, wall-other, wall-panel, wall-stone, wall-tile, wall-wood, water-other, waterdrops,
window-blind, window-other, wood, void"""


class CocoStuff(Pairs):
    """COCO-Stuff (Caesar et al. 2018): 118,287 + 5,000 pictures, 91 kinds of things and 91 of stuff.

    `images/{train,val}2017/*.jpg` with `stuffthingmaps/{train,val}2017/*.png`. The pictures may also lie in
    `{train,val}2017`, where their archive unpacks them. With `edges`, there are also one-channel PNGs of instance
    numbers in `instances/{train,val}2017`. Splits are "train" and "val". Labels are numbered as in the files, 0 to 181.
    Void is 255 in the files and becomes 182.
    """

    label_names = tuple(" ".join(name.split()) for name in COCO_NAMES.split(","))
    num_labels = len(label_names)
    void = {255: 182}  # noqa: RUF012

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256, edges: bool = False) -> None:
        part, root = look_up_split(split, {"train": "train2017", "val": "val2017"}), Path(root).expanduser()
        pictures = part if (root / part).is_dir() else f"images/{part}"
        columns = [Column("picture", (pictures,), suffixes=PICTURES), Column("label map", (f"stuffthingmaps/{part}",))]
        if edges:
            columns.append(Column("instance map", (f"instances/{part}",)))
        super().__init__(root, columns, size)


FACADES_NAMES = "none background facade window door cornice sill balcony blind deco molding pillar shop"


class Facades(Pairs):
    """CMP facades (Tylecek and Sara 2013): 606 rectified house fronts.

    `base/cmp_b####.{jpg,png}` and `extended/cmp_x####.{jpg,png}`: picture and label map side by side. Labels are
    numbered as in the files: the classes are 1 to 12. The files do not use 0, but published models count it too (13
    labels). The set has no published split. Here, of every six pictures in the order of their names, four are for
    "train", the fifth is for "val" and the sixth for "test": 404, 101 and 101. (pix2pix has a random split of 400, 100
    and 106.)
    """

    label_names = tuple(FACADES_NAMES.split())
    num_labels = len(label_names)

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256) -> None:
        turns = look_up_split(split, {"train": (0, 1, 2, 3), "val": (4,), "test": (5,)})
        folders, kinds = ("base", "extended"), tuple(kind for kind in PICTURES if kind != ".png")
        columns = (Column("picture", folders, suffixes=kinds), Column("label map", folders))
        super().__init__(Path(root).expanduser(), columns, size)
        self.keep_only(np.flatnonzero(np.isin(np.arange(len(self)) % 6, turns)))


VOID = 255  # what many sets have where nobody knows the label


class FolderPairs(Pairs):
    """`root/images/<name>.jpg` (or png, webp ...) with `root/labels/<name>.png`, of one size.

    Names may contain folders. A label map is a PNG, one-channel or palette, of the numbers 0 to num_labels - 1, or is
    painted in colours that `root/labels.txt` has.
    `flip_pairs` are pairs of labels that change places when a picture is mirrored, such as left and right eye. `void`
    are values in files, and the label that each stands for. `fit` says how other shapes get the size, see `Fit`; what
    "pad" adds has the label of void, or else one more label. `root/labels.txt` may have names, see `labels_of`.

    Split "val" is the last `held_out` pictures by name, or if that is a share such as 0.02, the names decide which they
    are. "train" is the others, and "all" is all of them. If there are folders `root/train` and `root/test`, each with
    images/ and labels/ (CelebA-HQ as prepared for SEAN), these are "train" and "val".
    """

    painted = True

    def __init__(
        self,
        root: str | Path,
        num_labels: int,
        size: Size,
        flip_pairs: tuple[tuple[int, int], ...] = (),
        *,
        split: str = "all",
        held_out: float = 16,
        void: Mapping[int, int] | None = None,
        fit: str = "stretch",
        background: str = "white",
    ) -> None:
        if not 1 <= num_labels <= 65536:
            raise UserError(f"{num_labels} labels do not fit into a label map; try 1 to 65536")
        self.padded = int(fit == "pad" and not void)
        num_labels += self.padded
        self.num_labels, self.flip_pairs = num_labels, flip_pairs
        if void:
            self.void = void
        self.fit = Fit(fit, background, next(iter(self.void.values()), num_labels - 1))
        root = Path(root).expanduser()
        added = dict.fromkeys(self.void.values(), "void") | ({num_labels - 1: "padding"} if self.padded else {})
        typed, colours = labels_of(root)
        names = added | {self.void.get(label, label): name for label, name in typed.items()}
        if len({*names.values()}) < len(names):
            name, what = ("padding", "what --fit pad adds") if self.padded else ("void", f"{min(self.void)} in a map")
            raise UserError(f"{root / NAMES}: {what} is called {name} already; take the line of {name} out")
        if names and max(names) >= num_labels:
            raise UserError(
                f"{root / NAMES} has a name for label {max(names)}, and the labels are 0 to {num_labels - 1}; type "
                f"--labels {max(names) + 1}, or take the line out"
            )
        if colours:
            self.void = {**self.void, **colours}
        self.label_names = tuple(names.get(label, str(label)) for label in range(num_labels))
        prepared = not (root / "images").is_dir() and (root / "train" / "images").is_dir()
        parts = {"train": ("train/",), "val": ("test/",), "all": ("train/", "test/")}
        folders = look_up_split(split, parts if prepared else dict.fromkeys(parts, ("",)))
        pictures = Column("picture", tuple(f"{part}images" for part in folders), suffixes=PICTURES)
        super().__init__(root, (pictures, Column("label map", tuple(f"{part}labels" for part in folders))), size)
        if split == "all" or prepared:
            return
        if len(self) == 1:
            raise UserError(f"one picture in '{self.root}' is none to hold out; add a second")
        out = np.arange(len(self)) >= len(self) - held_out
        if isinstance(held_out, float):
            out = in_share(self.sample_names, held_out)
        if not 0 < out.sum() < len(self):
            found = f"{len(self)} pictures in '{self.root}'"
            raise UserError(f"{found}, {held_out} to hold out; type a --held-out of 1 to {len(self) - 1}")
        self.keep_only(out if split == "val" else ~out)

    @classmethod
    def find_labels(cls, root: str | Path) -> tuple[int, dict[int, int]]:
        """How many labels the maps of a folder have, and which value stands for another one.

        The labels are the numbers up to the largest one that a map has or that has a name. But a 255 that is far from
        the others is void, as in many sets: that is one more label, after the others.
        """
        root = Path(root).expanduser()
        folders = tuple(name for name in ("labels", "train/labels", "test/labels") if (root / name).is_dir())
        files, problems = Column("label map", folders or ("labels",)).find(root)
        raise_problems(problems, root)
        paths = [root / file.path for file in files.values()]
        stamps = np.array([file[1:] for file in files.values()], np.int64)
        texts, problems = remember(
            cache_folder(root) / "values.jsonl",
            np.array([os.fsencode(file.path) for file in files.values()]),
            stamps,
            lambda row: " ".join(map(str, np.unique(read_map(paths[row], stamps[row], painted=True))[: 1 << 16])),
            "finding labels",
            most=MAX_PROBLEMS,
        )
        raise_problems(problems, root)
        (names, colours), found = labels_of(root), {int(each) for text in texts if text for each in text.split()}
        missing = [f"#{each - pairs.PAINTED:06x}" for each in sorted(found - colours.keys()) if each >= pairs.PAINTED]
        if missing:
            what, wanted = f"{len(missing):,} colours of no label", "its colour and its name, such as #804080 road"
            listed = "\n".join(missing[:256])
            raise UserError(f"label maps in {root} have {what}; write {root / NAMES}, for each {wanted}:\n{listed}")
        values = sorted({colours.get(each, each) for each in found} | {*colours.values()})
        void = values[-1] == VOID and VOID - 1 not in values and len(values) > 1
        named = names.keys()
        count = max([values[-1 - void], *(named if VOID - 1 in named else named - {VOID})]) + 1
        return count + void, {VOID: count} if void else {}


NAMES = "labels.txt"
NUMBERED = re.compile(r"(\d{1,5})[\s:,;=]+(\S.*)")
COMMENT = re.compile(r"\s+#(\s.*)?$")
COLOUR = re.compile(r"(#[0-9a-fA-F]{6})(?:\s+(\S.*))?")


def labels_of(root: Path) -> tuple[dict[int, str], dict[int, int]]:
    """The names of labels in labels.txt, and the labels of colours: `3 hair` or `3 #ff0000 hair` on each line, or the
    same without the number, from label 0 on.

    If a line begins with a number, all do. What stands behind a # is a comment, but for colours of six digits.
    """
    path = root / NAMES
    if not path.exists():
        return {}, {}
    with explained(f"cannot read {path} ({{why}}); write a label on each line, such as 3 hair", OSError, ValueError):
        lines = [line.strip() for line in read_text(path, 1_000_000).removeprefix("\ufeff").rstrip().splitlines()]
    kept = [(row, line) for row, line in enumerate(lines, 1) if not line.startswith("#") or COLOUR.fullmatch(line)]
    rows = [(row, COMMENT.sub("", line)) for row, line in kept]
    known: dict[str, int] = {}  # in which line a label or a name stands
    named, colours = dict[int, str](), dict[int, int]()
    numbered = any(re.match(r"[+-]?\d", line) for _, line in rows)
    first = next((place for place, (_, line) in enumerate(rows) if line), 0)
    for place, (row, line) in enumerate(rows, -first):
        match = NUMBERED.fullmatch(line)
        if numbered and line and not match:
            raise UserError(f"{path}, line {row}: '{line[:40]}' is no number and a name; write it such as 3 hair")
        label, name = (int(match[1]), match[2]) if match else (place, line)
        paint = COLOUR.fullmatch(name)
        name, colour = (paint[2] or str(label), f"colour {paint[1].lower()}") if paint else (name, "")
        if "," in name and len(rows) == first + 1:
            raise UserError(f"{path}, line {row}: '{line[:40]}' may be a list; write each label on a line of its own")
        for each in filter(None, (f"label {label}", f"name {name}", colour)) if name else ():
            if each in known:
                raise UserError(f"{path}, line {row}: {each} is in line {known[each]} already; write each label once")
            known[each] = row
            named[label] = name
        if paint:
            colours[pairs.PAINTED + int(paint[1][1:], 16)] = label
    return named, colours


MAPPING = "CelebA-HQ-to-CelebA-mapping.txt"
PARTS = "CelebAMask-HQ-mask-anno"
FACES = "CelebA-HQ-img"
PER_FOLDER = 2000  # pictures whose masks share a folder
# The numbers in CelebA of each split: the first one, and the end.
BOUNDS = {"train": (0, 162771), "val": (162771, 182638), "test": (182638, 1 << 31)}


class CelebAMask(Pairs):
    """CelebAMask-HQ (Lee et al. 2020): 30,000 faces with 18 masks each.

    `CelebA-HQ-img/<k>.jpg` with the masks `CelebAMask-HQ-mask-anno/<k // 2000>/<k>_<part>.png`. They lie in `root` or
    in `root/CelebAMask-HQ`. The masks of a face are merged into one label map, in the order of LABELS, later ones on
    top. The cache keeps the label map and makes it again when a mask changes (where it is, see cache.py). Splits are
    "train", "val" and "test", by the picture's number in CelebA, which is in the mapping file.
    """

    num_labels, label_names, flip_pairs = len(LABELS), LABELS, FLIP_PAIRS

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256) -> None:
        root = unpacked_folder(root, "CelebAMask-HQ")
        numbers = _numbers(root / MAPPING, *look_up_split(split, BOUNDS))
        only = frozenset(map(str, numbers))
        maps = Column("label map", (_merged(root, numbers, split),), only=only)
        super().__init__(root, (Column("picture", (FACES,), suffixes=(".jpg",), only=only), maps), size, split)


def _numbers(mapping: Path, first: int, end: int) -> np.ndarray:
    """The pictures whose number in CelebA (the second column) is `first` or more and below `end`."""
    unread = explained(f"cannot read {mapping} ({{why}}); it comes with the data set", OSError)
    with unread, explained(f"{mapping} is no text; get the file again", UnicodeDecodeError):
        lines = read_text(mapping, 100_000_000).splitlines()[1:]
    numbers = []
    for row, line in enumerate(lines, 2):
        match line.split():
            case [number, origin, *_] if number.isdecimal() and origin.isdecimal():
                if first <= int(origin) < end:
                    numbers.append(int(number))
            case [_, *_]:
                raise UserError(f"{mapping}, line {row}: '{line}' does not begin with two numbers; get the file again")
    if not numbers:
        raise UserError(f"{mapping} has no picture of this split, whose numbers in CelebA are {first} to {end - 1}")
    return np.unique(numbers)


def merge(root: Path, labels: Path, numbers: np.ndarray, present: np.ndarray, part: str, index: int) -> str:
    """Make the label map of a picture, of the masks that are `present` [numbers, labels]."""
    number = int(numbers[index])
    masks = [(label, _mask_path(root, number, LABELS[label])) for label in np.flatnonzero(present[index]).tolist()]
    picture = root / FACES / f"{number}.jpg"
    if not masks or not picture.is_file():
        path = picture if masks else _mask_path(root, number, "*")
        raise UserError(f"{path} is missing; unpack the data set again, or take the picture's line out of {MAPPING}")
    merged = Image.fromarray(merge_masks(masks))
    labels.mkdir(exist_ok=True)
    unfinished = labels.with_name(f"{part}.{number}-{os.getpid()}.part")
    merged.save(unfinished, format="PNG")
    unfinished.replace(labels / f"{number}.png")
    return f"{number}.png"


def _merged(root: Path, numbers: np.ndarray, split: str) -> str:
    """Make the label maps `<k>.png` of all pictures, and return their folder."""
    cache = cache_folder(root)
    stamps = _mask_stamps(root, numbers)
    present = stamps[:, :, 1] > 0
    file, labels = cache / f"merged-{split}.jsonl", cache / "labels"
    work = partial(merge, root, labels, numbers, present, file.stem)
    _, problems = remember(
        file, numbers.astype("S"), stamps.reshape(len(numbers), -1), work, "merging masks",
        good=lambda name: (labels / name).exists(), most=MAX_PROBLEMS,
    )  # fmt: skip
    raise_problems(problems, root)
    above = root.resolve().parent
    return f"../{labels.relative_to(above)}" if labels.is_relative_to(above) else str(labels.absolute())


def _mask_stamps(root: Path, numbers: np.ndarray) -> np.ndarray:
    """Size and time of every mask [numbers, labels, 2]; zeros where there is no mask."""
    stamps = np.zeros((len(numbers), len(LABELS), 2), np.int64)
    rows = {number: row for row, number in enumerate(numbers)}
    for folder in np.unique(numbers // PER_FOLDER):
        if not (root / PARTS / str(folder)).is_dir():
            continue
        for entry in all_files(root / PARTS / str(folder)):
            number, _, part = entry.name.removesuffix(".png").partition("_")
            if not number.isdecimal() or int(number) not in rows:
                continue
            if part not in LABELS[1:]:
                raise UserError(f"{entry.path} is a mask of no known part; known are {', '.join(LABELS[1:])}")
            state = os.stat(entry)
            stamps[rows[int(number)], LABELS.index(part)] = state.st_size, state.st_mtime_ns
    return stamps


def _mask_path(root: Path, number: int, part: str) -> Path:
    return root / PARTS / str(number // PER_FOLDER) / f"{number:05d}_{part}.png"


def merge_masks(paths: list[tuple[int, Path]]) -> np.ndarray:
    """One label map from masks of (label, file): a label is where its mask is not black, later ones on top."""
    merged, first = None, Path()
    for label, path in paths:
        with opened(path) as picture:
            mask = np.array(picture.convert("L")) > 0
        if merged is None:
            merged, first = np.zeros(mask.shape, np.uint8), path
        if mask.shape != merged.shape:
            one, other = (f"{width}x{height}" for height, width in (mask.shape, merged.shape))
            raise UserError(f"{path} is {one} and {first} is {other}; masks of a picture have one size")
        merged[mask] = label
    assert merged is not None, "a picture without masks is not read"
    return merged
