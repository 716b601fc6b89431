"""VQGAN in its published configurations, on pictures of a person's own."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import OnPictures
from gan.runs.run import Run, begin_with, perceptual_loss, preset, ranks, say
from nets.discriminator import PatchGan
from nets.vqgan import Learning, VqAutoencoder


@dataclass(frozen=True)
class Preset:
    """A published configuration: channels of the levels, those with attention, length and number of the codes."""

    mult: tuple[int, ...]
    attention: tuple[int, ...]
    code: int
    codes: int
    start: int = 250_001
    adversarial: float = 0.8
    batch: int = 12  # of each device


F16, F8, F4 = (1, 1, 2, 2, 4), (1, 2, 2, 4), (1, 2, 4)
PRESETS = {
    "f16-1024": Preset(F16, (4,), 256, 1024),
    "f16-16384": Preset(F16, (4,), 256, 16384),
    "faces": Preset(F16, (4,), 256, 1024, start=30_001, batch=3),
    "f8": Preset(F8, (3,), 4, 16384),
    "f8-256": Preset(F8, (3,), 4, 256),
    "f4": Preset(F4, (), 3, 8192, start=0, adversarial=0.75),
}
SCORES = {
    "val/paint_error": "paint error on held-out pictures",
    "val/idle_codes": "share of the codes that held-out pictures do not use (1 - perplexity / codes)",
}


def vqgan(
    config_: str = "f16-1024",
    max_steps: PositiveInt = 500_000,
    batch_size: PositiveInt | None = None,
    rate: PositiveFloat | None = None,
    width: PositiveInt = 128,
    blocks: PositiveInt = 2,
    codes: PositiveInt | None = None,
    codebook: Learning = "learned",
    start: NonNegativeInt | None = None,
    adversarial: NonNegativeFloat | None = None,
    judge_loss: Literal["hinge", "vanilla"] = "hinge",
    judge_width: PositiveInt = 64,
    actnorm: bool = False,
    perceptual: str = "torchvision",
    perceptual_weight: NonNegativeFloat = 1.0,
    from_: str | None = None,
    **settings: Any,
) -> Run:
    """VQGAN on pictures of yours: pictures as small maps of codes, and painted again from these.

    What is not typed is that of the configuration.

    Args:
        config_: The published configuration: f16-1024, f16-16384, faces, f8, f8-256, f4. The number
            after f says how much smaller the map of codes is.
        max_steps: Steps of the whole training.
        batch_size: Pictures a step, of all ranks together; published: 12 (faces: 3) for each device.
        rate: Learning rate of both networks; published: 4.5e-6 times the batch size.
        width: Channels of the networks at full size, a multiple of 32; published: 128.
        blocks: Residual blocks of each size; published: 2.
        codes: How many codes there are.
        codebook: How codes learn: learned (by their gradient, as published), fixed (the same with the weight of the
            loss where the paper has it), or ema (they follow the features, and idle codes are replaced).
        start: The step in which the discriminator joins the game; published: 250001, faces: 30001.
        adversarial: How much its judgement pulls at the decoder's last layer, beside the rest; published: 0.8.
        judge_loss: The discriminator's loss: hinge or vanilla.
        judge_width: Channels of the discriminator's first layer; published: 64.
        actnorm: Whether the discriminator has ActNorm in place of batch norm.
        perceptual: VGG-16's weights for LPIPS: the path of a file, torchvision (its cache, else a download), or off.
        perceptual_weight: Weight of LPIPS; published: 1.
        from_: A published last.ckpt, or a run, to begin with its weights.
    """
    from gan.games.vqgan import VqGan
    from nets.vgg import load_lpips, vgg

    presets = {name: replace(each, batch=each.batch * ranks()) for name, each in PRESETS.items()}
    p = preset(presets, config_, codes=codes, start=start, adversarial=adversarial, batch=batch_size)
    lpips = perceptual_loss(perceptual, vgg.vgg16, load_lpips)
    found = OnPictures(**settings).find()
    autoencoder = _autoencoder(p, found.channels, width, blocks, codebook)
    judge = PatchGan(found.channels, judge_width, norm="act" if actnorm else "batch")
    rules: dict[str, Any] = dict(start=p.start, adversarial=p.adversarial, rate=rate or 4.5e-6 * p.batch)
    game = VqGan(autoencoder, judge, lpips, loss=judge_loss, perceptual_weight=perceptual_weight, **rules)
    begin_with(from_, game)
    if p.start >= max_steps:
        say(f"the discriminator would join in step {p.start:,}, after the end of this run; type a smaller --start")
    found.chosen = dict(codes=p.codes, width=width, blocks=blocks, judge_width=judge_width)
    return found.run(game, p.batch, max_steps, SCORES, config_=config_, **rules)


def _autoencoder(p: Preset, channels: int, width: int, blocks: int, codebook: Learning) -> VqAutoencoder:
    if width % 32:
        typed = 32 + width // 32 * 32
        raise UserError(f"--width {width} is no multiple of 32, the norms' groups; type --width {typed}")
    return VqAutoencoder(channels, width, p.mult, blocks, p.attention, p.code, p.code, p.codes, learning=codebook)
