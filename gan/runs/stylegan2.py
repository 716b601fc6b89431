"""StyleGAN2-ADA on pictures of a person's own, in the published configurations."""

from dataclasses import dataclass
from typing import Any

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gan.ema import half_life
from gan.files.errors import UserError
from gan.runs.pictures import DISTANCE, Found, OnPictures
from gan.runs.run import Run, length, ranks, say, shared
from gan.runs.run import preset as preset_of
from nets.ada import PIPES, Ada
from nets.stylegan import StyleDiscriminator, StyleGenerator

PATHS = 2  # path lengths are of one in so many samples of a rank
LONGEST = 0.05  # of a short training: the half-life of the averaged weights, as the published ramp has it


@dataclass(frozen=True)
class Preset:
    """What a published configuration sets: see train.py of stylegan2-ada-pytorch."""

    batch: int
    rate: float
    gamma: float
    ema: float  # half-life, in thousands of images
    group: int = 4
    width: float = 1.0
    mapping: int = 8
    kimg: int = 25_000
    ramp_up: float | None = None
    path: float = 2.0
    mixing: float = 0.9
    skip: bool = True


PRESETS = {
    "stylegan2": Preset(32, 0.002, 10, 10),
    "paper256": Preset(64, 0.0025, 1, 20, group=8, width=0.5),
    "paper512": Preset(64, 0.0025, 0.5, 20, group=8),
    "paper1024": Preset(32, 0.002, 2, 10),
    "cifar": Preset(
        64, 0.0025, 0.01, 500, group=32, mapping=2, kimg=100_000, ramp_up=0.05, path=0, mixing=0, skip=False
    ),
}


def batch_on(devices: int, side: int) -> int:
    """The batch of the published `auto`."""
    return max(min(devices * min(max(4096 // side, 1), 32), 64), devices)


def preset(config: str, side: int, batch: int | None = None, **typed: Any) -> Preset:
    """The configuration of that name. `auto` depends on the larger side of the pictures and on the batch size."""
    size = batch or shared(batch_on(ranks(), side), PATHS)
    width, rate = 1.0 if side >= 512 else 0.5, 0.002 if side >= 1024 else 0.0025
    gamma, ema = 0.0002 * side**2 / size, size * 10 / 32
    auto = Preset(size, rate, gamma, ema, min(size, 4), width, mapping=2, ramp_up=0.05)
    return preset_of({"auto": auto} | PRESETS, config, PATHS, batch=batch, **typed)


def stylegan2(
    config_: str = "auto",
    kimg: PositiveFloat | None = None,
    max_steps: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    gamma: NonNegativeFloat | None = None,
    rate: PositiveFloat | None = None,
    width: PositiveFloat | None = None,
    mapping: PositiveInt | None = None,
    ema_kimg: NonNegativeFloat | None = None,
    augment: str = "bgc",
    augment_target: float = 0.6,
    freeze_d: NonNegativeInt = 0,
    from_: str | None = None,
    **settings: Any,
) -> Run:
    """StyleGAN2-ADA on pictures of yours: new pictures like these, from noise.

    What is not typed is that of the configuration.

    Args:
        config_: The published configuration: auto (by the size of the pictures), or stylegan2, paper256
            (FFHQ and LSUN at 256 pixels), paper512 (AFHQ), paper1024 (MetFaces), cifar.
        kimg: Thousands of pictures shown in the whole training; published: 25,000, cifar 100,000.
        max_steps: Steps of the whole training, in place of kimg.
        batch_size: Pictures a step, of all ranks together; published: 32 or 64; auto 4096 / size (32 at
            most) for each device, and 64 at most.
        gamma: Weight of R1 per step; published: 0.01 (cifar) to 10, auto 0.0002 * size^2 / batch_size.
        rate: Learning rate of both networks; published: 0.002 or 0.0025.
        width: Channels are this times 32,768 / size, and 512 at most; published: 1, paper256 and auto below 512 0.5.
        mapping: Layers from noise to styles; published: 8, auto and cifar 2.
        ema_kimg: Half-life of the generator's averaged weights, in thousands of pictures; published: 10 or 20,
            cifar 500, auto batch_size * 10 / 32; in auto and cifar at most a twentieth of the pictures shown so far,
            else at most a twentieth of the training.
        augment: What the discriminator sees changed: blit (flips, quarter turns, whole pixels), geom, color, bg, bgc
            (these three, as published), bgcfnc (also filters, noise and cuts), or off.
        augment_target: Pictures are augmented more often while the mean sign of the scores of real pictures is above
            this; published: 0.6. From never to always it takes 500 thousand pictures or more, with --from 100 thousand.
        freeze_d: The first layers of the discriminator that do not learn (FreezeD), for training from other weights.
        from_: A published file of StyleGAN2 networks (.pkl), or a run, to begin with these networks and weights.
    """
    from gan.games.stylegan import StyleGan

    ada = _augmentation(augment, augment_target, 100_000 if from_ else 500_000)
    found = OnPictures(**settings).find(from_, StyleGenerator, StyleDiscriminator)
    found.computed_at(side := 1 << (max(found.size) - 1).bit_length())
    p = preset(config_, side, batch_size, kimg=kimg, gamma=gamma, rate=rate, width=width, mapping=mapping, ema=ema_kimg)
    steps = length(max_steps, 1000 * p.kimg / p.batch, kimg=kimg)
    if from_ and (width or mapping):
        raise UserError(f"{from_} has networks of its own; leave --width and --mapping out")
    networks = found.networks() or _networks(p, found)
    check_frozen(freeze_d, len(networks[1].layers()))
    ramp_up = None if from_ else p.ramp_up  # weights that are good already need no quick average at first
    average = 1000 * p.ema if ema_kimg is not None or ramp_up is not None else _at_most(1000 * p.ema, steps * p.batch)
    rules: dict[str, Any] = dict(rate=p.rate, gamma=p.gamma, path=p.path, mixing=p.mixing)
    game = StyleGan(*networks, ema=half_life(average, p.batch, ramp_up), ada=ada, freeze=freeze_d, **rules)
    chosen: dict[str, Any] = dict(config_=config_, kimg=steps * p.batch / 1000, ema_kimg=average / 1000, **rules)
    chosen |= dict(freeze_d=freeze_d) if from_ else dict(width=p.width, mapping=p.mapping)
    return found.run(game, p.batch, steps, DISTANCE, **chosen)


def _augmentation(kind: str, target: float, pictures: int) -> Ada | None:
    if kind not in ("off", *PIPES):
        raise UserError(f"augment '{kind}' is not known; type --augment {', '.join(PIPES)} or off")
    return None if kind == "off" else Ada(target, pictures, kind)


def _at_most(average: float, shown: int) -> float:
    """The half-life in pictures of an average without a ramp, which would be as short by itself."""
    longest = LONGEST * shown
    if longest < average:
        say(f"averaged weights: half-life {longest / 1000:g} kimg, a twentieth of the training; --ema-kimg for another")
    return min(longest, average)


def check_frozen(typed: int, layers: int) -> None:
    if typed > layers:
        raise UserError(f"the discriminator has {layers} layers; type --freeze-d 0 to {layers}, often 4")


def _networks(p: Preset, found: Found) -> tuple[StyleGenerator, StyleDiscriminator]:
    shape: dict[str, Any] = dict(channels=found.channels, classes=found.classes, base=int(32768 * p.width))
    generator = StyleGenerator(found.size, mapping=p.mapping, clamp=256.0, **shape)
    return generator, StyleDiscriminator(found.size, skip=p.skip, group=p.group, clamp=256.0, **shape)
