"""What `python -m gan.sample` does with a run that draws from noise, or a published file: its actions as methods."""

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import Any, Unpack

import torch
from PIL import Image
from torch import Tensor

from datasets.files import pairs
from datasets.files.decoding import Frame
from gan.app.outputs import say
from gan.app.run.reopen import SavedRun, has_numbers, in_turns, ranks_here, sample_of_number
from gan.app.sampling import latents
from gan.app.sampling.drawer import Drawer, How, Numbers, parse_numbers, parse_numbers_once
from gan.app.sampling.grids import picture as image_of
from gan.app.sampling.grids import png, tiles
from gan.app.sampling.sheet import Columns, Sheet, refuse_overwriting, video_suffix, with_ending, writer_into, writing
from gan.app.sampling.shown import Shown, Words, file_name, words
from gan.files.disk import name_for, whole_file
from gan.files.errors import UserError, progress
from gan.files.system import quoted
from nets.published.from_noise import ours, published
from nets.published.pickles import read, write
from nets.stylegan import StyleDiscriminator

TOGETHER = 64  # pictures that a rank draws, and its threads compress, at a time
FRAMES, LAST = 120, 30  # of the video of a projection: at most of the search, and of its end
Files = str | Path | Sequence[str | Path]


class Drawings(Shown):
    """A run whose game draws from noise, or a published file, opened: pictures by their seeds."""

    kind, about = "seeds", "it draws from seeds"
    default = "draw"

    def __init__(self, drawer: Drawer, run: SavedRun | None = None) -> None:
        super().__init__(run, drawer.title)
        self.drawer = drawer

    @property
    def size(self) -> tuple[int, int]:
        return self.drawer.size

    def stand(self, batches: int) -> None:
        self.drawer.stand(batches)

    def draw(self, seeds: Numbers = "0-63", **how: Unpack[How]) -> Sheet:
        listed = parse_numbers_once(seeds)
        images = self.drawer.images(listed, **how)
        singles = dict(zip((f"seed{seed:04d}" for seed in listed), images, strict=True))
        known = self.drawer.class_names if how.get("label") is None else ()
        titles = [f"{seed} {known[seed % len(known)]}" for seed in listed] if known else ()
        return Sheet(_name("", how, seeds=seeds), titles=titles, singles=singles)

    @torch.no_grad()
    def mix(
        self, rows: Numbers = "0-3", columns: Numbers = "4-9", layers: Numbers | None = None, **how: Unpack[How]
    ) -> Sheet:
        drawer, down, across = self.drawer, parse_numbers_once(rows, "--rows"), parse_numbers_once(columns, "--columns")
        own, other = (drawer.w_of(seeds, **how) for seeds in (down, across))
        taken = range(drawer.layers // 2, drawer.layers) if layers is None else parse_numbers(layers, "--layers")
        if wrong := [layer for layer in taken if layer >= drawer.layers]:
            raise UserError(f"there is no layer {wrong[0]}; type --layers and some of 0 to {drawer.layers - 1}")
        is_taken = torch.isin(torch.arange(drawer.layers), torch.tensor([*taken], dtype=torch.int64))[:, None]
        mixed = torch.where(is_taken.to(own.device), other[None], own[:, None])
        drawn = map(drawer.from_w, (own, other, mixed.flatten(0, 1)))
        left, top, cells = ((image_of(each, transparent=True) for each in part) for part in drawn)
        singles = dict(zip((f"{row}-with-{column}" for row in down for column in across), cells, strict=True))
        sheet: Columns = {"": [None, *left]}
        for seed, head in zip(across, top, strict=True):
            sheet[f"seed {seed}"] = [head, *(singles[f"{row}-with-{seed}"] for row in down)]
        name = _name("mix", how, rows=rows, columns=columns, layers=layers)
        return Sheet(name, sheet, ["", *(f"seed {row}" for row in down)], singles)

    def classes(self, seeds: Numbers = "0-7", truncation: float = 1.0, cutoff: int | None = None) -> Sheet:
        drawer, listed = self.drawer, parse_numbers_once(seeds)
        names = drawer.class_names or [f"class {number}" for number in range(drawer.classes)]
        if not names:
            raise UserError(f"the network has no classes; type python -m gan.sample {quoted(drawer.title)} draw")
        singles = {}
        for number, name in enumerate(names):
            images = drawer.images(listed, label=number, truncation=truncation, cutoff=cutoff)
            singles |= zip((f"{name}-{seed}" for seed in listed), images, strict=True)
        sheet: Columns = {f"seed {seed}": [singles[f"{name}-{seed}"] for name in names] for seed in listed}
        name = _name("classes", {"truncation": truncation, "cutoff": cutoff}, seeds=seeds)
        return Sheet(name, sheet, names, singles)

    def interpolate(self, between: Words = (0, 1, 2, 3, 0), frames: int = 60, **how: Unpack[How]) -> Sheet:
        """A walk from seed to seed; also from, to or between latent files of project."""
        typed = [[word] if word.endswith(".pt") else parse_numbers(word, "--between") for word in words(between)]
        stops: list[Any] = [*chain(*typed)]
        if len(stops) < 2:
            raise UserError(f"--between takes two seeds or more and got {len(stops)}; type --between 3 5 9")
        ends, way = stops, partial[Iterable[Tensor]](self.drawer.between, **how)
        if any(isinstance(stop, str) for stop in stops):
            found = (self._latents(stop) if isinstance(stop, str) else self._seeds(stop, **how) for stop in stops)
            ends = [latent for each in found for latent in each.values()]
            way = partial(latents.between_latents, self.drawer.styled())
        shares = torch.linspace(0, 1, frames).tolist()

        def moving() -> Iterator[Image.Image]:
            for leg, pair in enumerate(pairwise(ends)):
                here = shares[min(leg, 1) :]  # a leg begins where the one before has ended
                for first in range(0, len(here), self.drawer.at_once):
                    made = way(pair, here[first : first + self.drawer.at_once])
                    yield from map(partial(image_of, transparent=True), made)

        # A loop that ended as it begins would stand still for a frame.
        count = (len(stops) - 1) * (frames - 1) + (stops[0] != stops[-1])
        name = _name(file_name("interpolate", [str(stop) for stop in stops]), how)
        return Sheet(name, frames=lambda: islice(moving(), count), count=count)

    def files(
        self, file: str | Path | None = None, count: int = 50_000, seeds: Numbers | None = None, **how: Unpack[How]
    ) -> list[Path]:
        """Write the pictures of the first seeds, or of these, into a folder, or a zip, each in its own size.

        Where torch.distributed is initialised, the ranks share the work, and the first one writes.
        """
        listed = range(count) if seeds is None else parse_numbers_once(seeds)
        path, world = self.path(f"{len(listed)}-pictures", ".zip", file), ranks_here()
        parts = (listed[first : first + TOGETHER] for first in range(0, len(listed), TOGETHER))
        numbered, first = iter(listed), world.rank == 0
        with (
            writing(path),
            writer_into(path) if first else nullcontext(lambda name, content: None) as write,
            ThreadPoolExecutor() as pool,
            progress(total=len(listed), unit=" pictures", disable=not first) as bar,
        ):
            for part, spare in in_turns(parts, world):
                made = [] if spare else list(pool.map(partial(png, compress_level=1), self.drawer.images(part, **how)))
                for content in chain.from_iterable(world.gather(made)):
                    write(f"seed{next(numbered):06d}.png", content)
                    bar.update()
        return [path]

    def project(
        self,
        picture: str | int | Image.Image = 0,
        steps: int = 1000,
        tune: int = 0,
        perceptual: Path | None = None,
        label: int | str | None = None,
        file: str | Path | None = None,
    ) -> list[Path]:
        """Find a picture in w. Write it, a video of the search, its latent, and the networks if they are tuned."""
        net, (height, width) = self.drawer.styled(), self.drawer.size
        if tune and not height == width == 2 << self.drawer.layers // 2:
            raise UserError(f"published files, as tuned networks are, draw no {width}x{height}; leave --tune out")
        which = "picture" if isinstance(picture, Image.Image) else str(picture)
        base = self.path(file_name("project", [which]), ".pt", file)
        paths = [with_ending(base, suffix) for suffix in (".png", video_suffix(), ".pt", ".pkl")[: 4 if tune else 3]]
        refuse_overwriting([which, perceptual, self.drawer.title], paths)
        critic, target = self._discriminator(), self._picture(picture).unsqueeze(0).to(self.drawer.like)
        if perceptual is not None:
            name, features = "LPIPS", latents.by_lpips(perceptual, self.drawer.like.device)
        elif critic is not None:
            name, features = "the discriminator's features", latents.by_discriminator(critic)
        else:
            raise UserError(f"{self.title} has no discriminator to compare by; type --perceptual and VGG-16's file")
        distance = latents.distance_from(target, features)

        if label is None and self.drawer.classes:
            first, count = (self.drawer.class_names or ("0",))[0], self.drawer.classes
            say(f"the search starts from the mean of all {count} classes; --class {first} starts from that of one")
        seen, frames = [], []
        with progress(total=steps + tune, desc="project", unit="step", leave=False) as bar:

            def watch(made: Tensor, found: float) -> None:
                seen.append(found)
                if bar.n % -(-bar.total // FRAMES) == 0:
                    frames.append(image_of(made[0]))
                bar.set_postfix_str(f"distance {found:.4f}", refresh=False)
                bar.update()

            latent = latents.project(self.drawer, distance, steps, watch, label)
            made = {"projected": latents.drawn(net, latent)}
            if tune:
                net = latents.tuned(net, latent, target, distance, tune, watch)
                made["tuned"] = latents.drawn(net, latent)
        ends = ", ".join(f"{distance(each):.4f} {what}" for what, each in made.items())
        say(f"distance by {name}: {seen[0]:.4f} at the mean of w, {ends}")

        frames += LAST * [image_of([*made.values()][-1][0])]
        sheet = Sheet(
            "", {"picture": target, **made}, frames=lambda: (tiles([image_of(target[0]), each], 2) for each in frames)
        )
        for path in paths[:2]:
            sheet.save(path)
        latent.save(paths[2])
        if tune:
            nets = {"G": net, "G_ema": net} | ({} if critic is None else {"D": critic})
            with writing(paths[3]), whole_file(paths[3]) as part:
                write(part, {name: published(each) for name, each in nets.items()})
        return paths

    def from_(self, latent: Files | None = None) -> Sheet:
        if latent is None:
            raise UserError("from needs latent files; type --latent me.pt, a file that project has written")
        net = self.drawer.styled()
        starts = self._latents(latent).items()
        made = {title: image_of(latents.drawn(net, start)[0], transparent=True) for title, start in starts}
        return Sheet(file_name("from", [*made]), singles=made)

    def directions(
        self,
        seeds: Numbers = "0-3",
        latent: Files | None = None,
        count: int = 8,
        direction: int | None = None,
        strength: str = "-3:3",
        by: latents.Way = "weights",
        label: int | str | None = None,
    ) -> Sheet:
        net, steps = self.drawer.styled(), latents.directions(self.drawer, by)
        if direction is not None and direction >= len(steps):
            raise UserError(f"there is no direction {direction}; type --direction and one of 0 to {len(steps) - 1}")
        starts = self._seeds(seeds, label=label) if latent is None else self._latents(latent)
        rows = [*product(range(min(count, len(steps))) if direction is None else [direction], starts)]
        titles = [f"{number}: {start}" for number, start in rows]
        columns, singles = Columns(), {}
        for amount in _strengths(strength):
            edited = [replace(starts[start], w=starts[start].w + amount * steps[number]) for number, start in rows]
            columns[f"{amount:+}"] = [image_of(latents.drawn(net, each)[0], transparent=True) for each in edited]
            singles |= {f"{row} at {amount}": cell for row, cell in zip(titles, columns[f"{amount:+}"], strict=True)}
        name = f"directions-by-{by}" + ("" if direction is None else f"-{direction}")
        of: dict[str, Numbers] = {"seeds": seeds} if latent is None else {"latent": [*starts]}
        return Sheet(_name(name, {"label": label}, **of), columns, titles, singles)

    def _seeds(self, seeds: Numbers, **how: Unpack[How]) -> dict[str, latents.Latent]:
        drawer, listed = self.drawer, parse_numbers_once(seeds)
        with torch.no_grad():
            w = drawer.w_of(listed, **how).cpu()
        return {f"seed {seed}": latents.Latent(each, {}) for seed, each in zip(listed, w, strict=True)}

    def _latents(self, files: Files) -> dict[str, latents.Latent]:
        paths = list(map(Path, [files] if isinstance(files, str | Path) else files))
        whole = len({path.stem for path in paths}) < len(paths)  # a folder for each person, and me.pt in it
        return {str(path) if whole else path.stem: latents.Latent.load(path, self.drawer.styled()) for path in paths}

    def _picture(self, picture: str | int | Image.Image) -> Tensor:
        """A picture as the network draws: a held-out one by its number, train:NUMBER, a person's file, or Pillow's."""
        fit = "crop" if self.run is None else self.run.settings.get("fit", "crop")
        frame = Frame(*self.drawer.size, self.drawer.channels, fit, self.background)
        if isinstance(picture, Image.Image):
            return frame.pixels(picture).float() / 127.5 - 1
        which, data = str(picture), None if self.run is None else self.run.run.data
        if has_numbers(data) and (item := sample_of_number(which, data)) is not None:
            return item["image"]
        path = Path(which)
        if not path.exists():
            raise UserError(f"cannot read a picture: there is no file '{which}'; type --picture and its file")
        with pairs.opened(path) as opened:
            return frame.pixels(opened).float() / 127.5 - 1

    def _discriminator(self) -> StyleDiscriminator | None:
        if self.run is not None:
            net = getattr(self.game, "discriminator", None)
        else:
            saved = read(Path(self.drawer.title)).get("D")
            net = saved and ours(saved).float().requires_grad_(False).to(self.drawer.like.device)
        return net if isinstance(net, StyleDiscriminator) else None


def _name(action: str, how: How, **lists: Numbers | None) -> str:
    """The name of a sheet's file, which says what was typed: a sheet of other seeds has another name."""
    psi = how.get("truncation", 1.0)
    of = {**lists, "truncation": None if psi == 1 else str(psi), "cutoff": how.get("cutoff"), "class": how.get("label")}
    said = {option: name_for(",".join(words(_typed(given))))[:60] for option, given in of.items() if given is not None}
    return "-".join([*action.split(), *chain(*said.items())])


def _typed(given: Numbers) -> Numbers:
    """What a person types for a range of Python: 0-15 for range(16)."""
    return f"{given[0]}-{given[-1]}" if isinstance(given, range) and given.step == 1 and len(given) > 1 else given


def _strengths(text: str) -> range:
    """The whole numbers from the first to the last of -4:4."""
    match = re.fullmatch(r"(-?\d{1,2}):(-?\d{1,2})", text)
    if not match or int(match[1]) > int(match[2]):
        raise UserError(f"--strength {text} is not from one whole number to a larger one; type e.g. --strength -4:4")
    return range(int(match[1]), int(match[2]) + 1)
