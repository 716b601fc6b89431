"""BigGAN in its published configurations, on pictures of a person's own, of classes or without."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import OnPictures
from gan.runs.run import Run, say
from nets.biggan import UP, BigGanDiscriminator, BigGanGenerator, start_


@dataclass(frozen=True)
class Preset:
    """A published configuration. `shared` is the length of a class's embedding, and 0 for none."""

    width: int
    batch: int
    kimg: int
    rates: tuple[float, float]
    judgements: int
    latent: int
    shared: int
    hierarchical: bool
    attention: int
    ema_start: int
    epsilon: float


PRESETS = {
    "cifar": Preset(64, 50, 25_000, (2e-4, 2e-4), 4, 128, 0, False, 0, 1000, 1e-8),
    "imagenet128": Preset(96, 2048, 128_000, (1e-4, 4e-4), 1, 120, 128, True, 64, 20_000, 1e-6),
}


def preset(config: str, size: int) -> Preset:
    """The configuration of that name; `auto` is that for CIFAR at 32 pixels, and else ImageNet's for the size."""
    if config == "auto":
        return PRESETS["cifar"] if size == 32 else replace(PRESETS["imagenet128"], attention=min(64, size // 2))
    if config not in PRESETS:
        raise UserError(f"--config {config} is not known; type one of auto, {', '.join(PRESETS)}")
    wanted = 32 if config == "cifar" else 128
    if size != wanted:
        raise UserError(f"config '{config}' is for {wanted} pixels, and pictures have {size}; type --config auto")
    return PRESETS[config]


def biggan(
    config_: str = "auto",
    kimg: PositiveFloat | None = None,
    max_steps: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    width: PositiveInt | None = None,
    latent: PositiveInt | None = None,
    judgements: PositiveInt | None = None,
    orthogonal: NonNegativeFloat = 0.0,
    ema_start: PositiveInt | None = None,
    from_: str | None = None,
    **settings: Any,
) -> Run:
    """BigGAN on pictures of yours, in folders of classes: new pictures of each class, from noise.

    What is not typed is that of the configuration. Pictures are square, of 32, 64, 128 or 256 pixels.

    Args:
        config_: Typed --config: the published configuration: auto (by the size of the pictures), cifar or imagenet128.
        kimg: Thousands of pictures shown to the discriminator; published: 25,000 (cifar), 128,000 (imagenet128).
        max_steps: Steps of the whole training, in place of kimg.
        batch_size: Pictures a step, of all ranks together; published: 50 (cifar), 2,048 (imagenet128).
        width: Channels of the networks at full size; published: 64 (cifar), 96 (imagenet128).
        latent: Length of the noise vector; published: 128 (cifar), 120 (imagenet128).
        judgements: The generator learns in one of this many steps; published: 4 (cifar), 1 (imagenet128).
        orthogonal: Weight of the penalty on rows of the generator's weights that are alike; published: 0, and 1e-4 in
            the paper.
        ema_start: The generator's update in which its average begins; published: 1,000 (cifar), 20,000 (imagenet128).
        from_: Typed --from: a published file, such as G_ema.pth, or the folder of several, to begin with.
    """
    from gan.games.biggan import BigGan

    pictures = OnPictures(**settings)
    found = pictures.find()
    size = min(UP, key=lambda side: abs(side - max(found.size)))
    if found.size != (size, size):
        raise UserError(f"BigGAN's pictures are square, and these {found.size[1]}x{found.size[0]}; type --size {size}")
    p = preset(config_, size)
    batch = batch_size or p.batch
    steps = max_steps or max(1, round(1000 * (kimg or p.kimg) / batch))
    common: dict[str, Any] = dict(classes=found.classes, attention=p.attention, channels=found.channels)

    torch.manual_seed(pictures.seed)
    generator = BigGanGenerator(
        size,
        width or p.width,
        latent=latent or p.latent,
        shared=p.shared,
        hierarchical=p.hierarchical or not found.classes,  # without classes only noise can change the norms
        **common,
    )
    discriminator = BigGanDiscriminator(size, width or p.width, **common)
    for network in (generator, discriminator):
        start_(network, orthogonal=p is not PRESETS["cifar"])
    game = BigGan(
        generator,
        discriminator,
        rates=p.rates,
        judgements=judgements or p.judgements,
        orthogonal=(orthogonal, 0.0),
        ema_start=ema_start or p.ema_start,
        epsilon=p.epsilon,
    )
    if from_ is not None:
        from nets.published.files import read_published

        say(f"weights: {', '.join(read_published(from_, game.published()))} of {from_}")
    return found.run(game, batch, steps)
