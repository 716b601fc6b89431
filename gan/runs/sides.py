"""Translations between two kinds of pictures of a person's own: pix2pix by pairs, CycleGAN, CUT and FastCUT without."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.pictures import COLOURS, FITTED, PLANNED, Found, PictureOptions, decoded, say_left_out
from gan.runs.run import Run, begin_with, decodes, instead_of_data, length, made_for, say
from nets.blocks import start_
from nets.discriminator import PatchGan, PatchVectors, PixelGan
from nets.resnet import ResnetGenerator, UNet

DEEPEST = 9  # unet_512
Network = Literal["unet", "unet_128", "unet_256", "unet_512", "resnet_9blocks", "resnet_6blocks"]
SELDOM = 4  # a U-Net that halves less often sees too little
SCORE = {"val/distance": "distance of translated from held-out pictures"}


@dataclass
class OnSides(PictureOptions):
    """Pictures of two kinds, A and B, to translate from one to the other, and how that is trained.

    Args:
        data: A folder or zip with A/ and B/, or trainA/, trainB/, testA/ and testB/, or any two folders; for
            pix2pix also pictures that are A on the left and B on the right.
        channels: 1 for gray, 3 for colours, 4 for colours and opacity; default: 1 for a side that is all gray, else 3.
        crop: Train on a random part of a picture, as published.
        load_size: Pixels of the shorter side of the pictures that random parts are cropped from (gan.sample --largest
            counts the longer). They keep their shape, or with fit stretch or pad have that of size; default: 286/256
            of size, cropped to its shape.
        flip: Mirror half of the pictures, both of a pair; not for letters, or what has a left and a right.
        held_out: The share that is scored on and not trained on, where no folder is called test or val.
        skip_broken: Leave pictures out that cannot be read, are tiny or have no partner.
        epochs: How often all pairs, or the pictures of the larger folder, are shown at the full rate; published: 100,
            200 (cut), 150 (fastcut).
        falling_epochs: How often after that, while the rate falls to zero; published: 100, 200 (cut), 50 (fastcut).
        max_steps: Steps of the whole training, in place of epochs; the rate falls over its second half.
        batch_size: Pairs, or pictures of each kind, a step, of all ranks together.
        width: Channels of the first layers: of all networks, or where judge_width can be typed of the generator.
        layers: How often a PatchGAN halves a picture; with 3 it judges patches of 70 pixels.
        rate: Learning rate of all networks.
        from_: A published file, such as latest_net_G.pth, the folder of several, or a run, to begin with.
    """

    flip: bool = True
    crop: bool = True
    load_size: PositiveInt | None = None
    epochs: PositiveInt | None = None
    falling_epochs: NonNegativeInt | None = None
    max_steps: PositiveInt | None = None
    batch_size: PositiveInt = 1
    width: PositiveInt = 64
    layers: PositiveInt = 3
    rate: PositiveFloat = 2e-4
    from_: str | None = None

    def begin(
        self, full: int = 100, after: int = 100, ahead: int = 2, *, paired: bool = False, **how: bool
    ) -> tuple[Found, int, Any]:
        """The pictures, the steps of the training, and how the rate falls: after the `full` epochs in those `after`."""
        from gan.games.pix2pix import epoch_decay, linear_decay

        found = self.find(paired=paired, **how)
        a, b = found.channels
        if a != b and not paired:
            raise UserError(f"{self.data} has pictures of {a} and of {b} channels; type --channels 3")
        found.chosen = dict(width=self.width, layers=self.layers, rate=self.rate, crop=self.crop, flip=self.flip)
        found.chosen |= {} if self.load_size is None else dict(load_size=self.load_size)
        typed = dict(epochs=self.epochs, falling_epochs=self.falling_epochs)
        full, after = self.epochs or full, after if self.falling_epochs is None else self.falling_epochs
        batches = max(1, len(found.train) // self.batch_size)
        steps = length(self.max_steps, (full + after) * batches, **typed)
        if self.max_steps is not None:
            return found, steps, linear_decay(steps)
        found.chosen |= dict(epochs=full, falling_epochs=after)
        return found, steps, epoch_decay(full, after, batches, ahead)

    def find(self, *, paired: bool, backwards: bool = False, side_by_side: bool = False) -> Found:
        """Look, decode what is new, and say in one line what there is. `backwards` exchanges A and B.

        With `side_by_side` pictures of any shape may be A on the left and B on the right.
        """
        from datasets.files.decoding import Frame
        from datasets.files.pictures import Headers, Pictures
        from datasets.files.sides import Both, PairedSides, Side, UnpairedSides, aligned, find_sides, refuse_single

        typed, fit = self._typed_part(), "whole" if self.load_size and self.fit == "crop" else self.fit
        kind = PairedSides if paired else UnpairedSides
        try:
            train, val, said = find_sides(self.data, paired=paired, held_out=self.held_out, leave_out=self.skip_broken)
        except UserError as error:
            rules = instead_of_data(error, size=typed or (PLANNED, PLANNED), channels=[self.channels or 3] * 2)
            train, val = (rule and kind.made_up(self._enlarged(rule["size"]), **rule) for rule in rules)
            return Found(self, train, val)
        if backwards:
            train, val, said = train[::-1], val[::-1], f"{said}; from B to A"
        headers = Headers(train[0]), Headers(train[1])
        if made_for("train", "dry") and side_by_side != (train[0].half is not None):
            if side_by_side:
                raise UserError(f"{self.data} has folders of A and of B; leave --side-by-side out")
            refuse_single(headers[0], self.data)
        size = typed or headers[0].size()[0]
        channels = self.channels or headers[0].channels, self.channels or headers[1].channels
        shown = " and ".join(dict.fromkeys(COLOURS[count] for count in channels))
        kept: list[Pictures] = []

        def opened(parts: Both, stored: tuple[int, int]) -> PairedSides:
            frames = [Frame(*stored, count, fit, self.background) for count in channels]
            both = [Pictures(*each, self.skip_broken, decodes()) for each in zip(parts, frames, strict=True)]
            kept.extend(both)
            return kind(*(Side(each, size) for each in (aligned(*both) if paired else both)))

        larger = self._enlarged(size)
        seen = larger if self.load_size else size
        found = Found(self, opened(train, larger), opened(val, seen) if all(map(len, val)) else None)
        to = f"{FITTED[self.fit]} to {seen[1]}x{seen[0]}"
        if self.load_size:
            to = f"scaled to {self.load_size} pixels on the shorter side" if fit == "whole" else to
            to += f"; trained on random parts of {size[1]}x{size[0]}, scored on the middle of those held out"
        say(f"{said}; {to}, {shown}; {decoded(*kept)}")
        say_left_out(*kept)
        return found

    def _typed_part(self) -> tuple[int, int] | None:
        """The size that is typed; and of parts of larger pictures the published one."""
        from datasets.files.pictures import USUAL

        size = self.typed_size()
        if not self.load_size:
            return size
        if not self.crop:
            raise UserError("--crop false takes no parts of pictures, so --load-size does nothing; leave one out")
        size = size or (min(USUAL, self.load_size),) * 2
        least = max(size) if self.fit == "crop" else min(size)
        if least > self.load_size:
            what = f"parts of {size[1]}x{size[0]} do not fit into pictures of --load-size {self.load_size}"
            raise UserError(f"{what}; type a smaller --size, or --load-size {least} or more")
        return size

    def _enlarged(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size of the pictures of which a random part is cropped in training."""
        from datasets.augment import enlarged

        if not self.load_size:
            return enlarged(size) if self.crop else size
        if self.fit == "crop":
            return self.load_size, self.load_size
        height, width = size
        return round(height * self.load_size / min(size)), round(width * self.load_size / min(size))


def unet_depth(size: tuple[int, int], name: str = "unet") -> int:
    """How often a U-Net halves pictures of a size: as its name says, or as often as it can; seldom is refused."""
    divides = [depth for depth in range(1, DEEPEST + 1) if not any(side % 2**depth for side in size)]
    seldom = min(SELDOM, min(size).bit_length() - 1)
    wanted = int(name.removeprefix("unet_")).bit_length() - 1 if name != "unet" else max([seldom, *divides])
    if wanted not in divides:
        step = 2**wanted
        fits = "x".join(str(max(1, round(side / step)) * step) for side in size[::-1])
        raise UserError(
            f"a U-Net that halves {wanted} times cannot have pictures of {size[1]}x{size[0]}; type --size {fits}, or "
            f"another --network, such as resnet_9blocks"
        )
    return wanted


def pix2pix(
    network: Network = "unet",
    judge: Literal["basic", "pixel"] = "basic",
    loss: Literal["vanilla", "lsgan", "wgangp"] = "vanilla",
    direction: Literal["AtoB", "BtoA"] = "AtoB",
    side_by_side: bool = False,
    judge_width: PositiveInt = 64,
    norm: Literal["batch", "instance"] = "batch",
    dropout: bool = True,
    pixels: NonNegativeFloat = 100.0,
    **settings: Any,
) -> Run:
    """pix2pix on pairs of pictures of yours: translates one side, A or B, into the other.

    Args:
        network: The generator: unet (as deep as the size allows), unet_128, unet_256, unet_512, resnet_9blocks or
            resnet_6blocks.
        judge: The discriminator: basic (a PatchGAN), or pixel, which judges single pixels.
        loss: What the networks learn by beside the pixels: vanilla, lsgan, or wgangp with a gradient penalty.
        direction: AtoB, or BtoA to translate those of B into those of A.
        side_by_side: Pictures that are not twice as wide as high are pairs too, A on the left and B on the right.
        judge_width: Channels of the discriminator's first layer.
        norm: The norm in both networks: batch or instance.
        dropout: Whether the generator drops values, also in use: its only source of variety.
        pixels: Weight of the L1 loss on pixels.
    """
    from gan.games.pix2pix import Pix2pix

    typed = OnSides(**settings)
    found, steps, decay = typed.begin(paired=True, backwards=direction == "BtoA", side_by_side=side_by_side)
    (inside, outside), width = found.channels, typed.width
    both = inside + outside, judge_width
    if network.startswith("resnet"):
        blocks = int(network[len("resnet_")])
        generator = ResnetGenerator(inside, outside, width, blocks, norm=norm, dropout=dropout)
    else:
        depth = unet_depth(found.size, network)
        generator = UNet(inside, outside, width, depth, None if dropout else 0, norm)
    discriminator = PixelGan(*both, norm) if judge == "pixel" else PatchGan(*both, typed.layers, norm)
    game = Pix2pix(generator, discriminator, decay, loss=loss, rate=typed.rate, pixels=pixels, direction=direction)
    begin_with(typed.from_, game)
    score = {"val/paint_error": "error of held-out pictures translated"}
    seen = f"unet_{2 ** unet_depth(found.size)}" if network == "unet" else network
    chosen = dict(network=seen, judge=judge, loss=loss, direction=direction, pixels=pixels, judge_width=judge_width)
    return found.run(game, typed.batch_size, steps, score, **chosen)


def cyclegan(
    blocks: PositiveInt = 9,
    cycle: NonNegativeFloat = 10.0,
    identity: NonNegativeFloat = 0.5,
    pool: NonNegativeInt = 50,
    **settings: Any,
) -> Run:
    """CycleGAN on two kinds of pictures of yours: from A to B and from B to A, learned without pairs.

    Args:
        blocks: Residual blocks of each generator; published: 9, or 6 for less than 256 pixels.
        cycle: Weight of the loss that a picture translated there and back must be the same.
        identity: Weight of the loss that a picture of the wanted kind must stay as it is, as a part of cycle.
        pool: How many past fakes of each kind the discriminators are shown again.
    """
    from gan.games.cyclegan import CycleGan

    typed = OnSides(**settings)
    found, steps, decay = typed.begin()
    channels, _ = found.channels  # the same on both sides
    generator = partial(ResnetGenerator, channels, channels, typed.width, blocks)
    discriminator = partial(PatchGan, channels, typed.width, typed.layers, norm="instance")
    game = CycleGan(generator, discriminator, decay, rate=typed.rate, cycle=cycle, identity=identity, pool=pool)
    begin_with(typed.from_, game)
    return found.run(game, typed.batch_size, steps, SCORE, blocks=blocks, cycle=cycle, identity=identity)


def cut(
    config_: str = "cut",
    blocks: PositiveInt = 9,
    nce: NonNegativeFloat | None = None,
    patches: PositiveInt = 256,
    all_negatives: bool = False,
    **settings: Any,
) -> Run:
    """CUT or FastCUT on two kinds of pictures of yours: from A to B, learned without pairs, in half of CycleGAN's time.

    Args:
        config_: cut, or fastcut, which is lighter: it translates no pictures of B, and mirrors some.
        blocks: Residual blocks of the generator; published: 9, or 6 for less than 256 pixels; at least 5.
        nce: Weight of the loss that a patch must stay like itself; published: 1 (cut), 10 (fastcut).
        patches: How many patches of a picture are compared in each layer.
        all_negatives: Compare a patch with those of all pictures of the batch, not only of its own.
    """
    from gan.games.cut import Cut

    if config_ not in ("cut", "fastcut"):
        raise UserError(f"--config {config_} is not known; type cut or fastcut")
    typed, fast = OnSides(**settings), config_ == "fastcut"
    found, steps, decay = typed.begin(*((150, 50) if fast else (200, 200)), ahead=1)
    networks = cut_networks(found.channels[0], typed.width, blocks, judge=typed.width, layers=typed.layers)
    nce = (10.0 if fast else 1.0) if nce is None else nce
    game = Cut(
        *networks, decay, rate=typed.rate, nce=nce, identity=not fast, flips=fast, patches=patches,
        all_negatives=all_negatives,
    )  # fmt: skip
    begin_with(typed.from_, game)
    return found.run(game, typed.batch_size, steps, SCORE, config_=config_, blocks=blocks, nce=nce, patches=patches)


def cut_networks(
    channels: int, width: int = 64, blocks: int = 9, *, vectors: int = 256, judge: int = 64, layers: int = 3
) -> tuple[ResnetGenerator, PatchVectors, PatchGan]:
    """CUT's three networks, as published; the losses look into the fifth block."""
    if blocks < 5:
        raise UserError(f"CUT compares features of the fifth block, and there are {blocks}; type --blocks 5 or more")
    generator = ResnetGenerator(channels, channels, width, blocks, smooth=True)
    discriminator = PatchGan(channels, judge, layers, norm="instance", smooth=True)
    start_(generator, xavier=True)
    start_(discriminator, xavier=True)
    return generator, PatchVectors([channels, 2 * width, *[4 * width] * 3], vectors), discriminator
