"""R3GAN in its published configurations, on pictures of a person's own."""

from dataclasses import dataclass, replace
from typing import Any

from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import DISTANCE, Found, OnPictures
from gan.runs.run import Run
from gan.runs.run import preset as preset_of
from nets.ada import Augmentation
from nets.r3 import R3Discriminator, R3Generator


@dataclass(frozen=True)
class Preset:
    """A published configuration: the widths from 4x4 up, and what the schedules are about."""

    widths: tuple[int, ...]
    gamma: float  # at the beginning; a tenth of it at the end
    p: float  # at the end, as the next one
    ema: float  # half-life, in thousands of images
    batch: int
    rate: float = 2e-4
    kimg: float = 20_000
    low: int = 4
    wide: int = 16  # channels in a group


WIDE = (768,) * 4
PRESETS = {
    "cifar10": Preset(WIDE, 0.05, 0.55, 5000, 512, low=3),
    "ffhq64": Preset((*WIDE, 384), 2, 0.3, 500, 256),
    "ffhq256": Preset((*WIDE, 384, 192, 96), 150, 0.3, 500, 256),
    "imagenet32": Preset((1536,) * 4, 0.5, 0.5, 50_000, 4096, kimg=200_000, low=3, wide=32),
    "imagenet64": Preset((1536,) * 5, 1, 0.4, 50_000, 4096, kimg=200_000, wide=32),
}


def preset(config: str, size: tuple[int, int], **typed: Any) -> Preset:
    """The configuration of that name; `auto` is FFHQ's at another size, with its `gamma` by the number of pixels."""
    stages = max(2, (max(size) - 1).bit_length() - 1)
    widths = tuple(min(768, 768 * 32 // (4 * 2**stage)) for stage in range(stages))
    # FFHQ's 2 at 64 pixels and 150 at 256 lie on a power of the number of pixels a side.
    auto = Preset(widths, 2 * (4 * 2 ** (stages - 1) / 64) ** 3.1, 0.3, 500, 256, low=min(4, stages - 1))
    presets = {"auto": auto} | PRESETS
    found = preset_of(presets, config, **typed)
    if typed.get("ema") is None:  # in a shorter training the average is as long a part of that as published
        found = replace(found, ema=found.ema * min(1, found.kimg / presets[config].kimg))
    if max(size) > (side := 4 * 2 ** (len(found.widths) - 1)):
        raise UserError(f"config '{config}' is for {side} pixels, and pictures have {max(size)}; type --config auto")
    return found


def r3gan(
    config_: str = "auto",
    kimg: PositiveFloat | None = None,
    max_steps: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    rate: PositiveFloat | None = None,
    gamma: NonNegativeFloat | None = None,
    augment: NonNegativeFloat | None = None,
    ema_kimg: NonNegativeFloat | None = None,
    width: PositiveFloat = 1.0,
    bf16: bool = False,
    from_: str | None = None,
    **settings: Any,
) -> Run:
    """R3GAN on pictures of yours: new pictures like these, from noise. In each step one network learns, in turns.

    What is not typed is that of the configuration.

    Args:
        config_: The published configuration: auto (by the size of the pictures), or cifar10, ffhq64,
            ffhq256, imagenet32, imagenet64.
        kimg: Thousands of pictures shown to each network, and until then all schedules move; published: 20,000,
            ImageNet 200,000.
        max_steps: Steps of the whole training; one network learns in each. The schedules still end as kimg says.
        batch_size: Pictures a step, of all ranks together; published: 512 (cifar10), 256 (ffhq), 4096 (imagenet).
        rate: Learning rate of both networks at the beginning, a quarter of it at the end; published: 0.0002.
        gamma: Weight of both gradient penalties at the beginning, a tenth of it at the end; published: 0.05 (cifar10)
            to 150 (ffhq256).
        augment: Probability of each augmentation at the end, it grows from 0; 0 for none; published: 0.3 to 0.55.
        ema_kimg: Half-life of the generator's averaged weights at the end, in thousands of pictures; published: 500
            (ffhq), 5,000 (cifar10), 50,000 (imagenet); with a smaller kimg the same part of that.
        width: Channels are this times the published ones.
        bf16: Compute the sizes that the published code names in bfloat16, which is faster on GPUs.
        from_: A published file of R3GAN's networks (.pkl), or a run, to begin with these networks and weights.
    """
    from gan.games.r3gan import R3Gan

    found = OnPictures(**settings).find(from_, R3Generator, R3Discriminator)
    p = preset(config_, found.size, kimg=kimg, batch=batch_size, rate=rate, gamma=gamma, p=augment, ema=ema_kimg)
    found.computed_at(4 * 2 ** (len(p.widths) - 1))
    if from_ and width != 1:
        raise UserError(f"{from_} has networks of its own; leave --width out")
    game = R3Gan(
        *(found.networks() or _networks(p, found, width, bf16)),
        batch_size=p.batch,
        rate=(p.rate, p.rate / 4),
        gamma=(p.gamma, p.gamma / 10),
        ema=(0.0, 1000 * p.ema),
        p=(0.0, p.p),
        images=1000 * p.kimg,
        augment=Augmentation("r3gan") if p.p else None,
    )
    chosen = dict(config_=config_, kimg=p.kimg, rate=p.rate, gamma=p.gamma, augment=p.p, ema_kimg=p.ema)
    chosen |= {} if from_ else dict(width=width)
    return found.run(game, p.batch, max_steps or max(2, 2 * round(1000 * p.kimg / p.batch)), DISTANCE, 2, **chosen)


def _networks(p: Preset, found: Found, width: float, bf16: bool) -> tuple[R3Generator, R3Discriminator]:
    widths = [max(8, int(each * width) // 8 * 8) for each in p.widths]
    groups = [max(1, 2 * each // p.wide) for each in widths]
    rule: dict[str, Any] = dict(widths=widths, groups=groups, low=p.low if bf16 else 0)
    rule |= dict(classes=found.classes, channels=found.channels)
    return R3Generator(size=found.size, **rule), R3Discriminator(**rule)
