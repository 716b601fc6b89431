"""What to score of each game: the pictures or sounds it makes from held-out samples, and the true ones.

To score a game of your own, register a function for its class with `@makes.register`, in the file of its run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch

import torch
from torch import Tensor

from gan import GanModule
from gan.files.errors import UserError
from gan.games.cut import Cut
from gan.games.cyclegan import CycleGan
from gan.games.from_noise import FromNoise
from gan.games.hifigan import HifiGan
from gan.games.pix2pix import Pix2pix
from gan.games.sean import Sean
from gan.games.spade import Spade
from gan.games.vqgan import VqGan
from nets.mel import spectral_distance


@dataclass(frozen=True)
class Made:
    """Pictures [B, 3, H, W] in [-1, 1] and the true ones; `label` is the map they were painted from.

    Where they are not `paired`, the truth is other pictures of the same kind, and pixels cannot be compared. `known`
    [B, H, W] is 1 where the truth is known. `region` [B, H, W] is 1 where the style was changed; `before` are the
    pictures without this change. `numbers` [B] tell which pictures were translated, and which the true ones are, where
    some come several times.
    """

    pictures: Tensor
    truth: Tensor
    paired: bool = True
    label: Tensor | None = None
    known: Tensor | None = None
    region: Tensor | None = None
    before: Tensor | None = None
    numbers: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Heard:
    """The log mel spectrograms [B, bands, frames] of sounds and of the true ones, and how far their waves are apart."""

    mels: Tensor
    truth: Tensor
    spectral: Tensor


@singledispatch
def makes(game: GanModule, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Made | Heard]:
    """What a game makes of a batch of held-out samples, by title; `numbers` are the samples' numbers."""
    raise UserError(
        f"what {type(game).__name__} makes is not known here; its scores of validation are in the run's metrics.csv; "
        f"to compare pictures, register a function in the game's file, as docs/guide/game.md shows"
    )


@makes.register
def _spade(game: Spade, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Made]:
    image, label = batch["image"], batch["label"]
    return {"painted": Made(game.repaint(image, game.mask(label, batch.get("edges"))), image, label=label)}


@makes.register
def _sean(game: Sean, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Made]:
    """Pictures painted again from their own masks and styles. With drawn truth, also in the styles of others."""
    image, label = batch["image"], batch["label"]
    made = {"reconstruction": Made(game.repaint(image, game.mask(label, batch.get("edges"))), image, label=label)}
    if "truth" in batch:
        # The look of a region is not known where the style's picture does not have the region.
        present = game.mask(batch["style_label"])[:, : game.labels].flatten(2).amax(2)
        known = present.gather(1, label.flatten(1)).view_as(label)
        made["transfer"] = Made(game.transfer(batch), batch["truth"], label=label, known=known)
    if "region_truth" in batch:
        # One by one, so that the noise of a sample does not depend on its place in the batch.
        samples = ({name: value[row : row + 1] for name, value in batch.items()} for row in range(len(label)))
        before, after = map(torch.cat, zip(*map(game.restyle, samples), strict=True))
        region = label == batch["region"].view(-1, 1, 1)
        made["one region"] = Made(after, batch["region_truth"], label=label, region=region, before=before)
    return made


@makes.register
def _pix2pix(game: Pix2pix, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Made]:
    source, image = game.pair(batch)
    return {"painted": Made(game.generator(source), image, label=batch.get("label"))}


@makes.register
def _vqgan(game: VqGan, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Made]:
    return {"reconstruction": Made(game.autoencoder(batch["image"])[0], batch["image"])}


@makes.register
def _cyclegan(game: CycleGan, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Made]:
    fake_b, fake_a = game.translate(batch["a"], batch["b"])
    return {"a to b": _translated(fake_b, batch, "a", "b"), "b to a": _translated(fake_a, batch, "b", "a")}


@makes.register
def _cut(game: Cut, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Made]:
    return {"a to b": _translated(game.translate(batch["a"]), batch, "a", "b")}


def _translated(fake: Tensor, batch: dict[str, Tensor], source: str, target: str) -> Made:
    """A translation, with its drawn truth, or else with pictures of the other kind."""
    if f"truth_{target}" in batch:
        return Made(fake, batch[f"truth_{target}"])
    numbers = (batch[f"number_{source}"], batch[f"number_{target}"]) if "number_a" in batch else None
    return Made(fake, batch[target], paired=False, numbers=numbers)


@makes.register
def _from_noise(game: FromNoise, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Made]:
    """As many pictures from noise as there are samples, of their classes; a sample's number decides its noise."""
    image = batch["image"]
    return {"from noise": Made(game.numbered(numbers, image, game.labels(batch)), image, paired=False)}


@makes.register
def _hifigan(game: HifiGan, batch: dict[str, Tensor], numbers: Tensor) -> dict[str, Heard]:
    wave, made = batch["wave"], game.voice(batch)
    return {"sounds": Heard(game.whole_mel(made), game.whole_mel(wave), spectral_distance(made, wave))}


# ---- what a discriminator thinks, for the health of a run ----


@dataclass(frozen=True)
class Judged:
    """What a discriminator thinks of pictures [B], more for what looks real; and the fakes of the generator."""

    real: Tensor
    fake: Tensor
    pictures: Tensor
    fakes: Tensor


@singledispatch
def judges(game: GanModule, batch: dict[str, Tensor]) -> Judged | None:
    """What a game's discriminator thinks of a batch and of fakes for it, as in a phase but not augmented.

    None for a game without one. To have the health of a game of your own, register a function for its class with
    `@judges.register`.
    """
    return None


@judges.register
def _judges_from_noise(game: FromNoise, batch: dict[str, Tensor]) -> Judged | None:
    judge = getattr(game, "discriminator", getattr(game, "critic", None))
    if judge is None:
        return None
    image, labels = batch["image"], game.labels(batch)
    known = () if labels is None else (labels,)
    return _judged(lambda pictures: judge(pictures, *known), image, game.draw(image, labels))


@judges.register
def _judges_pix2pix(game: Pix2pix, batch: dict[str, Tensor]) -> Judged:
    source, image = game.pair(batch)
    return _judged(partial(game.score, source), image, game.generator(source))


@judges.register
def _judges_spade(game: Spade, batch: dict[str, Tensor]) -> Judged:
    """Also of SEAN. The discriminator's scores of several scales count alike."""
    image, mask = batch["image"], game.mask(batch["label"], batch.get("edges"))
    fakes = game.repaint(image, mask)
    scales = game.compare(mask, fakes, image)
    fake, real = (torch.stack([_of_each(scale[-1]) for scale in each]).mean(0) for each in scales)
    return Judged(real, fake, image, fakes)


@judges.register
def _judges_cyclegan(game: CycleGan, batch: dict[str, Tensor]) -> Judged:
    """Of both kinds of pictures, one after the other."""
    kinds = zip(("of_b", "of_a"), (batch["b"], batch["a"]), game.translate(batch["a"], batch["b"]), strict=True)
    each = [_judged(game.discriminators[which], image, fakes) for which, image, fakes in kinds]
    return Judged(*map(torch.cat, zip(*(vars(one).values() for one in each), strict=True)))


@judges.register
def _judges_cut(game: Cut, batch: dict[str, Tensor]) -> Judged:
    return _judged(game.discriminator, batch["b"], game.translate(batch["a"]))


def _judged(judge: Callable[[Tensor], Tensor], image: Tensor, fakes: Tensor) -> Judged:
    return Judged(_of_each(judge(image)), _of_each(judge(fakes)), image, fakes)


def _of_each(scores: Tensor) -> Tensor:
    """One score for each picture: the mean over its patches."""
    return scores.reshape(len(scores), -1).mean(1)
