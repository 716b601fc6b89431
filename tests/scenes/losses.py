"""Losses and networks that look at more than one sample, or take derivatives of their own."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from lightning import Callback
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.functional import batch_norm, cross_entropy, normalize, softplus
from torch.optim import Adam

from gan import GanModule, Phase, Player, noise, ranks
from nets.norm import in_groups
from nets.stylegan_layers import MinibatchDeviation
from tests.support.hard_games import BatchNorms, Plain, mlp
from tests.support.parity import BATCH, vectors
from tests.support.scene import POLICIES, RARELY_DEAF, SMALL, Mutant, Refused, Scene, having, made_of
from tests.support.sharing_games import Adapters, FollowingAdapters, OneModule, SharedBase, by_hand

# ---- batches with lists ----


def with_lists(step: int) -> dict[str, Any]:
    """A tensor of another length for each sample, as boxes or texts are."""
    return {**vectors(step), "lengths": [torch.ones(1 + number % 3) for number in range(BATCH)]}


class ByMean(Plain):
    """A loss that is no mean over samples."""

    def judge(self, batch):
        real, fake = self.discriminator(batch["x"]), self.discriminator(self.fake(batch["x"]).detach())
        return softplus(fake.mean() - real).mean()


class InParts(Plain):
    """As DCGAN's published loop, which calls backward for real and fake pictures in turn."""

    def judge(self, batch):
        losses = super().judge(batch)
        losses["real"].backward()
        return losses["fake"]


# ---- gan.ranks ----


class Codes(nn.Module):
    """The nearest of four codes, which follow their inputs by a moving average (van den Oord et al. 2017)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 6))
        self.register_buffer("sizes", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            nearest = nn.functional.one_hot(torch.cdist(x, self.codes).argmin(1), 4)
            self.sizes.lerp_(ranks.sum(nearest.sum(0)).to(x), 0.1)
            self.codes.lerp_(ranks.sum(nearest.to(x).T @ x) / self.sizes.clamp_min(0.1)[:, None], 0.1)
            code = nearest.to(x) @ self.codes
        return x + (code - x).detach()


class Context(nn.Module):
    """It asks whether its context is what it looks at itself, as attention does."""

    def __init__(self, inside, outside):
        super().__init__()
        self.own, self.out = nn.Linear(inside, outside), nn.Linear(outside, outside)

    def forward(self, x, context):
        return self.out(torch.tanh((1 if context is x else 3) * self.own(x)))


class OfItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Context(4, 6), Context(6, 6)

    def forward(self, z, context):
        h = self.first(z, context)
        return self.second(h, h)


class GivenTwice(made_of(Plain, generator=OfItself)):
    def fake(self, real):
        z = noise.randn((len(real), 4), like=real)
        return self.generator(z, z)


@dataclass
class Passed:
    """What the layers of a network pass on in an object."""

    sides: Tensor
    count: int = 0


class Down(nn.Module):
    """It puts a skip into the list that it is given, and another one into an object."""

    def __init__(self):
        super().__init__()
        self.line, self.side = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls = Passed(torch.zeros(()))

    def forward(self, x, skips, passed):
        skips.append(self.side(x))
        passed.sides, passed.count = self.side(passed.sides), passed.count + 1
        self.calls.count += 1
        return torch.tanh(self.line(x) / passed.count * self.calls.count)


class Up(Down):
    def forward(self, x, skips):
        return self.line(x) + self.side(torch.tanh(skips.pop()))


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.first, self.second, self.last, self.end = nn.Linear(4, 6), Down(), Down(), Up(), Up()

    def forward(self, z):
        x, skips = self.start(z), []
        passed = Passed(x)
        x = self.second(self.first(x, skips, passed), skips, passed)
        return self.end(self.last(x, skips), skips) + passed.sides


class Contrast(Plain):
    """Losses that are no mean over samples, each written as for one device."""

    def __init__(self):
        super().__init__()
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), MinibatchDeviation(), nn.Linear(9, 3))
        self.codes = Codes()

    def configure_phases(self):
        micro = {"micro_batches": self.micro_batches}
        yield Phase("discriminator", self.judge, "discriminator", **micro)
        yield Phase("generator", self.fool, "generator", second_order=True, **micro)

    def judge(self, batch):
        real, fake = self.discriminator(self.codes(batch["x"])), self.discriminator(self.fake(batch["x"]).detach())
        # The relativistic average of Jolicoeur-Martineau 2018.
        real_mean, fake_mean = (ranks.mean(score.mean()) for score in (real, fake))
        return {
            "relative": (softplus(fake_mean - real) + softplus(fake - real_mean)).mean(),
            "root": ranks.mean(real.square().mean()).sqrt(),
        }

    def fool(self, batch):
        fake = self.fake(batch["x"])
        ours, theirs = normalize(self.discriminator(fake)), normalize(self.discriminator(batch["x"]))
        # InfoNCE of van den Oord et al. 2018.
        keys, own = ranks.gather(theirs, own=True)
        contrast = cross_entropy(ours @ keys.T / 0.5, torch.arange(len(keys), device=keys.device)[own])
        error = (fake - batch["x"]).square().mean()
        # The adaptive weight of VQGAN, Esser et al. 2021: a ratio of the norms of gradients.
        last = self.generator[-1].weight
        sizes = [ranks.mean(torch.autograd.grad(each, last, retain_graph=True)[0]).norm() for each in (error, contrast)]
        return {"error": error, "contrast": (sizes[0] / sizes[1]).detach() * contrast}


class ContrastInTwo(Contrast):
    micro_batches = 2


class Grids(BatchNorms):
    """Draws in the middle of the training, as published loops do: in training mode each such picture is counted."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero or not self.first:
            self.generator.train(self.in_training)
            with ranks.alone() if self.alone else nullcontext():
                self.generator(torch.linspace(0, 1, 36, dtype=torch.float64).view(9, 4))
            self.generator.train()

    in_training, first, alone = False, True, False  # `first`: the first rank alone draws


class Rescales(Plain):
    """Draws a new number between steps, of which a loss makes use."""

    scale = 1.0

    def on_train_batch_start(self, *_: Any) -> None:
        if self.step % 3 == 1:
            self.scale = 0.5 + torch.rand((), dtype=torch.float64)

    def on_train_batch_end(self, *_: Any) -> None:
        self.scale = self.scale + 0.1 * torch.rand((), dtype=torch.float64)

    def on_after_backward(self) -> None:
        self.scale = self.scale + 0.1 * torch.rand((), dtype=torch.float64)

    def judge(self, batch):
        return {name: self.scale * loss for name, loss in super().judge(batch).items()}


class Rescaled(Callback):
    def on_train_batch_end(self, trainer: Any, game: Any, *_: Any) -> None:
        game.scale = game.scale + 0.1 * torch.rand((), dtype=torch.float64)


class MicroBatchNorms(BatchNorms):
    """The noise of a micro-batch, its batch norm and its loss are those of one set of samples."""

    micro_batches = 2

    def fool(self, batch):
        fake = self.fake(batch["x"])
        alike = ranks.gather(fake) @ ranks.gather(batch["x"]).T
        return super().fool(batch) + cross_entropy(alike, torch.arange(len(alike), device=alike.device))


class Expert(nn.Module):
    """Some samples reach the last layer, on some ranks none does. A weight of it has a hook, as torch calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.expert, self.score = nn.Linear(8, 8), nn.Linear(8, 1)
        self.expert.weight.register_hook(partial(torch.mul, other=0.5))

    def forward(self, x):
        found = self.blocks(self.first(x))
        (rows,) = (x[:, 0] > 1.6).nonzero(as_tuple=True)
        if len(rows):
            found = found.index_put((rows,), self.expert(found[rows]))
        return self.score(found)


class Prompted(nn.Module):
    """Its prompt has no tokens: a weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.prompt = mlp(6, 1), nn.Parameter(torch.zeros(0, 1))

    def forward(self, x):
        return self.score(x) + self.prompt.sum(0)


# ---- batch norms of an author's own ----


class Gained(nn.BatchNorm1d):
    def forward(self, x):
        return 3 * super().forward(x)


class Conditional(nn.BatchNorm1d):
    """BigGAN's: its gain and bias are arguments."""

    def forward(self, x, gain=None, bias=None):
        return super().forward(x) * (1 + gain) + bias


class Stored(nn.Module):
    """A module that calls torch's function itself, twice."""

    affine = False

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(channels))
        self.register_buffer("stored_var", torch.ones(channels))

    def forward(self, x):
        out = F.batch_norm(x, self.stored_mean, self.stored_var, None, None, self.training, 0.3, 1e-4)
        return out + F.batch_norm(x * x, self.stored_mean, self.stored_var, training=self.training)


class Ghost(nn.BatchNorm1d):
    """Statistics of every second sample."""

    def forward(self, x):
        given = [each.repeat(2) for each in (self.running_mean, self.running_var, self.weight, self.bias)]
        y = F.batch_norm(x.view(-1, 16), *given, self.training, self.momentum, self.eps).view_as(x)
        with torch.no_grad():
            for ours, both in zip((self.running_mean, self.running_var), given, strict=False):
                ours.copy_(both.view(2, 8).mean(0))
        return y


class AdaptiveInstanceNorm(nn.Module):
    """MUNIT's: samples are laid beside each other, as channels of one row."""

    def forward(self, x, gain):
        pixels, weight = x.view(1, -1, 4), gain.reshape(-1)
        return F.batch_norm(pixels, torch.zeros_like(weight), torch.ones_like(weight), weight, None, True).view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.gain, self.norm = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), Conditional(8, affine=False)
        self.stored, self.adaptive = Stored(8), AdaptiveInstanceNorm()

    def forward(self, x):
        gain = self.gain(x)
        x = self.stored(torch.tanh(self.norm(self.line(x), gain=gain, bias=x)))
        return self.adaptive(x, gain[:, :2])


class Own(Plain):
    def __init__(self):
        super().__init__()
        first = nn.Linear(4, 8, bias=False), Gained(8), nn.Tanh()
        self.generator = nn.Sequential(*first, Block(), nn.Linear(8, 6, bias=False))
        line = nn.Linear(6, 8, bias=False)
        self.discriminator = nn.Sequential(line, Gained(8, momentum=None), nn.Tanh(), Ghost(8), nn.Linear(8, 1))


class OwnWeights(Plain):
    """A loss with weights of its own, as where these are perturbed (AWP), for a batch norm of one sample a rank."""

    def __init__(self):
        super().__init__()
        pairs = nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3), nn.Flatten()
        self.discriminator = nn.Sequential(*pairs, nn.Linear(6, 1))

    def fool(self, batch):
        weights = {name: 1.1 * weight.detach() for name, weight in self.discriminator.named_parameters()}
        return softplus(-functional_call(self.discriminator, weights, (self.fake(batch["x"]),))).mean()


def ending(function):
    """Another layer at the generator's end."""
    last = having(nn.Identity, forward=lambda _, x: function(x))
    return made_of(Own, generator=lambda: Own().generator.append(last()))


# Statistics by torch.mean, as BigGAN's manual_bn; the function by another name, which is not replaced.
BY_OWN_HAND = (lambda x: x - x.mean(0)), (lambda x: batch_norm(x, None, None, training=True))


def torchs_own():
    return nn.SyncBatchNorm.convert_sync_batchnorm(BatchNorms())


class Grouped(Plain):
    micro_batches = 2

    def __init__(self, size=4):
        super().__init__()
        line = nn.Linear(4, 8, bias=False)
        norm = in_groups(nn.BatchNorm1d(8), size)
        self.generator = nn.Sequential(line, norm, nn.Tanh(), nn.Linear(8, 6))


# ---- batches ----


def described(step):
    """Vectors, a caption for each and a clip of a length of its own for each."""
    x = vectors(step)["x"]
    lengths = [1 + (3 * number + step) % 7 for number in range(BATCH)]
    clips = [row[:1].expand(length) for row, length in zip(x, lengths, strict=True)]
    return {"x": x, "captions": tuple("a" * length for length in lengths), "clips": clips}


class Described(Plain):
    """Each row is compared with its own caption and clip; a mean over samples, so micro-batches change nothing."""

    def judge(self, batch):
        score = self.discriminator(batch["x"])[:, 0]
        pairs = zip(score, batch["captions"], batch["clips"], strict=False)
        return torch.stack(
            [(score - 0.1 * len(caption) - clip.sum()).square() for score, caption, clip in pairs]
        ).mean()


class TwoLoaders(Plain):
    """Noise for the rows of both loaders."""

    def judge(self, batch):
        few = self.generator(noise.randn((len(batch["few"]), 4), like=batch["few"]))
        return {**super().judge(batch), "few": (self.discriminator(few.detach()) * batch["few"][:, :1]).mean()}

    def fool(self, batch):
        few = self.generator(noise.randn((len(batch["few"]), 4), like=batch["few"]))
        return super().fool(batch) + (few * batch["few"]).mean()


def two_loaders(step):
    return {**vectors(step), "few": vectors(step + 50)["x"][: BATCH // 2]}


def normed():
    """Instance norms that keep running statistics, as StarGAN's generator has them; weights that they do not cancel."""
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    first = nn.Linear(4, 20, bias=False), nn.Unflatten(1, (4, 5)), norm
    return nn.Sequential(*first, nn.Tanh(), nn.Flatten(), nn.Linear(20, 6))


InstanceNorms, Experts = made_of(Plain, generator=normed), made_of(Plain, discriminator=Expert)


class Inferred(Plain):
    """Fakes for the discriminator as published code makes them to save time."""

    def judge(self, batch):
        with torch.inference_mode():
            fake = self.fake(batch["x"])
        return {
            "x": softplus(self.discriminator(fake.clone())).mean() + softplus(-self.discriminator(batch["x"])).mean()
        }


def spectral():
    """As long as the rows of some trial are the computed weights, which spectral norm leaves in plain attributes."""
    widths = pairwise((6, 4, 2, 1))
    return nn.Sequential(*(nn.utils.spectral_norm(nn.Linear(*each)) for each in widths))


SpectralInParts = having(made_of(Plain, discriminator=spectral), micro_batches=2)


class KeepsInParts(Plain):
    """A phase begins with the fakes of the one before it, in micro-batches, and with their mean, which is added up."""

    micro_batches = 2

    def made(self, batch):
        return self.shared("fake", self.fake, batch["x"])

    def on_train_batch_start(self, *_):
        self.mean = 0.0

    def judge(self, batch):
        fake = self.made(batch).detach()
        self.mean = self.mean + ranks.mean(fake.mean(0)).sum().expand(1) / self.micro_batches
        return (softplus(self.discriminator(fake)) + softplus(-self.discriminator(batch["x"]))).mean()

    def fool(self, batch):
        return (softplus(-self.discriminator(self.made(batch))) * self.mean).mean()


def keeps_the_last_mean(self, batch):
    self.mean = 0.0
    return KeepsInParts.judge(self, batch)


class Writes(Plain):
    """A phase changes its batch, in place and by a key of its own, and a later phase reads that."""

    micro_batches = micro_batches_of_fool = 2

    def configure_phases(self):
        judge, fool = super().configure_phases()
        yield judge
        yield replace(fool, micro_batches=self.micro_batches_of_fool)

    def judge(self, batch):
        batch["x"] += batch["x"].flip(1)
        batch["fake"] = self.fake(batch["x"]).detach()
        return (softplus(self.discriminator(batch["fake"])) + softplus(-self.discriminator(batch["x"]))).mean()

    def fool(self, batch):
        near = (self.fake(batch["x"]) - batch["fake"].flip(1)).square().mean()
        return super().fool(batch) + near


class KeepsAnAttribute(KeepsInParts):
    def judge(self, batch):
        self.fakes = self.fake(batch["x"])
        return softplus(self.discriminator(self.fakes.detach())).mean()

    def fool(self, batch):
        return (self.discriminator(self.fakes.detach() + self.generator(batch["x"][:, :4]))).mean()


class KeepsInANetwork(KeepsInParts):
    def judge(self, batch):
        self.generator.kept = {"fakes": (self.fake(batch["x"]),)}
        return softplus(self.discriminator(self.generator.kept["fakes"][0].detach())).mean()

    def fool(self, batch):
        kept = self.generator.kept["fakes"][0].detach()
        return (self.discriminator(kept + self.generator(batch["x"][:, :4]))).mean()


class KeepsForTheNextStep(KeepsInParts):
    """A phase compares its fakes with those of the step before."""

    before = 0.0

    def fool(self, batch):
        fake = self.made(batch)
        last, self.before = self.before, fake.detach()
        return (softplus(-self.discriminator(fake)) + (fake - last).square().mean()).mean()


class FreeNoise(Plain):
    """Noise for the whole batch that a hook moves in backward, as in free adversarial training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("moved", torch.zeros(BATCH, 6))

    def judge(self, batch):
        _, own = ranks.gather(batch["x"], own=True)
        moved = self.moved[own].clone().requires_grad_()

        def move(slope):
            self.moved.add_(ranks.gather(slope).sign(), alpha=0.01)

        moved.register_hook(move)
        return super().judge({"x": batch["x"] + moved})


# ---- derivatives: forward mode and torch.func ----


class Derived(GanModule):
    """A network of several layers, a frozen teacher, and one loss, which each game below writes."""

    second_order = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(mlp(8, 8), nn.Tanh(), mlp(8, 6))
        self.teacher = mlp(8, 6)

    def configure_players(self) -> Iterator[Player]:
        yield Player("net", self.net, partial(Adam, lr=1e-2), ema=0.8)
        yield Player("teacher", self.teacher)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("net", self.loss, "net", second_order=self.second_order)

    def place(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """A point between a sample and noise, its two times, and the speed there."""
        x = batch["x"]
        far, times = noise.randn(x.shape, like=x), noise.rand((len(x), 2), like=x).sort(1).values
        r, t = times.split(1, 1)
        return (1 - t) * x + t * far, r, t, far - x


def joined(network: nn.Module, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
    return network(torch.cat([z, r, t], 1))


def along(network: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Its output, and the derivative of that along the path."""
    return jvp(partial(joined, network), (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))


class MeanFlow(Derived):
    """Geng et al. 2025: the mean speed between two times, by one derivative along the path."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        u, change = along(self.net, z, r, t, v)
        return (u - (v - (t - r) * change).detach()).square().mean()


class Duals(Derived):
    """The derivative by dual numbers, through which the gradient flows, and that of a frozen teacher."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        _, taught = along(self.teacher, z, r, t, v)
        with forward_ad.dual_level():
            made = joined(self.net, forward_ad.make_dual(z, v), r, forward_ad.make_dual(t, torch.ones_like(t)))
            u, change = forward_ad.unpack_dual(made)
        return (change - taught).square().mean() + u.square().mean()


class Slopes(Derived):
    """A gradient by torch.func.grad, in which the loss takes a gradient again."""

    second_order = True

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        slope = grad(lambda z: joined(self.net, z, r, t).square().sum())(z)
        each = vmap(grad(lambda z, r, t: self.net(torch.cat([z, r, t])).sum()))(z, r, t)
        return (slope - v).square().mean() + (each - slope).square().mean()


class SlopesOfWeights(Derived):
    """A gradient with respect to weights, by torch.func: each step learns from the network after a step of its own."""

    second_order = True

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        weights = dict(self.net.named_parameters())

        def size(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(self.net, weights, (torch.ones(1, 8, dtype=z.dtype),)).square().sum()

        slopes = grad(size)(weights)
        ahead = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
        return (functional_call(self.net, ahead, (torch.cat([z, r, t], 1),)) - v).square().mean()


DERIVED = {game.__name__: game for game in (MeanFlow, Duals, Slopes, SlopesOfWeights)}


class Still(Derived):
    """MeanFlow without its derivative."""

    def loss(self, batch):
        z, r, t, v = self.place(batch)
        return (joined(self.net, z, r, t) - v).square().mean()


class Handed(Derived):
    """What `shared` makes in a phase without places, and a later phase runs backward."""

    def configure_players(self):
        net, teacher = super().configure_players()
        yield net
        yield replace(net, name="teacher", module=teacher.module, ema=None)

    def configure_phases(self):
        yield Phase("teacher", self.loss, "teacher", second_order=True)
        yield Phase("net", lambda batch: self.shared("made", self.made, batch).square().mean(), "net")

    def made(self, batch):
        z, r, t, _ = self.place(batch)
        return joined(self.net, z, r, t)

    def loss(self, batch):
        z, r, t, _ = self.place(batch)
        made = self.shared("made", self.made, batch).detach()
        slope = grad(lambda z: joined(self.teacher, z, r, t).square().sum())(z)
        return (slope - made).square().mean()


class Kept(Derived):
    """The same by an attribute of one's own. No weight of this graph is updated before its backward needs it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 8)

    def configure_phases(self):
        yield Phase("first", self.first, "net", second_order=True)
        yield Phase("second", lambda batch: self.made.square().mean(), "net")

    def first(self, batch):
        self.made = self.teacher(self.net(batch["x"]))
        return self.net(batch["x"]).square().mean()


# ---- the table ----


WHOLE_BATCH = "a loss that is no mean over samples", "buffers that learn from the rank's samples"
BY_HAND = "2 ranks would not train as one device does", "a batch norm that is written by hand, or call F.batch_norm"
NORMS = {
    "policies": {**dict.fromkeys(("ddp", "zero3", "zero2", "ddp+recompute", "fsdp", "generator=pipeline,*=ddp"), 2)},
    "promises": ("a batch norm with a forward of its own",),
}
OF_GPUS = "player 'generator': torch's SyncBatchNorm needs GPUs; type Trainer(sync_batchnorm=True)"
LISTS = "micro-batches of lists and captions"
LOADERS = "noise for two loaders; Lightning's own sampler (a warning)"
AS_ONE = {"ddp": 2, "zero1": 4, "zero2": 2, "zero3": 2, "fsdp": 2}
RECOMPUTED = {"zero3+recompute": 2, "ddp+recompute": 2}
SHARED = {
    **{"ddp": 2, "zero1": 2, "zero2": 4, "zero3": 2, "deepspeed1": 2, "deepspeed3": 2},
    **{"student=zero3,*=ddp": 2, "student=ddp,*=zero3": 2, "teacher=zero3+offload,*=zero1": 4},
}
MIXED = ("student=ddp,*=zero3", 2), ("single", 1)


def derived(name: str) -> Scene:
    more = RECOMPUTED if name in ("MeanFlow", "Duals", "Slopes") else {}
    return Scene(
        DERIVED[name], bucket=SMALL, steps=2, policies={**AS_ONE, **more},
        often=("zero3",) * (name in ("MeanFlow", "Slopes")),
        mutants=(Mutant("without its derivative", game=Still),) if name == "MeanFlow" else (RARELY_DEAF,),
        refused=(
            Refused(
                having(Slopes, second_order=False), "zero3",
                ("phase 'net' differentiates by torch.func", "second_order=True)"), check=False,
            ),
        )[name != "Slopes" :],
    )  # fmt: skip


LOSSES = {
    "batches with lists": Scene(
        Plain, batches=with_lists, policies={"ddp": 2}, often=("ddp",), checked=("ddp",), steps=2,
        refused=(Refused(ByMean, "ddp", "2 ranks would not train as one device does"),),
    ),
    "a loss calls backward itself": Scene(
        InParts, policies={}, mutants=(),
        refused=(Refused(InParts, "zero3 ddp zero2 fsdp", "its loss calls backward() itself"),),
    ),
    "instance_norms_that_keep_statistics": Scene(
        InstanceNorms,
        policies={**POLICIES, "zero3+recompute": 2, "generator=pipeline,*=ddp": 2, "ddp+compile": 2},
        often=("zero3+recompute",), checked=("zero3",),
        refused=(
            Refused(
                InstanceNorms, "ddp", ("running_mean' is written", "Trainer(sync_batchnorm=True)"),
                settings={"sync_batchnorm": False},
            ),
        ),
    ),
    "one_tensor_given_twice": Scene(
        GivenTwice, bucket=SMALL, often=("zero3+recompute", "generator=pipeline,*=ddp"),
        policies={**dict.fromkeys(("ddp", "zero3+recompute", "fsdp+recompute", "generator=pipeline,*=ddp"), 2)},
    ),
    "skips_in_a_list": Scene(
        made_of(Plain, generator=Skipping), bucket=SMALL, often=("zero3+recompute",),
        policies=dict.fromkeys(("ddp+recompute", "zero3", "zero3+recompute", "fsdp+recompute"), 2),
        refused=(
            Refused(
                made_of(Plain, generator=Skipping), "generator=pipeline,*=ddp",
                "changes a list or dict that it is given, which other stages would not see",
            ),
        ),
    ),
    "fakes made in inference mode": Scene(Inferred, often=("zero3",)),
    "gan.ranks": Scene(
        Contrast, policies={"ddp": 2, "ddp+recompute": 2, "zero3": 2}, often=("ddp",), checked=("zero3",),
        promises=WHOLE_BATCH,
    ),
    "what a phase keeps, in micro-batches": Scene(
        KeepsInParts, alone=having(KeepsInParts, micro_batches=1), policies={"single": 1, "ddp": 2, "zero3": 2},
        often=("ddp",), checked=("single", "ddp"),
        refused=(
            Refused(KeepsAnAttribute, "single ddp", ("reads self.fakes, and gets", "of phase 'discriminator' has")),
            Refused(KeepsInANetwork, "single ddp", "reads self.generator.kept, and gets what the last micro-batch of"),
            Refused(KeepsForTheNextStep, "single ddp", ("reads self.before, and gets", "of phase 'generator' has")),
        ),
        mutants=(
            Mutant("an attribute", game=KeepsAnAttribute),
            Mutant("a mean that is not added up", game=having(KeepsInParts, judge=keeps_the_last_mean)),
        ),
    ),
    "written_batches_in_micro_batches": Scene(
        Writes, alone=having(Writes, micro_batches=1, micro_batches_of_fool=1), often=("single",),
        policies={"single": 1, "ddp": 2, "zero3": 2, "dp": 2}, checked=("single", "zero3"), mutants=(),
        refused=tuple(
            Refused(
                having(Writes, micro_batches=first, micro_batches_of_fool=then), "single",
                f"phase 'generator' has micro_batches={then}, and what a phase with another number has written",
            )
            for first, then in ((2, 1), (4, 2))
        ),
    ),
    "weights as long as the rows, computed in micro-batches": Scene(
        SpectralInParts, policies={"ddp": 2}, often=("ddp",), checked=("ddp",), steps=2,
    ),
    "a backward that needs the whole batch": Scene(
        FreeNoise, policies={"ddp": 2, "zero1": 2, "zero3": 2}, often=("ddp",), checked=("ddp", "zero1"), steps=2,
    ),
    "batch norms in micro-batches": Scene(
        MicroBatchNorms, policies={"ddp": 2}, four=("ddp",),
    ),
    "a weight without elements": Scene(
        made_of(Plain, discriminator=Prompted), policies={"zero1": 2, "zero3": 2, "fsdp": 2}, often=("zero3",),
        saved=("zero3",), arrives=(("single", 1),),
    ),
    "layers of some samples below a batch norm": Scene(
        Experts, policies={"ddp": 2, "zero2": 2, "zero3+whole": 2, "fsdp+whole": 2},
        often=("ddp",), checked=("zero2", "zero3+whole", "fsdp+whole"), bucket=SMALL,
        refused=(Refused(Experts, "fsdp zero3", ("layers are chosen by sample, type ", "+whole"), check=False),),
    ),
    "batch norms of one's own": Scene(
        Own, **NORMS, often=("ddp",), checked=("zero2",),
        mutants=(Mutant("not synchronised", "ddp", settings={"sync_batchnorm": False}),),
        refused=tuple(
            Refused(ending(function), "ddp", BY_HAND, unsaid="Synchronise batch norms", slow=again)
            for again, function in enumerate(BY_OWN_HAND)
        ),
    ),
    "norms_of_one_sample_with_own_weights": Scene(
        OwnWeights, policies={"ddp": 2, "zero1": 2}, often=("ddp",), checked=("ddp",),
        batches=lambda step: {"x": vectors(step)["x"][:2]},
    ),
    "batch norms that torch synchronises": Scene(
        torchs_own, policies={"ddp": 2, "zero1": 2, "zero3": 2, "generator=pipeline,*=ddp": 2}, often=(),
        refused=(
            Refused(torchs_own, "zero3 ddp generator=pipeline,*=ddp", OF_GPUS, settings={"sync_batchnorm": False}),
        ),
    ),
    "batch norms in groups": Scene(
        Grouped, **NORMS, often=("ddp",), checked=("zero2",),
        mutants=(Mutant("other groups", "ddp", partial(Grouped, 2)),),
        refused=(
            Refused(
                Grouped, "generator=pipeline+chunks:2,*=ddp",
                "'1' looks at the whole batch, so a pipeline cannot cut it into 2 chunks",
            ),
            Refused(partial(Grouped, 8), "ddp", "batch norm in groups of 8 samples gets a tensor of shape (4, 8)"),
        ),
    ),
    "drawn_between_steps": Scene(
        Rescales, policies={"ddp": 2, "zero3": 2}, often=("ddp",), saved=("ddp",), checked=("ddp",),
        callbacks=lambda: [Rescaled()],
    ),
    "grids_in_the_loop": Scene(
        Grids, policies={"ddp": 2}, often=("ddp",), mutants=(Mutant("no batch norms", game=Plain),),
        refused=(Refused(having(Grids, in_training=True, first=False), "ddp", "is called between phases, where a"),),
    ),
    "statistics between steps": Scene(
        having(Grids, in_training=True, first=False, alone=True), policies={"ddp": 2}, often=("ddp",),
        mutants=(Mutant("in evaluation", game=Grids),),
    ),
    "lists_and_captions": Scene(
        having(Described, micro_batches=2), alone=Described, batches=described,
        policies={"single": 1, "dp": 2, **AS_ONE}, often=("zero3",), promises=(LISTS,),
    ),
    "two loaders": Scene(
        TwoLoaders, batches=two_loaders, policies={"ddp": 2, "zero3": 2}, often=("ddp",), four=("ddp",),
        promises=(LOADERS,),
        refused=(Refused(TwoLoaders, "dp", "strategy dp: the batch has 16 samples and batch['few'] is of 8 rows"),),
    ),
    **{name: derived(name) for name in DERIVED},
    "a graph of second order for a later phase": Scene(Handed, policies={"zero3": 2}, bucket=SMALL),
    "kept_graph": Scene(
        Kept, policies={"zero2": 2}, often=("zero2",), bucket=SMALL,
        refused=(Refused(Kept, "zero3 fsdp", "modified by an inplace operation", check=False),),
    ),
    "adapters": Scene(
        Adapters, lambda steps: by_hand(Adapters(), steps), policies=SHARED, often=("zero3",), checked=("zero2",),
        bucket=SMALL, saved=("zero3",), arrives=MIXED, travels_often=False,
        refused=(
            Refused(
                OneModule, "teacher=single+recompute,*=single",
                "'teacher': option recompute would run its blocks again, and player 'student'",
            ),
        ),
    ),
    "a shared base": Scene(
        SharedBase, lambda steps: by_hand(SharedBase(), steps), policies=SHARED, bucket=SMALL,
        often=("student=ddp,*=zero3",), steps=10,
        mutants=(Mutant("after does nothing", game=type("Careless", (SharedBase,), {"after": None})),),
        saved=("student=ddp,*=zero3", "zero3", "ddp"), arrives=(("zero3", 2), ("single", 1)),
    ),
    "adapters that follow": Scene(
        FollowingAdapters, policies={"zero3": 2, "student=ddp,*=zero3": 2}, bucket=SMALL,
        often=(), saved=("zero3",), arrives=MIXED, travels_often=False,
    ),
}  # fmt: skip
