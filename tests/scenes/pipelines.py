"""Players in stages: they train as one device does, whatever happens between two stages."""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from gan import Phase, Player, noise, ranks
from tests.support.hard_games import BatchNorms, Micro4, Plain, mlp
from tests.support.scene import POLICIES, Mutant, Refused, Scene, having, made_of
from tests.support.staged_games import Staged, Tower

# ---- games ----


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.generator[0].weight.register_hook(partial(torch.mul, other=0.1))


def hooked(game, hook):
    """A game with a hook that sees each sum of gradients of the generator's weights, after each micro-batch."""

    def make(self):
        game.__init__(self)
        for weight in self.generator.parameters():
            weight.register_post_accumulate_grad_hook(hook)

    return having(game, __init__=make)


def clamped(weight):
    weight.grad.clamp_(-1e-3, 1e-3)


def masked(weight):
    weight.grad.mul_(weight.detach() > 0)


ClampsGradients, Masked = hooked(Plain, clamped), hooked(Micro4, masked)


class SharesWithFrozen(Plain):
    """Two phases share what the discriminator said of a fake. It is frozen in the one that differentiates that."""

    def shown(self, real):
        fake = self.fake(real)
        return fake, self.discriminator(fake)

    def judge(self, batch):
        fake, _ = self.shared("shown", self.shown, batch["x"])
        return super().judge(batch) | {"again": self.discriminator(fake.detach()).square().mean()}

    def fool(self, batch):
        _, said = self.shared("shown", self.shown, batch["x"])
        return (1 - said).square().mean()

    def configure_phases(self):
        yield Phase("fool", self.fool, "generator")
        yield Phase("judge", self.judge, "discriminator")


class LooksBetween(Plain):
    """Two phases share a fake, and between them all weights are gathered to be read."""

    def fake(self, real):
        return self.shared("fake", super().fake, real)

    def configure_phases(self):
        judge, fool = super().configure_phases()
        return judge, replace(fool, when=self.ask)

    def ask(self):
        with self.trainer.strategy.gathered():
            return bool(self.generator(self.generator[0].weight[:2]).isfinite().all())


def one_pixel() -> nn.Module:
    """With a batch norm that refuses a single sample."""
    norm = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Tanh()
    return nn.Sequential(nn.Unflatten(1, (4, 1, 1)), *norm, nn.Flatten(), nn.Linear(8, 6))


class Rescales(nn.Linear):
    """Each forward writes a weight past autograd, as published spectral norms do."""

    def __init__(self, *sides: int) -> None:
        super().__init__(*sides)
        self.scale = nn.Parameter(torch.ones(sides[1]), requires_grad=False)

    def forward(self, x):
        self.scale.data.mul_(0.9)
        return super().forward(x) * self.scale


Rescaling = made_of(Plain, generator=lambda: nn.Sequential(Rescales(4, 8), nn.Tanh(), Rescales(8, 6)))


class Hooked(Plain):
    """Features of a frozen network that forward hooks collect."""

    def __init__(self) -> None:
        super().__init__()
        self.judge_of_features, self.features = mlp(6, 5).requires_grad_(False), []
        for layer in self.judge_of_features:
            layer.register_forward_hook(lambda *called: self.features.append(called[-1]))

    def configure_players(self):
        yield from super().configure_players()
        yield Player("features", self.judge_of_features)

    def seen(self, x):
        self.features.clear()
        self.judge_of_features(x)
        return list(self.features)

    def fool(self, batch):
        pairs = zip(self.seen(self.fake(batch["x"])), self.seen(batch["x"]), strict=True)
        return super().fool(batch) + sum((one - other.detach()).square().mean() for one, other in pairs)


class Scripted(Plain):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch calls it deprecated
            self.generator[0] = torch.jit.script(self.generator[0])


class Halves(nn.Module):
    """Two encoders that end in one layer, as UNIT's."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 6)
        self.one, self.other = (nn.ModuleDict({"own": nn.Linear(4, 8), "shared": shared}) for _ in range(2))

    def forward(self, z, codes):
        return self.one["shared"](self.one["own"](z).tanh()) + self.other["shared"](self.other["own"](z).tanh())


def on_meta() -> nn.Module:
    """Without values, which set-up makes."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 6))


class Painting(Plain):
    """A generator of another network."""

    def __init__(self, network: Callable[[], nn.Module] = Tower):
        super().__init__()
        self.generator = network()

    def fake(self, real):
        codes = real[:, :3].detach()
        found = self.generator(noise.randn((len(real), 4), like=real), codes)
        return found[0] if isinstance(found, tuple) else found


class Chained(nn.Module):
    """Two layers, and something between them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, z, codes):
        return self.two(self.between(self.one(z)))

    def between(self, x):
        return x


def chained(**members) -> Callable[[], Plain]:
    return partial(Painting, having(Chained, **members))


class Mixing(Chained):
    """Draws for all samples together between two stages, as StyleGAN2 mixes styles from a drawn place on."""

    def __init__(self):
        super().__init__()
        random.seed(0)
        np.random.seed(0)

    def between(self, x):
        place = random.randint(1, 7)
        return torch.cat([x[:, place:], x[:, :place]], 1) * np.random.rand()


class Moves(Chained):
    """Moves weights and samples to the device where they are, as code of many published networks does."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 8))

    def between(self, x):
        x = x.to(self.place.device) + self.place.to(x.device) * self.place.cpu()
        return x.to("cpu", torch.float64).float().to(x.device, x.dtype)


class Scales(nn.Linear):
    """Its network leaves a scale in its attribute, as MUNIT's decoder does in its norms."""

    def forward(self, x):
        return super().forward(x) * self.scale


class Styled(Chained):
    def __init__(self):
        super().__init__()
        self.two = Scales(8, 6)

    def between(self, x):
        self.two.scale = x.mean(1, keepdim=True)
        return x.tanh()


class InGroups(Chained):
    """As StyleGAN2's discriminator: deviations over groups, which a few samples do not fill."""

    def between(self, x):
        return x + x.view(8, -1, 8).std(0).repeat(8, 1)


class Grouped(Painting):
    """Each rank gives the network the samples of all."""

    def __init__(self):
        super().__init__(InGroups)

    def fake(self, real):
        everyone, own = ranks.gather(noise.randn((len(real), 4), like=real), own=True)
        return self.generator(everyone, everyone)[own]


class Codebook(nn.Module):
    """Has no weights, and learns from all samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean.lerp_(ranks.mean(x.detach().mean(0)), 0.1)
        return x - self.mean


class PastRanks(Chained):
    """A sum over ranks past gan.ranks, as in libraries."""

    def between(self, x):
        dist.all_reduce(total := x.detach().sum(0))
        return x - total


class NamesCodebook(Painting):
    def __init__(self):
        super().__init__(having(made_of(Chained, codebook=Codebook), between=lambda self, x: self.codebook(x)))

    def configure_players(self):
        generator, discriminator = super().configure_players()
        yield replace(generator, blocks=["one", "codebook", "two"])
        yield discriminator


class Keeping(nn.Linear):
    """A last layer that keeps its mean size in a tensor and its last two sizes in a tuple, and scales by them."""

    mean, sizes = torch.ones(()), (1.0,)

    def forward(self, x):
        found = super().forward(x) * self.mean * sum(self.sizes)
        size = ranks.mean(found.detach().square().mean())
        self.mean, self.sizes = 0.9 * self.mean + 0.1 * size, (*self.sizes[-1:], float(size))
        return found


class KeepingInPlace(Keeping):
    """The same, with a list that grows."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.log = []

    def forward(self, x):
        self.log.append(len(x))
        return super().forward(x)


class KeepingLoss(Keeping):
    """A layer that leaves an auxiliary loss, which its game adds to the generator's."""

    def forward(self, x):
        self.aux = self.weight.square().mean()
        return super().forward(x)


class Keeps(Painting):
    def __init__(self, first=nn.Linear, last=Keeping):
        super().__init__(Chained)
        self.generator.one, self.generator.two = first(4, 8), last(8, 6)


class LearnsFromIt(Keeps):
    """One layer on each rank, so that each has a part of the loss that it refuses."""

    def __init__(self):
        super().__init__(KeepingLoss, KeepingLoss)

    def fool(self, batch):
        return super().fool(batch) + sum(getattr(each, "aux", 0.0) for each in self.generator.children())


class Tabled(Chained):
    def forward(self, z, table):
        return self.two(torch.tanh(self.one(z)) + table[:7].mean())


class WithTable(Painting):
    """A table that is the same for all samples."""

    rows = 8  # as many as a rank has samples

    def __init__(self):
        super().__init__(Tabled)

    def fake(self, real):
        table = torch.arange(self.rows, dtype=real.dtype).view(-1, 1)
        return self.generator(noise.randn((len(real), 4), like=real), table)


class Remade(nn.Sequential):
    """Layers whose author computes them again in backward: a batch norm moves its statistics twice."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def remade(game: Any, made: Callable[[nn.Sequential], nn.Module]) -> Any:
    """A game whose generator is made of its own layers."""
    return made_of(game, generator=lambda: made(game().generator))


RemadeNorms = remade(BatchNorms, lambda layers: nn.Sequential(Remade(*layers[:3]), layers[3]))


class Heads(nn.Module):
    """Two heads of one body, the first behind a layer of its own, and a way that no gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 8)
        self.first, self.second = Stopped(8, 6), nn.Linear(8, 6)

    def forward(self, z):
        x = self.body(z)
        return self.first(self.inner(x), x), self.second(x)


class Stopped(nn.Linear):
    """Once the step says so, its second input does not learn through it."""

    after = -1
    step = 0

    def forward(self, x, skip):
        return super().forward(x + (skip.detach() if self.step > self.after else skip))


class HeadsInTurn(Plain):
    """A loss that makes use of one output of the generator, and in the next step of the other one.

    What has no gradient on one device keeps its weights; zeros would move them, by momentum and weight decay.
    """

    def __init__(self, after: int = -1) -> None:
        super().__init__()
        self.generator = Heads()
        self.generator.first.after = after

    def configure_players(self):
        yield Player("generator", self.generator, partial(AdamW, lr=1e-2, weight_decay=0.1))
        yield Player("discriminator", self.discriminator, partial(AdamW, lr=1e-2))

    def fake(self, real):
        self.generator.first.step = self.step
        return self.generator(noise.randn((len(real), 4), like=real))[self.step % 2]


class Magnitude(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x.abs() * self.scale


class Spectrum(Chained):
    """Complex numbers between stages and returned, and samples of 16-bit sound."""

    def __init__(self):
        super().__init__()
        self.two = nn.Sequential(Magnitude(), nn.Linear(8, 6))

    def forward(self, z, sound):
        x = self.one(z) * sound
        wave = self.two((x + 1j * x.roll(1, 1)).conj())
        return torch.complex(wave, wave.roll(1, 1)), (8 * wave).to(torch.int16)


class Sounding(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.generator = Spectrum()

    def fake(self, real):
        spectrum, samples = self.generator(noise.randn((len(real), 4), like=real), (8 * real[:, :1]).to(torch.int16))
        return spectrum.abs() + samples


class OfSomeSamples(HeadsInTurn):
    """A call of which the loss of a rank makes use if that has such samples. A third call is of no use on any rank."""

    def fool(self, batch):
        real = batch["x"]
        few, found, _ = real[:, 0] > 1, self.fake(real), self.fake(real)
        loss = super().fool(batch)
        return loss + found[few].square().sum() / len(real) if few.any() else loss


class Annealed(nn.Linear):
    """Writes a buffer, and detaches, from some step on, when a flag says so; or writes by its own count of calls."""

    warm, counts, calls = False, False, 0

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("heat", torch.ones(()))

    def forward(self, x):
        self.calls = self.calls + 1
        if self.warm or (self.counts and self.calls > 4):
            self.heat.mul_(0.9)
        return super().forward(x.detach() if self.warm else x) / self.heat.clone()


class Anneals(Plain):
    counts = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(Annealed(4, 8), nn.Tanh(), Annealed(8, 8), nn.Tanh(), nn.Linear(8, 6))

    def fake(self, real):
        for layer in (self.generator[0], self.generator[2]):
            layer.counts, layer.warm = self.counts, self.step > 0 and not self.counts
        return super().fake(real)


class HalfInParts(Plain):
    """Looks at every second sample of a micro-batch: in a trial of two samples there is none."""

    micro_batches = 2

    def fake(self, real):
        return self.generator(real[1::2, :4])


class Fading(nn.Linear):
    """Sees a code from some step on."""

    on = False

    def forward(self, z, code):
        return super().forward(torch.cat([z, code if self.on else torch.zeros_like(code)], 1))


class Coded(nn.Module):
    """A head behind the code, and one that never sees that. A block writes into what comes from another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.coarse = Fading(7, 8), nn.Linear(4, 6)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 6))

    def forward(self, z, code):
        return self.second(self.first(z, code)), self.coarse(z)


class FadesIn(Plain):
    """An encoder that has no gradient on one device, as long as no loss makes use of its code."""

    def __init__(self, generator: Callable[[], nn.Module] = Coded) -> None:
        super().__init__()
        self.encoder, self.generator = mlp(6, 3), generator()

    def configure_players(self):
        for name in ("encoder", "generator", "discriminator"):
            yield Player(name, getattr(self, name), partial(AdamW, lr=1e-2, weight_decay=0.1))

    def configure_phases(self):
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, ("encoder", "generator"))

    def fake(self, real):
        if isinstance(self.generator, Coded):
            self.generator.first.on = self.step > 0
        return self.generator(noise.randn((len(real), 4), like=real), self.encoder(real))[self.step % 3 == 2]


@dataclass
class Features:
    x: torch.Tensor


class ReturnsFeatures(nn.Linear):
    def forward(self, z):
        return Features(super().forward(z))


class Featured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ReturnsFeatures(4, 8), nn.Linear(8, 6)

    def forward(self, z, code):
        return (self.second(self.first(z).x),) * 2


class Overwrites(nn.Linear):
    def forward(self, x):
        return super().forward(x.relu_())


class OverwritesInput(nn.Sequential):
    def forward(self, z, code):
        return (super().forward(z),) * 2


class Skips(nn.Module):
    """A third stage sees what the second has written into, and the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), Overwrites(8, 8)
        self.third, self.fourth = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, z, code):
        x = self.first(z)
        return (self.fourth(self.third(self.second(x) + x) + x),) * 2


def remade_fake(game, real):
    return checkpoint(partial(Plain.fake, game), real, use_reentrant=False)


class EachRemade(nn.Sequential):
    reentrant = False

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


Reentrant = having(EachRemade, reentrant=True)
JUDGED_TWICE = made_of(Plain, discriminator=lambda: nn.Sequential(nn.Linear(6, 6), Reentrant(nn.Linear(6, 1))))


# ---- the table ----


def one(game, options: str = "", checked: bool = True, **more) -> Scene:
    """A generator in stages on two ranks; `make matrix` tries the first step."""
    policy, tried = (f"generator=pipeline{options},*={other}" for other in ("ddp", "zero2"))
    also = (tried,) * checked
    how = {"policies": dict.fromkeys((policy, *also), 2), "often": (policy,), "checked": also}
    return Scene(game, steps=3, **how | more)


PIPED = "generator=pipeline,*=ddp"
STAGES, DDP = "encoder=ddp,*=pipeline", "encoder=ddp,discriminator=ddp,*=pipeline"
BY_TWO, OFTEN = f"{STAGES}+stages:2", "encoder=ddp,discriminator=zero3,*=pipeline+schedule:interleaved"
FORTH_AND_BACK = "+stages:2+chunks:2+schedule:1f1b"
CUT = "'1' looks at the whole batch, so a pipeline cannot cut it into 2 chunks"
WHOLE, TWO_CHUNKS = "generator=pipeline+chunks:1,*=ddp", "generator=pipeline+chunks:2,*=ddp"

CallsLayers = having(Plain, fake=lambda self, real: self.generator[2](self.generator[0](real[:, :4]).tanh()))
CENTRING = chained(between=lambda _, x: x - x.mean(0))  # looks at the batch in plain torch

# Skips over stages, codes that reach all of them, noise, spectral norms, a second call through the first.
PIPELINES = {
    "stages": Scene(
        Staged, often=(), checked=(STAGES, BY_TWO, f"{DDP}+stages:2+schedule:1f1b"), steps=3,
        policies={
            STAGES: 2, f"{STAGES}+chunks:1": 2, f"{STAGES}+chunks:4": 2, f"{STAGES}+chunks:2+recompute": 2, OFTEN: 2,
            f"{DDP}+schedule:interleaved+stages:6+chunks:4": 2, f"{STAGES}+schedule:1f1b": 2, BY_TWO: 4,
            "encoder=zero2,discriminator=zero1,*=pipeline+stages:4": 4, f"{DDP}+schedule:interleaved+stages:4": 4,
            f"{DDP}+stages:2+schedule:1f1b": 4, f"{BY_TWO}+chunks:1": 4,
        },
        saved=(STAGES,), arrives=(("zero3", 2), (BY_TWO, 4), ("fsdp", 2), ("ddp", 2)), travels_often=False,
    ),
    "a half of each micro-batch": one(HalfInParts, often=("generator=pipeline,*=zero2",)),
    "a buffer that is written from a step on": one(
        Anneals, saved=(PIPED,),
        refused=(
            Refused(
                having(Anneals, counts=True), PIPED, "its forward writes the buffer '0.heat'",
                check=False,
            ),
        ),
    ),
    "micro-batches and chunks, forth and back": one(
        Micro4, FORTH_AND_BACK, checked=False, four=(f"generator=pipeline{FORTH_AND_BACK},*=ddp",)
    ),
    "hooks_after_gradients": Scene(
        Masked, policies={**POLICIES, "dp": 2, "pipeline": 2, PIPED: 2},
        often=("zero3",),
        refused=(
            Refused(Masked, f"pipeline{FORTH_AND_BACK}", "schedule:1f1b adds up later; leave +schedule:1f1b out"),
            Refused(
                ClampsGradients, PIPED,
                ("player 'generator': the gradients of", "belongs into on_before_optimizer_step"),
                settings={"max_steps": 1},
            ),
        ),
    ),
    "stages_and_shared": Scene(
        SharesWithFrozen, policies={"zero3": 2, "pipeline": 2, "discriminator=pipeline,*=ddp": 2},
        often=(),
    ),
    "shared_and_read_between": Scene(
        LooksBetween, policies={"zero3": 2, PIPED: 2}, often=(PIPED,),
    ),
    "heads_in_turn": Scene(
        HeadsInTurn, policies={**POLICIES, "pipeline": 2, f"generator=pipeline{FORTH_AND_BACK},*=ddp": 2},
        often=("pipeline",), steps=3,
        refused=(
            Refused(partial(HeadsInTurn, 1), PIPED, "learns in some calls only through", check=False),
        ),
    ),
    "dtypes_in_stages": one(Sounding, checked=False),
    "calls that some ranks do not use": Scene(
        OfSomeSamples, policies={**POLICIES, "pipeline": 2, f"generator=pipeline{FORTH_AND_BACK},*=ddp": 2},
        often=("pipeline",), checked=(f"generator=pipeline{FORTH_AND_BACK},*=ddp",), steps=2,
    ),
    "inputs_used_later": Scene(
        FadesIn, policies={**POLICIES, "pipeline": 2, "encoder=zero3,*=pipeline": 2, "encoder=zero2,*=pipeline": 2},
        often=("pipeline", "encoder=zero3,*=pipeline"), steps=3,
        refused=(
            Refused(partial(FadesIn, Featured), PIPED, "'first' returns a Features, which"),
            Refused(
                partial(FadesIn, Skips), "generator=pipeline+schedule:interleaved,*=ddp",
                "'second' changes in place what another stage uses after it",
            ),
            *(
                Refused(partial(FadesIn, partial(OverwritesInput, *layers)), PIPED, "changes in place what it gets")
                for layers in (
                    (Overwrites(4, 8), nn.Linear(8, 6)), (nn.ReLU(inplace=True), nn.Linear(4, 8), nn.Linear(8, 6)),
                )
            ),
        ),
    ),
    "stages that are made later": one(made_of(Plain, generator=on_meta), checked=False),
    "a_weight_that_a_forward_writes": one(
        Rescaling, "+chunks:1",
        refused=(
            Refused(Rescaling, TWO_CHUNKS, "its forward writes its own weights, which a pipeline would do once"),
        ),
    ),
    "stages that look at the whole batch": one(
        BatchNorms, checked=False, refused=(Refused(BatchNorms, TWO_CHUNKS, CUT),)
    ),
    "norms_in_checkpoints": Scene(
        RemadeNorms, policies=POLICIES, often=("ddp",),
        refused=(
            Refused(RemadeNorms, PIPED, "backward writes buffer '0.1.running_mean'"),
            Refused(JUDGED_TWICE, "zero2", ("use_reentrant=False", "reversible blocks call the network once")),
            *(
                Refused(game, PIPED, ("checkpoint around " + what, "generator=pipeline+recompute"))
                for game, what in (
                    (having(Plain, fake=remade_fake), "its network"),
                    (remade(Plain, lambda layers: EachRemade(*layers)), "'0'"),
                    (remade(Plain, lambda layers: Reentrant(*layers)), "'0'"),
                )
            ),
        ),
    ),
    "stages with a batch norm of one pixel": one(made_of(Plain, generator=one_pixel), often=()),
    "dice_between_stages": one(partial(Painting, Mixing), "+chunks:4"),
    "moves_between_stages": one(partial(Painting, Moves)),
    "groups_to_fill": one(Grouped, "+chunks:2", often=("generator=pipeline+chunks:2,*=zero2",)),
    "a mean between stages": one(
        CENTRING, "+chunks:1", checked=False,
        refused=(
            Refused(CENTRING, PIPED, "2 ranks would not train as one device does"),
        ),
    ),
    "a collective past gan.ranks": Scene(
        partial(Painting, PastRanks), policies={}, often=(), mutants=(),
        refused=(
            Refused(
                partial(Painting, PastRanks), PIPED,
                "network calls torch.distributed (between in pipelines.py:",
            ),
        ),
    ),
    "a block without weights": one(NamesCodebook, "+chunks:1", often=()),
    "what a layer keeps in attributes": one(
        Keeps, "+chunks:1", checked=False, saved=(WHOLE,), arrives=(("ddp", 2),),
        refused=(
            Refused(
                partial(Keeps, last=KeepingInPlace), WHOLE,
                "changes the attribute 'log' of a KeepingInPlace in place",
            ),
            Refused(LearnsFromIt, WHOLE, ("a loss learns from what '", "leaves in its attribute 'aux'"), check=False),
        ),
    ),
    "a weight whose gradient is scaled": Scene(
        Scaled, policies={"zero3": 2}, often=(), mutants=(Mutant("without the hook", "zero3", game=Plain),),
        refused=(Refused(Scaled, PIPED, "weight '0.weight' has a hook that changes"),),
    ),
    "features by hooks": Scene(
        Hooked, policies={"zero3": 2}, often=(), mutants=(Mutant("without features", "zero3", game=Plain),),
        refused=(Refused(Hooked, "features=pipeline,*=ddp", "its loss has no value on this rank, because it uses"),),
    ),
    "a scripted layer": Scene(
        Scripted, policies={"ddp": 2, "zero1": 2, "zero2": 2}, often=(),
        refused=(
            Refused(Scripted, "zero3 fsdp pipeline", ("torch.jit.script", "type --strategy generator=zero2,*=")),
            Refused(Scripted, "generator=ddp+recompute,*=ddp", "recompute cannot run again what torch.jit.script"),
        ),
    ),
    "a scale in an attribute": Scene(
        partial(Painting, Styled), policies={"zero3": 2}, often=(),
        refused=(
            Refused(
                partial(Painting, Styled), PIPED,
                "'two' has in its attribute 'scale' what a block of another stage has computed",
            ),
        ),
    ),
    "a layer of two parts": Scene(
        partial(Painting, Halves), policies={"zero3": 2}, often=(),
        refused=(Refused(partial(Painting, Halves), PIPED, "is in 'one.shared' and in 'other."),),
    ),
    "a layer that a loss calls": Scene(
        CallsLayers, policies={"zero3": 2}, often=(),
        refused=(Refused(CallsLayers, PIPED, "' is called by itself, not by the forward"),),
    ),
    "a table for all samples": one(WithTable, often=()),
}  # fmt: skip
