"""What writes weights and gradients beside the optimizer: forwards, callbacks, and Lightning's hooks."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from io import BytesIO
from typing import Any

import torch
from lightning import Callback
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, softplus
from torch.nn.utils import spectral_norm as spectral_norm_of_old
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import remove_parametrizations
from torch.nn.utils.prune import l1_unstructured

from gan import Phase, Player, ranks
from tests.support.hard_games import Plain, mlp
from tests.support.parity import EXACT, distance, train
from tests.support.scene import Mutant, Refused, Scene, having, nothing

# ---- forwards that write weights, each in some way that people write ----

WRITES = {
    "copy_": lambda weight, value: weight.copy_(value),
    "data.copy_": lambda weight, value: weight.data.copy_(value),
    "data=": lambda weight, value: setattr(weight, "data", value.clone()),
}


def write(way: str, weight: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        WRITES[way](weight, value)


class ActNorm(nn.Module):
    """Its first batch sets shift and scale (Kingma and Dhariwal 2018)."""

    def __init__(self, way: str, alone: bool) -> None:
        super().__init__()
        self.way, self.alone = way, alone
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.register_buffer("started", torch.tensor(False))

    def sum(self, x: Tensor) -> Tensor:
        return ranks.sum(x) if ranks.more_than_one() and not self.alone else x

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.started:
            rows = self.sum(torch.tensor(float(len(x)), dtype=x.dtype))
            mean = self.sum(x.detach().sum(0)) / rows
            spread = (self.sum((x.detach() - mean).square().sum(0)) / rows).sqrt()
            write(self.way, self.shift, -mean)
            write(self.way, self.scale, 1 / spread)
            self.started.fill_(True)
        return (x + self.shift) * self.scale


class Forced(nn.Linear):
    """A layer that writes its weight to length 1 in every forward (Karras et al. 2024)."""

    def __init__(self, inside: int, outside: int, way: str) -> None:
        super().__init__(inside, outside)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            write(self.way, self.weight, self.weight / self.weight.norm(dim=1, keepdim=True))
        return linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class Writing(Plain):
    """Both: a discriminator that its first batch sets, and a generator with a forced norm."""

    way = "copy_"
    alone = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Forced(4, 8, self.way), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(ActNorm(self.way, self.alone), mlp(6, 1))


class WritingOther(Writing):
    way = "data="


class WritingAlone(Writing):
    """The control: each rank's first batch is its own."""

    alone = True


class WritingLate(Writing):
    """A weight that is written after a forward has used it, and before the backward."""

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().fool(batch)
        write(self.way, self.generator[2].weight, self.generator[2].weight * 2)
        return loss


class Spectral(nn.Module):
    """Spectral norm as published code has it: its vectors are weights that do not learn, and each forward sets them.

    In plain torch the backward of an earlier call then takes the vectors of the last one.
    """

    sets = True

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(inside), requires_grad=False)  # set after it was used
        self.weight = nn.Parameter(torch.randn(outside, inside) / 2)
        self.u, self.v = (nn.Parameter(torch.ones(size), requires_grad=False) for size in (outside, inside))

    def forward(self, x: Tensor) -> Tensor:
        if self.sets:
            self.v.data = normalize(self.weight.data.t().mv(self.u.data), dim=0)
            self.u.data = normalize(self.weight.data.mv(self.v.data), dim=0)
        out = linear(x * self.scale, self.weight / self.u.dot(self.weight.mv(self.v)))
        if self.sets:
            self.scale.data = 0.9 * self.scale.data
        return out


class Normed(Plain):
    layer = Spectral

    def __init__(self) -> None:
        super().__init__()
        self.discriminator[0] = self.layer(6, 8)


class Copies(Plain):
    """The generator's loss takes a copy of the judge, as an unrolled GAN does."""

    copied = staticmethod(copy.deepcopy)

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return softplus(-self.copied(self.discriminator)(self.fake(batch["x"]))).mean()


class Views(Plain):
    """A loss reads a weight by another tensor in its memory, which follows the weight on one device."""

    made_in = "configure_players"
    view = staticmethod(lambda weight: weight.detach().t())

    def __init__(self) -> None:
        super().__init__()
        self.net = spectral_norm_of_old(nn.Linear(2, 2))  # has such a tensor, and writes it in each forward
        self.centers = []

    def keep(self, now: str) -> None:
        if now == self.made_in and not self.centers:
            self.centers = [self.view(self.discriminator[0].weight)]

    def configure_players(self) -> Iterator[Player]:
        self.keep("configure_players")
        generator, discriminator = super().configure_players()
        yield generator
        yield replace(discriminator, after=lambda _: self.keep("after")) if self.made_in == "after" else discriminator

    def on_train_start(self) -> None:
        with self.trainer.strategy.gathered():
            self.keep("on_train_start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.keep("on_before_optimizer_step")

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        self.keep("fool")
        loss = super().fool(batch)
        return (
            loss + (self.fake(batch["x"]) @ torch.as_tensor(self.centers[0])).square().mean() if self.centers else loss
        )


def viewing(made_in: str, **members: Any) -> Any:
    return having(Views, made_in=made_in, **members)


class ReadsByNumpy(Plain):
    """As spectral norms by SciPy. Between phases NumPy reads weights under all policies."""

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        size = float(self.discriminator[0].weight.detach().numpy().max())
        return super().fool(batch) + size * self.fake(batch["x"]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with self.trainer.strategy.gathered():
            self.discriminator[0].weight.detach().numpy()


class Equalized(Plain):
    """As imaginaire's equalized learning rate: before each forward a hook makes the weight anew of one that learns."""

    scale, hooked = 0.5, True

    def __init__(self):
        super().__init__()
        layer = self.discriminator[0]
        raw = layer.weight
        del layer.weight
        layer.register_parameter("weight_ori", raw)
        if self.hooked:
            layer.register_forward_pre_hook(self.compute)

    def configure_players(self):
        self.discriminator[0].weight = self.discriminator[0].weight_ori.data
        return super().configure_players()

    def compute(self, layer, _):
        layer.weight = layer.weight_ori * self.scale


# ---- Lightning's hooks ----


class ClipsByNorm(Plain):
    """Clips by a norm over all gradients, as a person writes it; through the network or through the optimizer."""

    bound = 1e-3

    def weights(self, optimizer):
        return [weight for group in optimizer.param_groups for weight in group["params"]]

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.weights(optimizer), self.bound))


class Adaptive(ClipsByNorm):
    """Clips each gradient by the norm of its weight, as adaptive gradient clipping does, in place or anew."""

    def on_before_optimizer_step(self, optimizer):
        for weight in self.weights(optimizer):
            if weight.grad is not None:
                scale = (0.01 * weight.norm() / weight.grad.norm()).clamp(max=1)
                if weight.dim() > 1:
                    weight.grad = weight.grad * scale
                else:
                    weight.grad.mul_(scale)


class ClipsLearners(ClipsByNorm):
    """Clips the gradients of all learners of a phase together, before the first update."""

    def configure_phases(self):
        yield Phase("both", self.both, ("generator", "discriminator"))

    def both(self, batch):
        fake, real = self.discriminator(self.fake(batch["x"])), self.discriminator(batch["x"])
        return (softplus(fake) + softplus(-real)).mean()

    def on_before_optimizer_step(self, optimizer):
        if self.player_of(optimizer).name == "generator":
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.bound)
        else:  # the gradients of the first learner are still there
            optimizer.param_groups[0]["params"][0].grad.mul_(self.generator[0].weight.grad.norm() / self.bound)


alone = ClipsByNorm.on_before_optimizer_step


class Own(Plain):
    """A step of its own around that of GanModule."""

    def training_step(self, batch):
        super().training_step({"x": batch["x"] * 2})
        self.log("rows", float(len(batch["x"])))


class Doubled(Plain):
    def judge(self, batch):
        return super().judge({"x": batch["x"] * 2})

    def fool(self, batch):
        return super().fool({"x": batch["x"] * 2})


class Clips(Callback):
    """Weight clipping after a step, and weights loaded at the start, as in many a training script."""

    def __init__(self, way: str = "copy_", gathered: bool = True, groups: bool = False):
        self.way, self.gathered, self.groups = way, gathered, groups

    def whole(self, trainer):
        return trainer.strategy.gathered(write=True) if self.gathered else nullcontext()

    def on_train_start(self, trainer, game):
        with self.whole(trainer):
            torch.manual_seed(5)
            game.generator.load_state_dict(
                {k: torch.randn(v.shape, dtype=v.dtype) for k, v in Plain().double().generator.state_dict().items()}
            )

    def on_train_batch_end(self, trainer, game, *_):
        with self.whole(trainer):
            (own,) = trainer.strategy.optimizers[1].param_groups
            for weight in own["params"] if self.groups else game.discriminator.parameters():
                write(self.way, weight, weight.detach().clamp(-0.2, 0.2))


class Unnormed(Plain):
    """Spectral norm is taken away on the way, as published loops do before the last epochs; and a layer is pruned."""

    def __init__(self):
        super().__init__()
        spectral_norm(self.discriminator[0])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            with self.trainer.strategy.gathered(write=True):
                remove_parametrizations(self.discriminator[0], "weight")
                l1_unstructured(self.generator[0], "weight", 0.5)


def clips(**how: Any) -> Any:
    return lambda: [Clips(**how)]


@cache
def clipped_by_hand(steps: int) -> dict[str, Any]:
    """On one device nothing need be gathered."""
    return train(Plain, policy="single", steps=steps, callbacks=[Clips(gathered=False)])


class Writes(Callback):
    """Does something with the game's weights after the first step."""

    def __init__(self, what):
        self.what = what

    def on_train_batch_end(self, trainer, game, *_):
        self.what(trainer.strategy, game)


def loads_outside(strategy, game):
    game.generator.load_state_dict({k: torch.zeros(v.shape) for k, v in Plain().generator.state_dict().items()})


def assigns_outside(strategy, game):
    for weight in game.generator.parameters():
        weight.data = torch.zeros(weight.shape, dtype=torch.float64)


def writes_unasked(strategy, game):
    with strategy.gathered():
        game.discriminator[0].bias.data.zero_()
        with torch.no_grad():
            game.generator[2].weight.zero_()


def writes_averages_unasked(strategy, game):
    with strategy.gathered(), strategy.averaged(), torch.no_grad():
        game.generator[2].weight.zero_()


def averages_differ(strategy, game):
    with strategy.gathered(write=True), strategy.averaged(), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)


def differs_before_averages(strategy, game):
    with strategy.gathered(write=True), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)
        with strategy.averaged():
            pass


def replaces(strategy, game):
    with strategy.gathered(write=True):
        game.generator[0].weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.float64))


def differs(strategy, game):
    with strategy.gathered(write=True), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)


def copied(net):
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


class Nests(Callback):
    """Reads and writes weights and averages, each inside the other, after each step."""

    def on_train_batch_end(self, trainer, game, *_):
        gathered, averaged, net = trainer.strategy.gathered, trainer.strategy.averaged, game.generator
        with gathered():
            raw, saved = copied(net), BytesIO()
            torch.save(copy.deepcopy(net), saved)
            saved.seek(0)
            loaded = torch.load(saved, weights_only=False)  # a snapshot of the whole network
            assert distance(copied(loaded), raw) == 0
            loaded(torch.zeros(2, 4, dtype=torch.float64))
            with game.averaged():
                smooth = copied(net)
            assert distance(copied(net), raw) == 0 < distance(raw, smooth)
        with averaged(), gathered(), game.averaged():
            assert distance(copied(net), smooth) == 0
        for outer, inner in ((lambda: gathered(write=True), averaged), (averaged, lambda: gathered(write=True))):
            with outer(), inner(), torch.no_grad():
                for weight in net.parameters():
                    weight.mul_(0.5)
        with gathered(write=True):
            write("copy_", game.discriminator[0].bias, torch.zeros(8, dtype=torch.float64))
            with averaged():
                assert distance(copied(net), {name: 0.25 * each for name, each in smooth.items()}) < EXACT
            assert distance(copied(net), raw) == 0
            write("copy_", game.discriminator[2].bias, torch.ones(1, dtype=torch.float64))


class Fails(Callback):
    """Saving fails on all ranks, or on one, and the training goes on, after each step."""

    def __init__(self, alone: bool = True):
        self.alone = alone

    def on_train_batch_end(self, trainer, game, *_):
        gathered, averaged = trainer.strategy.gathered, game.averaged
        with gathered():
            with suppress(OSError), averaged():
                raise OSError("disk full")
            with gathered():
                assert all(each.isfinite().all() for each in game.parameters())
        for ways in ((gathered,), (gathered, averaged), (partial(gathered, write=True), averaged), (averaged,)):
            for failing in ((0, 1), (0,), (1,)) if self.alone else ((0, 1),):
                with suppress(OSError), ExitStack() as stack:
                    for way in ways:
                        stack.enter_context(way())
                    if trainer.global_rank in failing:
                        raise OSError("disk full")


def reads_after_an_error(strategy, game):
    with strategy.gathered():
        with suppress(OSError), game.averaged():
            raise OSError("disk full")
        game.generator[2].weight.sum()


def differs_at_an_error(strategy, game):
    with suppress(OSError), strategy.gathered(write=True), torch.no_grad():
        if strategy.global_rank:
            raise OSError("disk full")
        game.generator[2].bias.zero_()


# ---- the table ----

HOOKS = ("Lightning's hooks of backward and update",)
OURS = {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp": 2}
COPIES = dict.fromkeys(
    ("zero1+offload", "zero2+offload", "zero3+offload", "zero3+whole", "zero3+hybrid:2", "fsdp+offload"), 2
)
ENGINES = dict.fromkeys(("deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3+offload"), 2)
IN_FORWARD, BY_CALLBACK = ("weights that a forward writes",), ("weights that a callback writes",)


def by_norms(game: Any, often: str, **policies: int) -> Scene:
    """In buckets of 200 bytes, of which some ranks own no piece of a weight."""
    return Scene(
        game, bucket=200, promises=HOOKS, often=(often,),
        policies={**OURS, **ENGINES, "zero2+offload": 2, "zero3+whole": 2, "fsdp+offload": 2, **policies},
        mutants=(Mutant("nothing is clipped", game=having(ClipsByNorm, bound=1e9)),),
    )  # fmt: skip


def clipped(way: str, gathered: bool, groups: bool, often: str = "", **policies: int) -> Scene:
    return Scene(
        Plain, clipped_by_hand, policies=policies, callbacks=clips(way=way, gathered=gathered, groups=groups),
        mutants=(Mutant("nothing is clipped", callbacks=list, slow=not often),), often=(often,), promises=BY_CALLBACK,
    )  # fmt: skip


THREE = "zero3 ddp fsdp"
FREED = "'centers.0' is in the memory of a weight that was gathered, which is freed again"
KEPT_IN_A_LOSS = viewing("fool")
AN_ARRAY = viewing("fool", view=staticmethod(lambda weight: weight.detach().numpy().T))
UNGATHERED = {"ddp": 2, "zero1": 2, "zero2": 2, "zero2+offload": 2, "deepspeed2": 2}


def unkept(what: Any, words: Any, policies: str) -> Refused:
    return Refused(Plain, policies, words, settings={"callbacks": [Writes(what)]}, check=False)


WRITTEN = {
    "a_hook_clips": by_norms(ClipsByNorm, "zero3", **{"zero2+hybrid:2": 4, "zero3+hybrid:2": 4}),
    "a hook clips all learners": Scene(
        ClipsLearners, policies={**OURS, **ENGINES}, often=("zero3",), promises=HOOKS,
        mutants=(Mutant("each by itself", game=having(ClipsLearners, on_before_optimizer_step=alone)),),
    ),
    "a hook clips by weights": by_norms(Adaptive, "zero3"),
    "a step of one's own": Scene(
        Own, alone=Doubled, policies={"ddp": 2, "zero3": 2}, often=("ddp",), mutants=(Mutant("as it was", game=Plain),)
    ),
    "a forward writes by copy_": Scene(
        Writing, policies={**OURS, **COPIES, **ENGINES}, often=("zero3",), promises=IN_FORWARD,
        refused=(Refused(WritingLate, "zero3 single ddp zero1 zero2 fsdp", "modified by an inplace operation"),),
    ),
    "a_forward_writes_by_data=": Scene(
        WritingOther, policies=OURS, often=("ddp",), promises=IN_FORWARD,
    ),
    "a_forward_sets_what_does_not_learn": Scene(
        Normed, bucket=100, policies={**OURS, "zero3+whole": 2, "deepspeed3": 2}, often=("zero3", "fsdp"),
        mutants=(Mutant("it is not set", game=having(Normed, layer=having(Spectral, sets=False))),),
        refused=(
            Refused(
                Normed, "single+recompute zero2+recompute zero3+recompute",
                ("writes its weight of shape", "leave recompute out"),
            ),
        ),
    ),
    "a loss copies a network": Scene(
        Copies, bucket=100, policies={"zero1": 2, "zero3": 2, "fsdp": 2, "zero3+whole": 2}, often=("zero3",),
        mutants=(Mutant("a copy of the start", game=having(Copies, copied=staticmethod(cache(copy.deepcopy)))),),
    ),
    "memory_read_by_a_loss": Scene(
        Views, policies={"ddp": 2}, often=(), mutants=(Mutant("it does not", game=Plain),),
        refused=(
            Refused(
                Views, "zero1 zero2 zero3 fsdp", "'centers.0' has the memory of weight 'discriminator.0.weight', whose",
            ),
        ),
    ),
    "a_hook_computes_a_weight": Scene(
        Equalized, policies={"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp": 2, "pipeline": 2},
        often=("fsdp",), mutants=(Mutant("by another scale", game=having(Equalized, scale=1.0)),),
        refused=(Refused(having(Equalized, hooked=False), "zero1", "would keep the values of the start"),),
    ),
    "a loss reads a weight by NumPy": Scene(
        ReadsByNumpy, policies={"zero3": 2}, mutants=(Mutant("it does not", game=Plain),),
        refused=(Refused(ReadsByNumpy, "fsdp", "a loss reads a weight as a NumPy array, and FSDP2 cannot free"),),
    ),
    "memory_kept_by_a_loss": Scene(
        KEPT_IN_A_LOSS, policies={"zero2": 2}, often=(), mutants=(Mutant("it does not", game=Plain),),
        refused=(
            Refused(KEPT_IN_A_LOSS, "zero3 fsdp", FREED), Refused(viewing("on_train_start"), "zero3 fsdp", FREED),
            Refused(AN_ARRAY, "zero3", FREED),
        ),
    ),
    "an update keeps a weight's memory": Scene(
        viewing("after"), policies={"zero2": 2, "ddp": 2}, often=(), mutants=(Mutant("it does not", game=Plain),),
        refused=tuple(
            Refused(viewing(hook), "zero3 fsdp", words, check=False)
            for hook, words in (
                ("after", "player 'discriminator': after= keeps the memory of a weight"),
                ("on_before_optimizer_step", "on_before_optimizer_step keeps the memory of"),
            )
        ),
    ),
    "a callback writes": Scene(
        Plain, clipped_by_hand, policies={"single": 1, **OURS, **COPIES, **ENGINES}, callbacks=clips(),
        often=("zero3",), promises=BY_CALLBACK,
        mutants=(Mutant("nothing is clipped", callbacks=list, slow=True),),
        refused=(
            unkept(loads_outside, "write them inside gathered(write=True)", "zero3 fsdp"),
            unkept(assigns_outside, "write them inside gathered(write=True)", "zero3 fsdp"),
            unkept(writes_unasked, "weight '2.weight' of player 'generator' was written inside gat", THREE),
            unkept(writes_averages_unasked, "was written inside gathered", "zero3"),
            unkept(averages_differ, ("'2.bias'", "was written with other values on another"), THREE),
            unkept(differs_before_averages, ("'2.bias'", "was written with other values on another"), "zero3"),
            unkept(replaces, "weight '0.weight' of player 'generator' was replaced by another parameter", THREE),
            unkept(differs, "weight '2.bias' of player 'generator' was written with other values on another", THREE),
        ),
    ),
    **{
        f"a callback writes by {way}": clipped(way, True, False, zero2=2, zero3=2, fsdp=2, deepspeed3=2)
        for way in ("data.copy_", "data=")
    },
    **{f"a callback writes by {way}, ungathered": clipped(way, False, False, **UNGATHERED) for way in WRITES},
    "a callback writes an optimizer's groups": clipped(
        "copy_", True, True, "zero3", **OURS, **ENGINES, **{"zero3+offload": 2}
    ),
    "a callback writes an optimizer's groups, ungathered": clipped("data=", False, True, **UNGATHERED),
    "a_parametrization_is_removed": Scene(
        Unnormed, policies={**OURS, "deepspeed2": 2, "discriminator=pipeline,*=ddp": 2},
        often=("zero3", "ddp"),
        mutants=(Mutant("it stays", game=having(Unnormed, on_train_batch_end=nothing)),),
    ),
    "averaged_and_gathered_in_each_other": Scene(
        Plain, policies={**OURS, **COPIES, **ENGINES, "zero3+recompute": 2}, often=("zero3",),
        callbacks=lambda: [Nests()],
        mutants=(Mutant("nothing is written", callbacks=list),),
    ),
    "an_error_on_one_rank_leaves_averaged": Scene(
        Plain, policies={**OURS, **COPIES, **ENGINES}, often=("zero3",), callbacks=lambda: [Fails()],
    ),
    "an_error_leaves_averaged": Scene(
        Plain, policies={**OURS, **COPIES, **ENGINES, "generator=pipeline,*=ddp": 2},
        often=("zero2",), callbacks=lambda: [Fails(alone=False)],
        refused=(
            unkept(reads_after_an_error, "is read here, and an error has left `averaged()` or", "zero2 zero3"),
            unkept(differs_at_an_error, ("'2.bias'", "was written with other values on another"), "zero3"),
        ),
    ),
}  # fmt: skip
