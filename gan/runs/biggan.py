"""BigGAN in its published configurations, on pictures of a person's own."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import DISTANCE, Found, OnPictures
from gan.runs.run import Run, begin_with, length
from gan.runs.run import preset as preset_of
from nets.biggan import BigDiscriminator, BigGenerator, side_of

if TYPE_CHECKING:
    from gan.games.biggan import BigGan


@dataclass(frozen=True)
class Preset:
    """A published script, by the names of our options."""

    side: int
    kimg: float
    batch_size: int
    micro_batches: int = 1
    judge_steps: int = 1
    rate: float = 1e-4
    judge_rate: float = 4e-4
    width: int = 96
    latent: int = 120
    shared: int = 128
    attention: int = 64
    ema_start: int = 20_000
    eps: float = 1e-6


IMAGENET = Preset(128, 128_000, 2048, micro_batches=8)
PRESETS = {
    # launch_cifar_ema.sh, launch_BigGAN_bs256x8.sh and launch_BigGAN_ch64_bs256x8.sh
    "cifar": Preset(32, 25_000, 50, 1, 4, 2e-4, 2e-4, 64, 128, 0, 0, 1000, 1e-8),
    "imagenet128": IMAGENET,
    "imagenet128-ch64": replace(IMAGENET, width=64),
}


def preset(config: str, size: tuple[int, int], **typed: Any) -> Preset:
    """The configuration of that name; `auto` is cifar's up to 32 pixels, and for more ImageNet's with small batches."""
    side = side_of(size)
    auto = PRESETS["cifar"]
    if side > 32:
        small = replace(PRESETS["imagenet128-ch64"], batch_size=64, micro_batches=1, kimg=25_000, ema_start=1000)
        auto = replace(small, side=side, attention=min(64, side // 2))
    found = preset_of({"auto": auto} | PRESETS, config, **typed)
    if found.side != side:
        pictures = f"pictures have {size[1]}x{size[0]}"
        raise UserError(f"config '{config}' is for {found.side} pixels, and {pictures}; type --config auto")
    return found


OWN = ("side", "batch_size")  # of a configuration: said by `Found.run`


def biggan(
    config_: str = "auto",
    kimg: PositiveFloat | None = None,
    max_steps: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    micro_batches: PositiveInt | None = None,
    judge_steps: PositiveInt | None = None,
    rate: PositiveFloat | None = None,
    judge_rate: PositiveFloat | None = None,
    width: PositiveInt | None = None,
    latent: PositiveInt | None = None,
    shared: NonNegativeInt | None = None,
    attention: NonNegativeInt | None = None,
    ortho: NonNegativeFloat = 0.0,
    judge_ortho: NonNegativeFloat = 0.0,
    ema: ClosedUnitInterval = 0.9999,
    ema_start: NonNegativeInt | None = None,
    split: bool = False,
    from_: str | None = None,
    **settings: Any,
) -> Run:
    """BigGAN on pictures of yours: new pictures of each class, from noise.

    Classes are the sub-folders, or the labels, of the pictures; without any, all pictures are of one class. What is not
    typed is that of the configuration.

    Args:
        config_: The published configuration: auto (by the size of the pictures), cifar, imagenet128,
            or imagenet128-ch64.
        kimg: Thousands of pictures shown to the discriminator; published: 25,000 (cifar), 128,000 (imagenet128).
        max_steps: Updates of the discriminator, in place of kimg.
        batch_size: Pictures an update, of all ranks together; published: 50 (cifar), 2048 (imagenet128), auto 50 or 64.
        micro_batches: Parts of a rank's batch that are computed one after the other; published: 1, imagenet128 8.
        judge_steps: Updates of the discriminator for one of the generator; published: 4 (cifar), 1.
        rate: Learning rate of the generator; published: 0.0002 (cifar), 0.0001.
        judge_rate: Learning rate of the discriminator; published: 0.0002 (cifar), 0.0004.
        width: Channels of the last layers; the first have up to 16 times as many; published: 64 or 96.
        latent: Length of the noise vector; published: 128 (cifar), 120.
        shared: Length of the vector of a class that all layers share, with a chunk of the noise for each block; with 0
            each layer has a table of its own, and the noise goes into the first layer; published: 0 (cifar), 128.
        attention: The resolution with attention, 0 for none; published: 0 (cifar), 64.
        ortho: Weight of the generator's orthogonal regularisation; 0.0001 in the paper, 0 in the published scripts.
        judge_ortho: Weight of the discriminator's.
        ema: Decay of the generator's averaged weights.
        ema_start: From this update of the generator on its weights are averaged; published: 1000 (cifar), 20000.
        split: The discriminator sees fakes and pictures in two passes, not together.
        from_: A published file (G.pth, G_ema.pth, D.pth), the folder of several, or a run, to begin with.
    """
    found = OnPictures(**settings).find()
    p = preset(
        config_, found.size, kimg=kimg, batch_size=batch_size, micro_batches=micro_batches, judge_steps=judge_steps,
        rate=rate, judge_rate=judge_rate, width=width, latent=latent, shared=shared, attention=attention,
        ema_start=ema_start,
    )  # fmt: skip
    found.computed_at(p.side if p.side > 32 else 0)  # there are none for fewer than 32 pixels
    game = _game(p, found, ortho=(ortho, judge_ortho), ema=ema, split=split)
    begin_with(from_, game)
    steps = length(max_steps, 1000 * p.kimg / p.batch_size, kimg=kimg)
    chosen = vars(replace(p, kimg=steps * p.batch_size / 1000)).items()
    return found.run(game, p.batch_size, steps, DISTANCE, config_=config_, **{n: v for n, v in chosen if n not in OWN})


def _game(p: Preset, found: Found, **rules: Any) -> "BigGan":
    from gan.games.biggan import BigGan

    rule: dict[str, Any] = dict(size=found.size, classes=found.classes, channels=found.channels, width=p.width)
    rule |= dict(attention=[p.attention], start="normal" if p.side == 32 else "ortho")
    return BigGan(
        BigGenerator(latent=p.latent, shared=p.shared, hierarchical=bool(p.shared), **rule),
        BigDiscriminator(**rule),
        rates=(p.rate, p.judge_rate),
        judge_steps=p.judge_steps,
        micro_batches=p.micro_batches,
        ema_start=p.ema_start,
        eps=p.eps,
        **rules,
    )
