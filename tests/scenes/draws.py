"""What networks and losses draw, by gan.noise, torch, NumPy and random."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from gan import Phase, noise
from tests.support.hard_games import Plain
from tests.support.scene import Mutant, Refused, Scene, having, nothing


class Draws(Plain):
    """Draws as published networks do: for each sample, and once for all."""

    draws, micro_batches = "samples", 1

    def __init__(self):
        super().__init__()
        self.generator.insert(2, nn.Dropout(0.3))
        self.discriminator.insert(2, nn.Dropout(0.2))

    def configure_phases(self):
        more = {"micro_batches": self.micro_batches, "draws": self.draws}
        yield Phase("discriminator", self.judge, "discriminator", **more)
        yield Phase("generator", self.fool, "generator", **more)

    def fake(self, real):
        n, mean, double = len(real), real[:, :4].detach(), {"dtype": real.dtype}
        z = torch.randn(n, 4, **double) + torch.empty_like(mean).normal_() + torch.randn_like(mean)
        z = z + torch.rand([], **double) * torch.empty([], dtype=torch.int64).random_(1, 5)
        z = z[:, torch.randperm(4)] + torch.normal(mean, mean.abs()) * torch.bernoulli(mean.sigmoid())
        z = z + F.gumbel_softmax(mean) + F.one_hot(torch.multinomial(mean.exp(), 1)[:, 0], 4)
        z = z + F.one_hot(torch.multinomial(torch.arange(1.0, 5), len(z), replacement=True), 4)
        z = z * torch.rand(2 * n, 4, **double).view(2, n, 4).sum(0) + torch.randn(7, **double).mean()
        start = (torch.rand(n, **double) * 3).long()
        z = (
            z + torch.poisson(mean.abs()) + real.gather(1, start[:, None] + torch.arange(4))
        )  # random segments, as HiFi-GAN and VITS cut them
        z = F.alpha_dropout(F.dropout2d(z[..., None, None], 0.3).flatten(1), 0.2, training=True)
        return F.dropout(self.generator(F.rrelu(z, training=True)), 0.1)


class Ambiguous(Draws):
    """8 numbers may be those of the 8 samples of a rank, which only a trial can tell."""

    def fake(self, real):
        return super().fake(real) * torch.randn(8, dtype=real.dtype)[:6]


class WithoutSeed(Draws):
    """A published loss that makes its generator anew each time."""

    def fake(self, real):
        return super().fake(real) * np.random.default_rng().uniform(0.5, 2)


class Unordered(Draws):
    """Layers over a set of names, which each process has in another order."""

    def __init__(self):
        super().__init__()
        names = ["day", "night"] if dist.get_rank() else ["night", "day"]
        self.heads = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})


class Unlisted(Draws):
    """A player over a set of weights: the network is the same, the player is not."""

    def configure_players(self):
        generator, discriminator = super().configure_players()
        weights = list(self.generator.parameters())
        yield replace(generator, module=nn.ParameterList(weights[::-1] if dist.get_rank() else weights))
        yield discriminator


class Recurrent(Draws):
    """Samples in the second dimension, and a generator of the author's, or torch's, which micro-batches draw anew."""

    make_dice = staticmethod(lambda: torch.Generator().manual_seed(5))

    def __init__(self):
        super().__init__()
        self.dice = self.make_dice()
        self.generator = nn.ModuleDict({"lstm": nn.LSTM(6, 6, 2, dropout=0.4), "last": nn.Linear(6, 6)})
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3).requires_grad_(False)

    def fake(self, real):
        noisy = torch.stack([real, real.roll(1, 1), torch.randn(real.shape, generator=self.dice, dtype=real.dtype)])
        return self.generator["last"](self.layer(self.generator["lstm"](noisy)[0])[-1])


class SideBySide(Plain):
    """The heads of a sample lie side by side."""

    def __init__(self):
        super().__init__()
        self.generator = nn.MultiheadAttention(6, 2, 0.4)

    def fake(self, real):
        return self.generator(*[torch.stack([real, real.roll(1, 1)])] * 3)[0][0]


class InFours(Plain):
    """The crops of a sample lie side by side, in a phase that begins late and needs packs of four samples."""

    start = 1

    def configure_phases(self):
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator", start=self.start)

    def fool(self, batch):
        real = batch["x"].view(-1, 4, 6)
        crops = self.fake(batch["x"]).repeat_interleave(2, 0)
        crops = crops * torch.rand(len(crops), 1, dtype=crops.dtype)
        return softplus(-self.discriminator(crops)).mean() + 0 * real.sum()


class SideBySideInOne(InFours):
    """Its other phase draws for reals and fakes in blocks."""

    start = 0

    def judge(self, batch):
        both = torch.cat([batch["x"], self.fake(batch["x"]).detach()])
        real, fake = self.discriminator(both + torch.rand(len(both), 6, dtype=both.dtype)).chunk(2)
        return (softplus(-real) + softplus(fake)).mean()


class BothWays(SideBySide):
    """Also two rows for each sample, as torch.cat makes them: one of the two is taken for what it is not."""

    def fake(self, real):
        n, width = real.shape
        return super().fake(real) + torch.randn(2 * n, width, dtype=real.dtype).view(2, n, width).sum(0)


class Frames(Plain):
    """What is drawn, how often and of what size varies from step to step, as with the number of frames of a video."""

    def fake(self, real):
        n, frames = len(real), (3, 5, 2, 4)[self.step % 4]
        z = sum(self.drawn(n) for _ in range(frames)).repeat_interleave(frames, 0) + self.drawn(n * frames)
        return self.generator(z + self.of_all()).view(n, frames, 6).mean(1)

    def drawn(self, rows):
        return torch.randn(rows, 4, dtype=torch.float64)

    def of_all(self):
        return self.drawn((8, 16)[self.step // 2 % 2]).mean(0) if self.step % 2 else 0.0


class LateFrames(Frames):
    """What all samples share is drawn for the first time between two trials. It looks like a row for each sample."""

    def of_all(self):
        return self.drawn(8).mean(0) if self.step == 2 else 0.0


class Lazily(Plain):
    """As path lengths, of half of the batch in each fourth step: resumed, it comes between two trials."""

    def fool(self, batch):
        loss = super().fool(batch)
        if self.step % 4 == 3:
            half = torch.randn(len(batch["x"]) // 2, 4, dtype=torch.float64)
            loss = loss + self.generator(half).square().mean()
        return loss


class JoinsSideBySide(Plain):
    """Later steps draw several rows for each sample twice, side by side, and the first one once."""

    def fake(self, real):
        z = torch.randn(len(real) * 3, 4, dtype=real.dtype).view(len(real), 3, 4)
        if self.step:
            z = z + torch.randn(len(real) * 3, 4, dtype=real.dtype).view(len(real), 3, 4)
        return self.generator(z).mean(1)


class Truncated(Plain):
    """Noise that is drawn again until all of it is accepted, and more noise after that."""

    def fake(self, real):
        z = nn.init.trunc_normal_(torch.empty(len(real), 4, dtype=real.dtype))
        return self.generator(z + torch.randn(len(real), 4, dtype=real.dtype))


class ByLoop(Plain):
    """The same by the author's own loop, in a later step."""

    def fake(self, real):
        z = torch.randn(len(real), 4, dtype=real.dtype)
        while self.step == 2 and (again := z.abs() > 0.5).any():
            z = torch.where(again, torch.randn_like(z), z)
        return self.generator(z + torch.randn(len(real), 4, dtype=real.dtype))


class ByMask(Plain):
    """Only what was not accepted is drawn again, and nothing after that."""

    def fake(self, real):
        z = torch.randn(len(real), 4, dtype=real.dtype)
        if self.step == 2:
            again = z.abs() > 0.7
            z = z.masked_scatter(again, torch.randn(int(again.sum()), dtype=real.dtype))
        return self.generator(z)


class Angles(Plain):
    def fake(self, real):
        of_each = torch.zeros(len(real), 4, dtype=real.dtype)
        return self.generator(torch.distributions.VonMises(of_each, of_each + 1).sample())


class PacksInParts(Plain):
    """A draw for each pack of two samples, which micro-batches part."""

    micro_batches = 2

    def fake(self, real):
        packs = torch.randn(len(real) // 2, 4, dtype=real.dtype)
        return self.generator(packs.repeat_interleave(2, 0))


class InALoop(PacksInParts):
    def fake(self, real):
        return self.generator(torch.stack([torch.randn(4, dtype=real.dtype) for _ in real]))


class OfNumPy(Draws):
    def fake(self, real):
        return super().fake(real) * np.random.rand() + random.random()


class Again(Draws):
    """The author's own checkpoint, which runs the networks again in backward."""

    reentrant, preserve = False, True

    def fake(self, real):
        again = partial(checkpoint, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)
        return again(super().fake, real.detach().requires_grad_())


class Compiled(Plain):
    """Dropouts in networks that the author compiles, or that the option does."""

    def __init__(self):
        super().__init__()
        self.generator.insert(2, nn.Dropout(0.3))

    def fake(self, real):
        return self.generator(torch.randn(len(real), 4, dtype=real.dtype))


class ByAuthor(Compiled):
    def __init__(self):
        super().__init__()
        self.generator.compile()


class AllDraws(Plain):
    """Every kind of draw, in two micro-batches; a dropout in each network."""

    micro_batches = 2

    def __init__(self):
        super().__init__()
        self.generator.insert(2, nn.Dropout(0.3))
        self.discriminator.insert(2, nn.Dropout(0.2))
        noise.convert_dropout(self)

    def fake(self, real):
        time = noise.rand((), like=real, common=True)
        kind = noise.randint(0, 4, (len(real),), like=real)
        mixed = noise.rand((len(real), 4), like=real) * time + nn.functional.one_hot(kind, 4)
        return noise.dropout(self.generator(mixed + noise.randn((len(real), 4), like=real)), 0.1)


class Seeded(Plain):
    """Noise that is the same in each step: the loss seeds torch."""

    seed = staticmethod(lambda: torch.manual_seed(7))

    def fake(self, real):
        with torch.random.fork_rng():
            self.seed()
            z = torch.randn(len(real), 4, dtype=real.dtype) + torch.randn(4, dtype=real.dtype)
            z = F.dropout(z, 0.3)
        return self.generator(z + torch.randn(len(real), 4, dtype=real.dtype))


class SeededByGenerator(Plain):
    def fake(self, real):
        how = {"dtype": real.dtype, "generator": torch.Generator().manual_seed(7)}
        z = torch.randn(len(real), 4, **how) + torch.randn(4, **how)
        kept = torch.empty(z.shape, dtype=torch.bool).bernoulli_(0.7, generator=how["generator"])
        noise.here().calls = 0  # as after the fork
        return self.generator(z * kept / 0.7 + torch.randn(len(real), 4, dtype=real.dtype))


# ---- the table ----


class Unlike(OfNumPy):
    """NumPy and Python begin otherwise on each rank. Later the first one alone draws, to choose what it shows."""

    def __init__(self):
        super().__init__()
        rank = dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 else 0
        np.random.seed(3 + rank)
        random.seed(3 + rank)

    @rank_zero_only
    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 2:
            random.choice(np.random.permutation(8))


BY_TORCH, OF_TORCH = having(Draws, draws="torch"), having(Recurrent, make_dice=staticmethod(nothing))
OF_EACH_RANK = having(
    Recurrent, make_dice=staticmethod(lambda: torch.Generator().manual_seed(5 + torch.distributed.get_rank()))
)
FORGETS = having(Again, preserve=False)  # the second forward does not begin in the first one's random state
DRAWN = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp": 2, "zero3+recompute": 2}
BY_TRIAL = {
    "policies": {"ddp": 2},
    "checked": ("ddp",),
    "steps": 3,
}
PROMISE = ("torch's own noise or dropout in a loss",)
UNLIKE = "the networks are not the same on all ranks: rank 0 has 'heads.{}.weight' [6, 6] where rank 1 has 'heads.{}"
ALONE = "would not train as one device does"

DRAWS = {
    "draws": Scene(
        Draws, policies=DRAWN, often=("ddp",), four=("ddp",), checked=("ddp", "zero3"), promises=PROMISE,
        saved=("ddp",),
        mutants=(Mutant("by torch's generator", "ddp", BY_TORCH),),
        refused=(
            Refused(OF_EACH_RANK, "ddp", (ALONE, "seed the generator alike on all ranks")),
            Refused(BothWays, "ddp", (ALONE, "or all side by side")),
            Refused(PacksInParts, "single", "has micro-batches, and draws [1, 4] (normal_). In micro-batches a draw"),
            Refused(WithoutSeed, "ddp", (ALONE, "has given two losses"), unsaid="mean over samples"),
            Refused(Unordered, "zero3", UNLIKE.format("night", "day")),
            Refused(Unlisted, "ddp", "the networks are not the same on all ranks: rank 0 has 'generator."),
            Refused(InALoop, "single ddp", "draws [4] (normal_) for each sample, in a loop"),
            Refused(
                having(InALoop, micro_batches=1), "ddp",
                (ALONE, "draws [4] (normal_) for each sample, in a loop: draw for all at once"), unsaid="begins",
            ),
        ),
    ),
    "draws in micro-batches": Scene(
        having(Draws, micro_batches=2), alone=Draws, policies={"single": 1, "ddp": 2}, often=("ddp",),
        checked=("ddp",), steps=3,
        mutants=(Mutant("by torch", game=BY_TORCH),)
    ),
    "draws_until_accepted": Scene(
        having(Truncated, micro_batches=2), alone=Truncated, policies={"single": 1, "ddp": 2}, often=("ddp",),
        checked=("single", "ddp"), steps=6,
        refused=(
            Refused(ByLoop, "ddp", ("of step 2: ranks 0 and 1 draw", "a fixed number of times"), slow=True),
            Refused(ByMask, "ddp", ("of step 2: ranks 0 and 1 draw", "a fixed number of times")),
            Refused(Angles, "ddp", "VonMises draws until all samples of a batch are accepted"),
        ),
    ),
    "draws that may be of samples": Scene(Ambiguous, **BY_TRIAL),
    "samples in the second dimension": Scene(Recurrent, **BY_TRIAL),
    "samples in the second dimension, in micro-batches": Scene(
        having(OF_TORCH, micro_batches=2), alone=OF_TORCH, policies={"single": 1, "ddp": 2}, often=(),
        checked=("single", "ddp"), steps=3,
    ),
    "samples side by side": Scene(SideBySide, **BY_TRIAL, often=()),
    "side_by_side_in_fours": Scene(InFours, policies={"ddp": 2}, checked=("ddp",), steps=3),
    "side_by_side_in_one_phase": Scene(SideBySideInOne, policies={"ddp": 2}, checked=("ddp",), steps=3),
    "later_side_by_side": Scene(JoinsSideBySide, **BY_TRIAL),
    "lazy_draws": Scene(
        Lazily, policies={"ddp": 2}, checked=("ddp",), steps=10, saved=("ddp",)
    ),
    "varying_draws": Scene(
        Frames, **{**BY_TRIAL, "steps": 10, "mutants": (Mutant("without a trial", "ddp"),)},
        refused=(Refused(LateFrames, "ddp", "step 2 drew other numbers than one device, where the game drew"),),
    ),
    "seeded_by_hand": Scene(
        Seeded, alone=SeededByGenerator, policies={"single": 1, "ddp": 2, "zero3+recompute": 2},
        often=("single",), checked=("ddp",),
        mutants=(Mutant("unseeded", game=having(Seeded, seed=staticmethod(nothing))),),
    ),
    "draws_by_NumPy_and_Python": Scene(
        Unlike, policies={"ddp": 2}, checked=("ddp",), steps=3,
    ),
    "draws of a forward that runs again": Scene(
        Again, alone=Draws, policies={"single": 1, "ddp": 2}, often=("ddp",), checked=("ddp",), steps=3,
        mutants=(Mutant("it forgets", game=FORGETS),)
    ),
    "draws of a reentrant forward": Scene(
        having(Again, reentrant=True), alone=Draws, policies={"single": 1, "zero3": 2, "fsdp": 2}, often=(),
        refused=(Refused(having(Again, reentrant=True), "ddp", ("use_reentrant=False", "type zero2 for its player")),),
    ),
    "draws of a compiled network": Scene(Compiled, policies={"ddp+compile": 2}, often=(), checked=("ddp+compile",)),
    "draws of a network compiled by its author": Scene(ByAuthor, alone=Compiled, policies={"single": 1}, often=()),
    "gan.noise": Scene(AllDraws, policies={**DRAWN, "fsdp+recompute": 2}, often=("ddp",)),
}  # fmt: skip
