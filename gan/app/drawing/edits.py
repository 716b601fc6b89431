"""The actions on StyleGAN2's w: project a picture, draw a latent file again, and go in directions."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from datasets.files import pairs
from datasets.files.decoding import Frame
from gan.app.drawing.directions import Way, directions
from gan.app.drawing.drawer import Drawer
from gan.app.drawing.latents import Latent
from gan.app.drawing.likeness import by_discriminator, by_lpips, distance_from
from gan.app.drawing.numbers import Numbers, once
from gan.app.drawing.projection import drawn, project, tuned
from gan.app.outputs import say
from gan.app.painting import video
from gan.app.painting.actions import Shown, file_name
from gan.app.painting.grids import picture as image_of
from gan.app.painting.grids import tiles
from gan.app.painting.reopen import has_numbers, numbered
from gan.app.painting.sheet import Columns, Sheet, spare, writing
from gan.files.disk import whole_file
from gan.files.errors import UserError
from nets.published.from_noise import ours, published
from nets.published.pickles import read, write
from nets.stylegan import StyleDiscriminator

FRAMES, LAST = 120, 30  # of the video of a projection: at most of the search, and of its end
Files = str | Path | Sequence[str | Path]


class Edits(Shown):
    """What draws by way of w can do beside drawing seeds."""

    drawer: Drawer

    @property
    def source(self) -> str:
        """Which weights these are, wherever they lie."""
        if self.run is None:
            return Path(self.drawer.title).name
        return f"{self.run.folder.path.resolve().name}, step {self.run.step}"

    def project(
        self,
        picture: str | int = 0,
        steps: int = 1000,
        tune: int = 0,
        perceptual: Path | None = None,
        label: int | str | None = None,
        file: str | Path | None = None,
    ) -> list[Path]:
        """Find a picture in w. Write it, a video of the search, its latent, and the networks if they are tuned."""
        net, (height, width) = self.drawer.styled(), self.drawer.size
        if tune and not height == width == 2 << self.drawer.layers // 2:
            raise UserError(f"published files, as tuned networks are, draw no {height} x {width}; leave --tune out")
        base = Path(file or self.path(file_name("project", [str(picture)]), ".pt"))
        paths = [base.with_suffix(suffix) for suffix in (".png", video.suffix(), ".pt", ".pkl")[: 4 if tune else 3]]
        spare([str(picture), perceptual, self.drawer.title], paths)
        critic, target = self._discriminator(), self._picture(str(picture)).unsqueeze(0).to(self.drawer.like)
        if perceptual is not None:
            name, features = "LPIPS", by_lpips(perceptual, self.drawer.device)
        elif critic is not None:
            name, features = "the discriminator's features", by_discriminator(critic)
        else:
            raise UserError(f"{self.title} has no discriminator to compare by; type --perceptual and VGG-16's file")
        distance = distance_from(target, features)

        if label is None and self.drawer.classes:
            first, count = (self.drawer.class_names or ("0",))[0], self.drawer.classes
            say(f"the search starts from the mean of all {count} classes; --class {first} starts from that of one")
        seen, frames = [], []
        with tqdm(total=steps + tune, desc="project", unit="step", leave=False) as bar:

            def watch(made: Tensor, found: float) -> None:
                seen.append(found)
                if bar.n % -(-bar.total // FRAMES) == 0:
                    frames.append(image_of(made[0]))
                bar.set_postfix_str(f"distance {found:.4f}", refresh=False)
                bar.update()

            latent = project(self.drawer, distance, steps, watch, label)
            made = {"projected": drawn(net, latent)}
            if tune:
                net = tuned(net, latent, target, distance, tune, watch)
                made["tuned"] = drawn(net, latent)
        ends = ", ".join(f"{distance(each):.4f} {what}" for what, each in made.items())
        say(f"distance by {name}: {seen[0]:.4f} at the mean of w, {ends}")

        frames += LAST * [image_of([*made.values()][-1][0])]
        sheet = Sheet(
            "", {"picture": target, **made}, frames=lambda: (tiles([image_of(target[0]), each], 2) for each in frames)
        )
        for path in paths[:2]:
            sheet.save(path)
        replace(latent, found_in=(self.source, *(path.name for path in paths[3:]))).save(paths[2])
        if tune:
            nets = {"G": net, "G_ema": net} | ({} if critic is None else {"D": critic})
            with writing(paths[3]), whole_file(paths[3]) as part:
                write(part, {name: published(each) for name, each in nets.items()})
        return paths

    def from_(
        self,
        latent: Files | None = None,
        direction: int | None = None,
        strength: str = "-3:3",
        by: Way = "weights",
    ) -> Sheet:
        """Draw latent files again, or go from them in a direction."""
        if latent is None:
            raise UserError("from needs latent files; type --latent me.pt, a file that project has written")
        if direction is not None:
            return self.directions(latent=latent, direction=direction, strength=strength, by=by)
        if (strength, by) != ("-3:3", "weights"):
            raise UserError("--strength and --by are of a direction; type --direction and its number, too")
        net = self.drawer.styled()
        made = {title: image_of(drawn(net, start)[0]) for title, start in self._latents(latent).items()}
        return Sheet(file_name("from", [*made]), singles=made)

    def directions(
        self,
        seeds: Numbers = "0-3",
        latent: Files | None = None,
        count: int = 8,
        direction: int | None = None,
        strength: str = "-3:3",
        by: Way = "weights",
        label: int | str | None = None,
    ) -> Sheet:
        """Go from seeds or latent files in one direction, or in each of the first ones: a row each."""
        net, steps = self.drawer.styled(), directions(self.drawer, by)
        if direction is not None and direction >= len(steps):
            raise UserError(f"there is no direction {direction}; type --direction and one of 0 to {len(steps) - 1}")
        starts = self._seeds(seeds, label) if latent is None else self._latents(latent)
        rows = [*product(range(min(count, len(steps))) if direction is None else [direction], starts)]
        titles = [f"{number}: {start}" for number, start in rows]
        columns, singles = Columns(), {}
        for amount in _strengths(strength):
            edited = [replace(starts[start], w=starts[start].w + amount * steps[number]) for number, start in rows]
            columns[f"{amount:+}"] = [image_of(drawn(net, each)[0]) for each in edited]
            singles |= {f"{row} at {amount}": cell for row, cell in zip(titles, columns[f"{amount:+}"], strict=True)}
        return Sheet(f"directions-by-{by}" + ("" if direction is None else f"-{direction}"), columns, titles, singles)

    def _seeds(self, seeds: Numbers, label: int | str | None) -> dict[str, Latent]:
        drawer, listed = self.drawer, once(seeds)
        with torch.no_grad():
            w = drawer.w_of(listed, label=label).cpu()
        return {f"seed {seed}": Latent(each, {}) for seed, each in zip(listed, w, strict=True)}

    def _latents(self, files: Files) -> dict[str, Latent]:
        paths = map(Path, [files] if isinstance(files, str | Path) else files)
        found = {path: Latent.load(path, self.drawer.styled()) for path in paths}
        for path, each in found.items():
            if each.found_in and self.source not in each.found_in:
                say(f"{path} was found in {each.found_in[0]}; {self.source} may draw another picture of it")
        return {path.stem: each for path, each in found.items()}

    def _picture(self, which: str) -> Tensor:
        """A picture as the network draws: a held-out one by its number, train:NUMBER, or a person's file."""
        data = None if self.run is None else self.run.run.data
        if has_numbers(data) and (item := numbered(which, data)) is not None:
            return item["image"]
        path = Path(which)
        if not path.exists():
            raise UserError(f"cannot read a picture: there is no file '{which}'; type --picture and its file")
        with pairs.opened(path) as opened:
            return Frame(*self.drawer.size, self.drawer.channels).pixels(opened).float() / 127.5 - 1

    def _discriminator(self) -> StyleDiscriminator | None:
        """The discriminator that learned with the generator."""
        if self.run is not None:
            net = getattr(self.game, "discriminator", None)
        else:
            saved = read(Path(self.drawer.title)).get("D")
            net = saved and ours(saved).float().requires_grad_(False).to(self.drawer.device)
        return net if isinstance(net, StyleDiscriminator) else None


def _strengths(text: str) -> range:
    """The whole numbers from the first to the last of -4:4."""
    match = re.fullmatch(r"(-?\d{1,2}):(-?\d{1,2})", text)
    if not match or int(match[1]) > int(match[2]):
        raise UserError(f"--strength {text} is not from one whole number to a larger one; type e.g. --strength -4:4")
    return range(int(match[1]), int(match[2]) + 1)
