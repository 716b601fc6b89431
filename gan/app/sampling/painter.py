"""Use a trained SEAN: read styles from pictures, mix, save and load them, and paint label maps in them."""

import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datasets.augment import Prepared
from datasets.batches import names_sum
from datasets.files import pairs
from datasets.files.pairs import Fit
from datasets.workers import Loader
from gan import noise
from gan.app.outputs import say
from gan.app.run.reopen import SavedRun, sample_of_number
from gan.app.sampling import grids
from gan.app.sampling.sheet import writing
from gan.files.checkpoint import checksum
from gan.files.disk import read_plain, whole_file
from gan.files.errors import UserError, progress

# Two files, picture.jpg:labels.png. A letter before :\\ or :/ is a drive.
PAIR = re.compile(r"(?![A-Za-z]:[\\/][^:]*$)(.+?):((?:[A-Za-z]:[\\/])?[^:]*)")

AGAIN = "make such a file with python -m gan.sample RUN save-styles"
PARTS = {"codes": Tensor, "present": Tensor, "label_names": list, "source": str}

Size = tuple[int, int]


@dataclass(frozen=True)
class Maps:
    """How label maps are read: the size that they get by `fit`, and how many labels there are.

    `void` maps other numbers, which the data set's files use, to labels.
    """

    size: Size
    labels: int
    void: Mapping[int, int] = field(default_factory=dict)
    fit: Fit = field(default_factory=Fit)

    @classmethod
    def of_data(cls, samples: Any) -> "Maps":
        size, labels = getattr(samples, "size", None), len(getattr(samples, "label_names", ()))
        size = pairs.as_size(size) if size else tuple(samples[0]["image"].shape[-2:])
        return cls(size, labels, getattr(samples, "void", {}), getattr(samples, "fit", Fit()))

    def read(self, image: Image.Image, name: str | Path, partner: Size | None = None) -> Tensor:
        """A label map [H, W]. `partner` is the height and width of its picture, and `name` is for errors.

        A pixel is the number of a label, or a label's colour in the data set's labels.txt, or in `grids.palette`, which
        grids and what saves maps use: image editors write either. In a palette PNG the colours count if all of them are
        of that palette, else the numbers.
        """
        values = pairs.values_of(image, name, painted=True)
        numbers = None if self.void.keys() >= {*np.unique(values)} else _coloured(image, name, self.labels)
        if numbers is None:
            numbers = pairs.labels_in(name, values, self.labels, self.void)
        fitted = self.fit.map(numbers, self.size, partner or numbers.shape, lambda values: values)
        return torch.from_numpy(fitted).long()

    def pair(self, picture: Path, label: Path) -> tuple[Tensor, Tensor]:
        """A picture [3, H, W] in -1 to 1, and its label map."""
        pixels, image = pairs.read_picture(picture), pairs.loaded(label)
        (height, width), (across, down) = pixels.shape[1:], image.size
        if abs(width * down - across * height) > max(width, height, across, down):
            raise UserError(
                f"{picture} is {width}x{height} and {label} is {across}x{down}; a picture and its label map must be of "
                f"the same shape"
            )
        fitted = self.fit.picture(pixels, self.size, (down, across)).float() / 127.5 - 1
        return fitted, self.read(image, label, (height, width))


def _coloured(image: Image.Image, name: str | Path, labels: int) -> np.ndarray | None:
    """The labels by their colours; None where the numbers in the file are the labels."""
    if image.mode in pairs.ONE_CHANNEL and image.mode != "P":
        return None
    colours = torch.from_numpy(np.array(image.convert("RGB")))
    numbers = grids.unpaint(colours, labels)
    wrong = (numbers < 0).nonzero()
    if len(wrong) == 0:
        return numbers.numpy().astype(np.int32)
    if image.mode == "P":
        return None
    row, column = wrong[0].tolist()
    colour = "#{:02x}{:02x}{:02x}".format(*colours[row, column].tolist())
    raise UserError(
        f"{name} has the colour {colour} at column {column}, row {row}, and in {len(wrong)} pixels colours that belong "
        f"to no label; paint without soft edges in the colours of a mask of gan.edit's, or give a PNG of one channel"
    )


@dataclass(frozen=True)
class Styles:
    """The style codes of the regions, [labels, style]; `source` says whose styles they are.

    A region that is not `present` has a code of zeros. Mixing makes new `Styles` and leaves the old ones as they are.
    """

    codes: Tensor
    present: Tensor
    label_names: tuple[str, ...]
    source: str

    def taking(self, other: "Styles", regions: Collection[int]) -> "Styles":
        """These styles, but with those of some regions from the other."""
        chosen = torch.zeros_like(self.present)
        chosen[list(regions)] = True
        codes = torch.where(chosen.unsqueeze(1), other.codes, self.codes)
        return replace(self, codes=codes, present=torch.where(chosen, other.present, self.present))

    def towards(self, other: "Styles", share: float) -> "Styles":
        """Styles on the straight line from these to the others: a share of 0 is exactly these, 1 exactly the others."""
        return replace(self, codes=torch.lerp(self.codes, other.codes, share), present=self.present | other.present)

    def lacking(self, regions: Collection[int]) -> list[int]:
        return [region for region in regions if not self.present[region]]

    def check(self, label_names: Sequence[str], length: int, where: Path) -> None:
        labels, ours = self.codes.shape
        if labels != len(label_names):
            why = f"has styles of {labels} regions and this run knows {len(label_names)}"
        elif ours != length:
            why = f"has style codes of length {ours} and this run has them of length {length}"
        else:
            both = enumerate(zip(self.label_names, label_names, strict=True))
            # Where one has a number, it was saved before the set had names.
            other = [k for k, names in both if len({*names}) > 1 and not any(map(str.isdecimal, names))]
            if not other:
                return
            why = f"calls region {other[0]} '{self.label_names[other[0]]}' and this run '{label_names[other[0]]}'"
        raise UserError(f"'{where}' {why}; save styles from this run")

    def save(self, path: Path) -> None:
        """Write a file of tensors, strings and lists only, so that it can be loaded without running code."""
        with writing(path, RuntimeError), whole_file(path) as part:
            torch.save({**vars(self), "label_names": list(self.label_names)}, part)

    @classmethod
    def load(cls, path: Path) -> "Styles":
        """Read a file of styles, without running any code in it."""
        saved = read_plain(path, "styles", AGAIN)
        known = isinstance(saved, dict) and all(isinstance(saved.get(name), kind) for name, kind in PARTS.items())
        if not known or saved["codes"].ndim != 2 or saved["present"].dtype != torch.bool:
            raise UserError(f"'{path}' holds no styles; {AGAIN}")
        codes, present, names, source = (saved[name] for name in PARTS)
        if not len(codes) == len(names) == len(present):
            raise UserError(f"'{path}' is damaged: it has {len(codes)} codes and {len(names)} names")
        return cls(codes, present, tuple(names), source)


def regions(wanted: Sequence[str | int], label_names: Sequence[str]) -> list[int]:
    """The numbers of regions that are given by name (upper or lower case) or by number."""
    names = [name.lower() for name in label_names]
    found = []
    for each in map(str, wanted):
        if each.lower() in names:
            found.append(names.index(each.lower()))
        elif each.isdecimal() and int(each) < len(names):
            found.append(int(each))
        else:
            close = get_close_matches(each.lower(), names, 1)
            hint = f"did you mean '{label_names[names.index(close[0])]}'?" if close else "choose a name or a number."
            known = ", ".join(name if name == str(k) else f"{k} {name}" for k, name in enumerate(label_names))
            raise UserError(f"there is no region '{each}'; {hint} Regions are {known}")
    return found


@dataclass(frozen=True)
class Picture:
    """A label map [H, W] with its picture [3, H, W] in -1 to 1, and edges where the data have instances.

    A label map that a user drew has no picture and no edges.
    """

    title: str
    label: Tensor
    image: Tensor | None = None
    edges: Tensor | None = None

    @property
    def regions(self) -> list[int]:
        return self.label.unique().tolist()

    def spotlight(self, region: int) -> Tensor | None:
        """The picture with everything but one region faded to grey; None where there is no picture."""
        if self.image is None:
            return None
        faded = 0.25 * self.image.mean(0, keepdim=True).expand_as(self.image) + 0.6
        return torch.where(self.label == region, self.image, faded)


class Painter:
    """The encoder and the generator of an opened run, for one picture at a time, on the run's device.

    `seed` decides the generator's noise. The noise is the same in every picture, so that pictures differ only by label
    map and styles. The results are on the CPU.
    """

    seed = 0

    def __init__(self, opened: SavedRun) -> None:
        assert has_styles(opened)
        game: Any = opened.run.game  # SEAN, or a person's own game that has what SEAN has, by the same names
        data: Any = opened.run.data
        self.opened, self.game = opened, game
        self.data, self.train, self.val = data, data.train, data.val
        self.label_names: tuple[str, ...] = tuple(getattr(self.val, "label_names", ()))
        self.maps = Maps.of_data(self.val)
        self.device = next(game.generator.parameters()).device

    def picture(self, which: str | Path | Image.Image) -> Picture:
        """A held-out picture by number, a training one as train:5, or files: picture.jpg:labels.png or labels.png.

        Pillow's pictures are label maps.
        """
        if isinstance(which, Image.Image):
            return Picture("label", self.maps.read(which, "the label map"))
        which = str(which)
        if (item := sample_of_number(which, self.data)) is not None:
            return Picture(which.replace(":", " ").strip(), item["label"], item["image"], item.get("edges"))
        if pair := PAIR.fullmatch(which):
            image, label = self.maps.pair(Path(pair[1]), Path(pair[2]))
            return Picture(Path(pair[1]).stem, label, image)
        if Path(which).suffix.lower() == ".png":
            return Picture(Path(which).stem, self.maps.read(pairs.loaded(Path(which)), which))
        raise UserError(
            f"'{which}' is no picture; give the number of a held-out one (0 to {len(self.val) - 1}), train:NUMBER, "
            f"or files of your own as picture.jpg:labels.png"
        )

    def styles(self, picture: Picture) -> Styles:
        """The styles of a picture's regions. A region that is too small for the encoder to see has no style."""
        if picture.image is None:
            raise UserError(f"'{picture.title}' is only a label map; give its picture too, as picture.jpg:labels.png")
        codes = self._encode(picture.image.unsqueeze(0), picture.label.unsqueeze(0))[0]
        source = f"picture {picture.title} of {self.opened.folder.path.name}, step {self.opened.step}"
        return Styles(codes, codes.abs().amax(1) > 0, self.label_names, source)

    def load(self, path: Path) -> Styles:
        styles = Styles.load(path)
        codes = self._encode(torch.zeros(1, 3, *self.maps.size), torch.zeros(1, *self.maps.size, dtype=torch.int64))
        styles.check(self.label_names, codes.shape[-1], path)
        return styles

    @torch.no_grad()
    def paint(self, picture: Picture, styles: Styles) -> Tensor:
        """Paint the label map in these styles: [3, H, W] in -1 to 1."""
        edges = None if picture.edges is None else picture.edges.unsqueeze(0).to(self.device)
        planes = self.game.mask(picture.label.unsqueeze(0).to(self.device), edges)
        with noise.at(noise.Place(("sample", self.seed), 0, 1, 1)):
            return self.game.generator(planes, styles.codes.unsqueeze(0).to(planes))[0].cpu()

    def mean(self, among: int = 1000) -> Styles:
        """The mean of each region's styles over training pictures that have the region.

        `among` is how many pictures to take, evenly spread over the training set. The mean is saved in the run's
        folder, under a name that has a checksum of the encoder and of the files of the set.
        """
        count, encoder = min(among, len(self.train)), self.game.encoder
        weights = [checksum(each) for each in (*encoder.parameters(), *encoder.buffers())]
        stamps = np.asarray(getattr(self.train, "stamps", ())).tolist()
        key = f"{zlib.crc32(repr((weights, names_sum(self.train), stamps)).encode()):08x}"
        path = self.opened.folder.path / "styles" / f"mean-of-{count}-{key}.pt"
        with suppress(UserError):  # there is none yet, or it is damaged
            return Styles.load(path)
        numbers = [(0, number) for number in torch.linspace(0, len(self.train) - 1, count).round().int().tolist()]
        workers = getattr(self.data, "workers", 0)
        items = Loader(Prepared(self.train), batch_size=8, sampler=numbers, seed=0, workers=workers)
        total, seen = torch.zeros(1), torch.zeros(1)
        with progress(total=count, desc="mean styles", unit="picture", leave=False) as bar:
            for batch in items:
                codes = self._encode(batch["image"], batch["label"]).double()
                total, seen = total + codes.sum(0), seen + (codes.abs().amax(2) > 0).sum(0)
                bar.update(len(codes))
        codes = (total / seen.clamp_min(1).unsqueeze(1)).float()
        source = f"the mean of {count} training pictures of {self.opened.folder.path.name}, step {self.opened.step}"
        styles = Styles(codes, seen > 0, self.label_names, source)
        try:
            styles.save(path)
        except UserError as error:
            say(f"not kept: {error}")
            return styles
        for other in path.parent.glob("mean-of-*.pt"):
            if not other.stem.endswith(f"-{key}"):
                other.unlink()
        return styles

    @torch.no_grad()
    def _encode(self, images: Tensor, labels: Tensor) -> Tensor:
        planes = self.game.mask(labels.to(self.device))[:, : len(self.label_names)]
        return self.game.encoder(images.to(planes), planes).cpu()


def has_styles(opened: SavedRun) -> bool:
    """Whether the run's game reads styles from pictures, and its data have pictures with labels."""
    has_encoder = getattr(opened.run.game, "encoder", None) is not None
    return has_encoder and hasattr(getattr(opened.run.data, "val", None), "label_names")
