"""The actions on w of a StyleGAN2: project a picture, draw a latent file again, and edit by directions."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from datasets.files.decoding import Frame, opened_picture
from gan.app.drawing.directions import directions
from gan.app.drawing.drawer import Drawer
from gan.app.drawing.latents import Latent
from gan.app.drawing.likeness import Likeness, by_discriminator, by_lpips
from gan.app.drawing.numbers import Numbers, numbers
from gan.app.drawing.projection import drawn, project, tuned
from gan.app.outputs import say
from gan.app.painting import video
from gan.app.painting.actions import Shown, file_name
from gan.app.painting.grids import picture as image_of
from gan.app.painting.reopen import numbered
from gan.app.painting.sheet import Columns, Sheet, save_png, unused, writing
from gan.files.disk import regular, whole_file
from gan.files.errors import UserError, reason
from nets.published.from_noise import ours, published
from nets.published.pickles import read, write
from nets.stylegan import StyleDiscriminator, StyleGenerator

Way = Literal["weights", "pca"]
Files = str | Path | Sequence[str | Path]
FRAMES = 120  # at most, of the video of a projection


class Edits(Shown):
    """What draws by way of w can do beside drawing seeds."""

    drawer: Drawer

    def project(
        self,
        picture: str | int = 0,
        steps: int = 1000,
        tune: int = 0,
        perceptual: Path | None = None,
        label: int | str | None = None,
        seed: int = 0,
        file: str | Path | None = None,
    ) -> list[Path]:
        """Find a picture in w, and write it beside the original, a video, its latent, and the tuned networks."""
        drawer, net = self.drawer, self.drawer.styled()
        base = Path(file or self.path(file_name("project", [str(picture)]), ".pt"))
        if tune:
            _check_pickle(net)
        critic = self._discriminator()
        target = self._picture(str(picture)).unsqueeze(0).to(drawer.like)
        if perceptual is not None:
            likeness = Likeness("LPIPS", by_lpips(perceptual, drawer.device), target)
        elif critic is not None:
            likeness = Likeness("the discriminator's features", by_discriminator(critic), target)
        else:
            raise UserError(f"{self.title} has no discriminator to compare by; type --perceptual and VGG-16's file")

        original, frames, seen = image_of(target[0]), [], []
        with tqdm(total=steps + tune, desc="project", unit="step", leave=False) as bar:

            def watch(step: int, made: Tensor, distance: float) -> None:
                seen.append(distance)
                if bar.n % -(-bar.total // FRAMES) == 0:
                    frames.append(_beside(original, image_of(made[0])))
                bar.set_postfix_str(f"distance {distance:.4f}", refresh=False)
                bar.update()

            latent = project(
                drawer, likeness, steps=steps, source=f"{picture} in {self.title}", seed=seed, label=label, watch=watch
            )
            near = tuned(net, latent, target, likeness, tune, watch) if tune else None
        results = {"projected": drawn(drawer, latent)}
        if near is not None:
            with torch.no_grad():
                results["tuned"] = near.drawn(latent.w.to(target).unsqueeze(0), "const")[0]
        ends = ", ".join(f"{likeness(made.unsqueeze(0)):.4f} {name}" for name, made in results.items())
        say(f"distance by {likeness.name}: {seen[0]:.4f} at the mean of w, {ends}")

        paths = [base.with_suffix(suffix) for suffix in (".png", video.suffix(), ".pt")]
        save_png(
            Sheet("", {"picture": [target[0]], **{name: [made] for name, made in results.items()}}).image, paths[0]
        )
        with writing(paths[1]):
            last = _beside(original, image_of([*results.values()][-1]))
            video.save([*frames, *[last] * 30], paths[1])
        latent.save(paths[2])
        if near is None:
            return paths
        found = {"G": published(near), "G_ema": published(near)}
        found |= {} if critic is None else {"D": published(critic)}
        with writing(base.with_suffix(".pkl")), whole_file(base.with_suffix(".pkl")) as part:
            write(part, found)
        return [*paths, base.with_suffix(".pkl")]

    def directions(
        self,
        seeds: Numbers = "0-3",
        latent: Files | None = None,
        by: Way = "weights",
        count: int = 8,
        direction: int | None = None,
        strength: str = "-3:3",
        frames: int = 5,
        label: int | str | None = None,
    ) -> Sheet:
        """Go in each of some directions, a row each; or in one `direction`, a row for each seed or latent file."""
        drawer = self.drawer
        starts = self._seeds(seeds, label) if latent is None else self._latents(latent)
        known, strengths = directions(drawer, by), _strengths(strength, frames)
        there = len(known.vectors)
        if direction is not None and direction >= there:
            raise UserError(f"there is no direction {direction}; type --direction and a number from 0 to {there - 1}")
        chosen = range(min(count, there)) if direction is None else [direction]
        made = {
            (number, start, amount): image_of(drawn(drawer, known.edited(place, number, amount)))
            for number, (start, place), amount in product(chosen, starts.items(), strengths)
        }
        columns: Columns = {}
        if direction is None:
            titles = [f"direction {number}" for number in chosen]
            for start, amount in product(starts, strengths):
                columns[unused(f"{start} {_signed(amount)}", columns)] = [made[row, start, amount] for row in chosen]
        else:
            titles = [*starts]
            columns = {
                f"{_signed(amount)}": [made[direction, start, amount] for start in starts] for amount in strengths
            }
        singles = {f"direction{number}-{start}-at{amount:g}": cell for (number, start, amount), cell in made.items()}
        name = f"directions-by-{by}" if direction is None else f"direction-{direction}-by-{by}"
        return Sheet(name, columns, titles, singles)

    def from_(
        self,
        latent: Files | None = None,
        direction: int | None = None,
        strength: str = "-3:3",
        by: Way = "weights",
        frames: int = 5,
    ) -> Sheet:
        """Draw latent files again, or go from them in a direction."""
        if direction is not None:
            return self.directions(latent=latent, by=by, direction=direction, strength=strength, frames=frames)
        made = {title: image_of(drawn(self.drawer, each)) for title, each in self._latents(latent).items()}
        return Sheet(file_name("from", [*made]), singles=made)

    def _seeds(self, seeds: Numbers, label: int | str | None) -> dict[str, Latent]:
        drawer, listed = self.drawer, numbers(seeds)
        with torch.no_grad():
            w = drawer.w(drawer.z(listed), drawer.labels(listed, label)).cpu()
        return {f"seed {seed}": Latent(each, {}, "") for seed, each in zip(listed, w, strict=True)}

    def _latents(self, files: Files | None) -> dict[str, Latent]:
        if files is None:
            raise UserError("from needs latent files; type --latent me.pt, a file that project has written")
        paths = [files] if isinstance(files, str | Path) else files
        return {Path(path).stem: Latent.load(Path(path), self.drawer.styled()) for path in paths}

    def _picture(self, which: str) -> Tensor:
        """A picture as the network draws: a held-out one by its number, train:NUMBER, or the file of a person."""
        if self.run is not None and (item := numbered(which, self.run.run.data)) is not None:
            return item["image"]
        (height, width), path = self.drawer.size, Path(which)
        try:
            regular(path)
            file = path.open("rb")
        except OSError as error:
            raise UserError(
                f"cannot read '{which}': {reason(error)}; type --picture and the file of a picture"
            ) from error
        with opened_picture(file, which) as opened:
            return Frame(height, width, self.drawer.channels).pixels(opened).float() / 127.5 - 1

    def _discriminator(self) -> StyleDiscriminator | None:
        """The discriminator that learned with the generator."""
        if self.run is not None:
            found = getattr(self.game, "discriminator", None)
        else:
            networks = read(Path(self.drawer.title))
            found = (
                ours(networks["D"]).float().requires_grad_(False).to(self.drawer.device) if "D" in networks else None
            )
        return found if isinstance(found, StyleDiscriminator) else None


def _check_pickle(net: StyleGenerator) -> None:
    """Refuse a network that could not be written when it is tuned."""
    try:
        published(net)
    except UserError as error:
        raise UserError(f"{error}; leave --tune out") from error


def _strengths(text: str, count: int) -> list[float]:
    """Equal steps from the first number to the second of -4:4."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?):(-?\d+(?:\.\d+)?)", text)
    if not match:
        raise UserError(f"--strength {text} is no way from one strength to another; type e.g. --strength -4:4")
    first, last = map(float, match.groups())
    return [first + (last - first) * number / (count - 1) for number in range(count)]


def _signed(number: float) -> str:
    return f"{number:+.3g}" if number else "0"


def _beside(one: Image.Image, other: Image.Image) -> Image.Image:
    both = Image.new("RGB", (one.width + other.width, one.height))
    both.paste(one, (0, 0))
    both.paste(other, (one.width, 0))
    return both
