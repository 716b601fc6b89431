"""The words of Player and Phase, each as a loop by hand in plain torch has it."""

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gan import Phase, Player, noise, ranks
from tests.support.duel import ByHand, Duel, adam, fooling, judge_network, judging
from tests.support.hard_games import Plain
from tests.support.optimizers import MuonAndAdam, ScheduleFree
from tests.support.scene import ENGINES, POLICIES, SMALL, Mutant, Refused, Scene, having

# ---- freeze, and requires_grad ----

# Of six steps. The trunk learns in steps 0 and 1, and from step 4 on again; the generator's last layer from step 3 on.
THAWED = [0, 1, 4, 5]


class Freezing(Duel):
    of_judge: ClassVar = {"freeze": lambda step: [] if step in THAWED else ["trunk"], "clip": 0.05}
    of_generator: ClassVar = {"freeze": lambda step: "2" if step < 3 else ()}


class ByAuthor(Duel):
    """The same, written as in plain torch: on the networks, between steps."""

    of_judge: ClassVar = {"clip": 0.05}

    def on_train_batch_start(self, batch, index):
        if index in (2, 4):
            self.judge["trunk"].requires_grad_(index == 4)
        if index in (0, 3):
            self.generator[2].requires_grad_(index == 3)


class InTheLoss(Freezing):
    """A loss that freezes what it does not train, as in many a loop, and what it freezes for good."""

    of_judge: ClassVar = {"clip": 0.05}

    def judging(self, batch):
        self.generator.requires_grad_(False)
        self.judge["trunk"].requires_grad_(self.step in THAWED)
        return super().judging(batch)

    def fooling(self, batch):
        self.generator.requires_grad_(True)
        self.generator[2].requires_grad_(self.step >= 3)
        self.judge.requires_grad_(False)
        self.judge["head"].requires_grad_(True)
        return super().fooling(batch)


class FreezingByHand(ByHand):
    clip: ClassVar = {"judge": 0.05}

    def before(self, step):
        self.judge["trunk"].requires_grad_(step in THAWED)
        self.generator[2].requires_grad_(step >= 3)


class Thawing(Duel):
    def __init__(self):
        super().__init__()
        self.judge["trunk"].requires_grad_(False)

    def on_train_batch_start(self, batch, index):
        if index == 2:
            self.judge["trunk"].requires_grad_(True)


class ThawingInTheLoss(Thawing):
    """As published loops have it, at the head of each turn."""

    def judging(self, batch):
        self.judge.requires_grad_(True)
        return super().judging(batch)


# ---- after ----


def with_constants() -> nn.Module:
    """A judge with a frozen weight and a buffer, which change by `rewrite` alone."""
    net = judge_network()
    net.offset = nn.Parameter(torch.linspace(0, 1, 8), requires_grad=False)
    net.register_buffer("scale", torch.ones(()))
    return net


def rewrite(net: nn.Module) -> None:
    """In the ways in which people do it: in place, by `data`, from the whole network's forward."""
    net["trunk"][0].weight.clamp_(-0.3, 0.3)
    net["head"].weight.data = net["head"].weight / net["head"].weight.norm()
    for weight in net["trunk"][2].parameters():
        weight.data.mul_(0.99)
    shown = net["head"](net["trunk"](torch.ones(1, 6, dtype=net.scale.dtype)))
    net["head"].bias.sub_(0.1 * shown[0])
    net.offset.mul_(0.9)
    net.scale.add_(0.05)


def to_unit_rows(net: nn.Module) -> None:
    for layer in (net[0], net[2]):
        layer.weight.copy_(nn.functional.normalize(layer.weight))


class After(Duel):
    of_judge: ClassVar = {"after": rewrite, "ema": 0.7}
    of_generator: ClassVar = {"after": to_unit_rows}

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.judge = with_constants()

    def score(self, x):
        return self.judge["head"](torch.tanh(self.judge["trunk"](x) * self.judge.scale + self.judge.offset))


class AfterByHand(ByHand):
    score = After.score

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.judge = with_constants().double()
        self.take({"generator": self.generator, "judge": self.judge})
        self.averages = {key: weight.detach().clone() for key, weight in self.judge.named_parameters()}
        del self.averages["offset"]

    def rewrite(self, name):
        (rewrite if name == "judge" else to_unit_rows)(self.networks[name])

    def updated(self, name):
        self.rewrite(name)
        if name == "judge":
            for key, average in self.averages.items():
                average.mul_(0.7).add_(self.judge.get_parameter(key), alpha=0.3)
                self.kept[f"ema judge.{key}"] = average


# ---- ema_buffers ----


AVERAGED = {"ema_buffers": "averaged"}


def normed():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))


def taught(nets, x):
    return fooling(nets.score, nets.generator, x) + (nets.generator(x[:, :4]) - nets.slow(x[:, :4])).square().mean()


class Normed(Duel):
    """The generator keeps an average, and another player is one. Losses see the buffers of that one."""

    words: ClassVar = AVERAGED

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.generator = normed()
        self.slow = copy.deepcopy(self.generator)

    def configure_players(self):
        yield Player("generator", self.generator, adam, ema=0.8, **self.words)
        yield Player("judge", self.judge, adam)
        yield Player("slow", self.slow, follows="generator", ema=0.7, **self.words)

    def fooling(self, batch):
        return taught(self, batch["x"])


class Copied(Normed):
    words: ClassVar = {}


class NormedByHand(ByHand):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.generator = normed().double()
        self.take({"generator": self.generator, "judge": self.judge})
        self.slow, self.smooth = (copy.deepcopy(self.generator).eval() for _ in range(2))
        self.networks = {**self.networks, "slow": self.slow}

    def losses(self, turn):
        return (lambda score, generator, x: taught(self, x)) if turn == "fool" else judging

    def updated(self, name):
        for net, decay in ((self.smooth, 0.8), (self.slow, 0.7)) if name == "generator" else ():
            for mean, value in zip(net.state_dict().values(), self.generator.state_dict().values(), strict=True):
                mean.copy_(decay * mean + (1 - decay) * value if value.is_floating_point() else value)
        self.kept = {f"ema generator.{key}": value for key, value in self.smooth.state_dict().items()}


# ---- what averages and schedules count ----

EPOCH = 2
EPOCHS = {"limit_train_batches": EPOCH, "max_epochs": 10}


falling = partial(LambdaLR, lr_lambda=lambda number: 0.8**number)


def warm(updates: int) -> float:
    return min(0.8, (1 + updates) / (10 + updates))


class Counting(Duel):
    """The judge has more updates than there are steps, the generator fewer."""

    of_judge: ClassVar = {"ema": warm, "schedule": falling, "schedule_per": "step"}
    of_generator: ClassVar = {"ema": warm, "ema_per": "step", "schedule": falling, "schedule_per": "epoch"}

    def configure_phases(self):
        yield Phase("judge", self.judging, "judge")
        yield Phase("fool", self.fooling, "generator", every=2)
        yield Phase("again", self.judging, "judge", every=3)


class CountingByHand(ByHand):
    def __init__(self):
        super().__init__()
        self.averages = {name: [w.detach().clone() for w in net.parameters()] for name, net in self.networks.items()}
        self.counts = dict.fromkeys(self.networks, 0)

    def due(self, turn, step):
        return turn == "judge" or step % (2 if turn == "fool" else 3) == 0

    def average(self, name):
        decay = warm(self.counts[name])
        self.counts[name] += 1
        for average, (key, weight) in zip(self.averages[name], self.networks[name].named_parameters(), strict=True):
            average.mul_(decay).add_(weight, alpha=1 - decay)
            self.kept[f"ema {name}.{key}"] = average

    def updated(self, name):
        if name == "judge":
            self.average(name)

    def after(self, step):
        self.average("generator")
        for name, number in (("judge", step + 1), ("generator", (step + 1) // EPOCH)):
            self.optimizers[name].param_groups[0]["lr"] = 2e-2 * 0.8**number
            self.kept[f"rate {name}"] = torch.tensor(2e-2 * 0.8**number)


def changed(player, **words):
    before = getattr(Counting, player)
    return type("Control", (Counting,), {player: {**before, **words}})


# ---- follows ----


class Following(Duel):
    """Both networks have one that follows; it stands before or behind the other, and both take part in the losses."""

    of_judge: ClassVar = {"after": rewrite}

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.judge, self.teacher, self.slow = with_constants(), with_constants(), copy.deepcopy(self.generator)

    def configure_players(self):
        yield Player("teacher", self.teacher, follows="judge", ema=warm)
        yield from super().configure_players()
        yield Player("slow", self.slow, follows="generator", ema=0.8, ema_per="step")

    configure_phases = Counting.configure_phases

    def score(self, x):
        return scored(self.judge, x)

    def judging(self, batch):
        return taught_to_judge(self, batch["x"])

    def fooling(self, batch):
        return taught_to_fool(self, batch["x"])


def scored(net, x):
    return net["head"](torch.tanh(net["trunk"](x) * net.scale + net.offset))


def taught_to_judge(nets, x):
    return judging(nets.score, nets.slow, x) + (nets.score(x) - scored(nets.teacher, x)).square().mean()


def taught_to_fool(nets, x):
    return fooling(nets.score, nets.generator, x) + scored(nets.teacher, nets.generator(x[:, :4])).square().mean()


class FollowingByHand(AfterByHand):
    def __init__(self):
        super().__init__()
        self.teacher, self.slow = copy.deepcopy(self.judge), copy.deepcopy(self.generator)
        self.networks |= {"teacher": self.teacher, "slow": self.slow}
        self.updates = 0

    def losses(self, turn):
        taught = taught_to_fool if turn == "fool" else taught_to_judge
        return lambda score, generator, x: taught(self, x)

    due = CountingByHand.due

    def updated(self, name):
        if name == "judge":
            rewrite(self.judge)
            self.follow(self.teacher, self.judge, warm(self.updates))
            self.updates += 1

    def after(self, step):
        self.follow(self.slow, self.generator, 0.8)

    def follow(self, average, net, decay):
        for own, weight in zip(average.parameters(), net.parameters(), strict=True):
            own.mul_(decay).add_(weight, alpha=1 - decay)
        for own, buffer in zip(average.buffers(), net.buffers(), strict=True):
            own.copy_(buffer)


# ---- start, until, every, when ----


def on_odd_rank() -> bool:
    """Something in which ranks differ: the processes of a world."""
    return dist.is_initialized() and dist.get_rank() % 2 == 1


class InTurn(Duel):
    def configure_phases(self):
        yield Phase("judge", self.judging, "judge", until=5, when=lambda: self.step % 3 == on_odd_rank())
        yield Phase("fool", self.fooling, "generator", start=2, every=3)
        yield Phase("again", self.judging, "judge", start=4, until=6)


class TurnsByHand(ByHand):
    remainder = 0

    def due(self, turn, step):
        if turn == "judge":
            return step < 5 and step % 3 == self.remainder
        return step in ((2, 5) if turn == "fool" else (4, 5))


class Choosing(Duel):
    """The judge takes an update only where its loss is above a bound. Other ranks than the first say the opposite."""

    loss, bound = 0.0, 1.374

    def configure_phases(self):
        yield Phase("judge", self.judging, "judge", update=lambda: (self.loss > self.bound) != on_odd_rank())
        yield Phase("fool", self.fooling, "generator")

    def judging(self, batch):
        loss = super().judging(batch)
        self.loss = ranks.mean(loss.detach()).item()
        return loss


class ChoosingByHand(ByHand):
    turns: ClassVar[Any] = {"judge": ("judge",), "fool": ("generator",)}

    def __init__(self):
        super().__init__()
        self.taken = []

    def losses(self, turn):
        def loss(*args):
            self.loss = super(ChoosingByHand, self).losses(turn)(*args)
            return self.loss

        return loss

    def step(self, turn, name):
        if turn == "judge":
            self.taken.append(self.loss.item() > Choosing.bound)
        if turn == "fool" or self.taken[-1]:
            super().step(turn, name)

    def run(self, *steps):
        found = super().run(*steps)
        assert {*self.taken} == {True, False}
        return found


class Asking(Duel):
    """`when` asks the other ranks, and draws from what the loss draws from too."""

    loss = 9.0

    def __init__(self):
        super().__init__()
        random.seed(1)

    def configure_phases(self):
        yield Phase("judge", self.judging, "judge", when=lambda: self.mean() > 1.3)
        yield Phase("fool", self.fooling, "generator", when=lambda: random.random() < torch.rand(()) + 0.2)

    def mean(self):
        return ranks.mean(torch.tensor(self.loss, dtype=torch.float64))

    def judging(self, batch):
        loss = super().judging(batch) * (1 + random.random())
        self.loss = loss.item()
        return loss


# ---- draws outside of losses ----


class Noisy(Optimizer):
    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            weight.sub_(self.param_groups[0]["lr"] * (weight.grad + torch.randn_like(weight)))


class Shaken(Duel):
    """Noise on gradients, in an optimizer's step and in `after`."""

    optimizer = partial(Noisy, lr=1e-2)

    def configure_players(self):
        yield Player("generator", self.generator, self.optimizer, after=shake)
        yield Player("judge", self.judge, adam)

    def on_before_optimizer_step(self, optimizer):
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad += noise.randn(weight.shape, like=weight)


def shake(net):
    for weight in net.parameters():
        weight += torch.randn_like(weight)


# ---- several words at once: `make matrix` trains these games under every policy ----


def limit(network: nn.Module) -> None:
    """Weight clipping; and a layer that is written as a whole."""
    network[0].weight.clamp_(-0.3, 0.3)
    network[2].weight.data = network[2].weight / network[2].weight.norm()


class Turns(Plain):
    """`start`, `until`, `every` and `when`; and `freeze` and `after` of players with a clip and an average.

    `when` counts the turns so far, in a buffer, and other ranks than the first would say the opposite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.zeros(()))

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        yield replace(generator, freeze=lambda step: "2" if step < 4 else ())
        yield replace(
            discriminator, freeze=lambda step: ["0"] if step in (2, 3, 6) else [], after=limit, ema=0.7, clip=0.05
        )

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.judge, "discriminator", until=9, when=self.wanted)
        yield Phase("generator", self.fool, "generator", start=1, every=2)
        yield Phase("both", self.both, ("generator", "discriminator"), start=4, until=6)

    def wanted(self) -> bool:
        return (self.turns % 3 < 2).item() != on_odd_rank()

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.turns += 1
        return super().judge(batch)

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        self.turns += 1
        return super().fool(batch)

    def both(self, batch: dict[str, Tensor]) -> Tensor:
        self.turns += 1
        return self.discriminator(self.fake(batch["x"])).square().mean()


class Followed(Plain):
    """`follows`, averages by a function, and what averages and schedules count: updates, steps, epochs."""

    epoch = 4  # steps

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.slow = copy.deepcopy(self.discriminator), copy.deepcopy(self.generator)

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        yield replace(generator, schedule=falling, schedule_per="epoch", ema=warm, ema_per="step")
        yield replace(discriminator, schedule=falling, schedule_per="step", ema=warm)
        yield Player("teacher", self.teacher, follows="discriminator", ema=warm)
        yield Player("slow", self.slow, follows="generator", ema=0.8, ema_per="step")

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator", every=2)
        yield Phase("again", self.judge, "discriminator", every=3)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        taught = (self.discriminator(x) - self.teacher(self.slow(x[:, :4]))).square().mean()
        return {**super().judge(batch), "taught": taught}

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        fake = self.fake(batch["x"])
        return super().fool(batch) + self.teacher(fake).square().mean()


class WholeWeights(Plain):
    """An optimizer that looks at whole weights, and a schedule-free one."""

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        yield replace(generator, optimizer=partial(MuonAndAdam, lr=1e-2))
        yield replace(discriminator, optimizer=ScheduleFree)


SEVERAL: dict[str, Any] = {game.__name__: game for game in (Turns, Followed, WholeWeights)}


# ---- the table ----


DUEL = {**POLICIES, **ENGINES}
OFFLOADED = {"zero1+offload": 2, "zero2+hybrid:2": 4, "zero3+offload": 4}
FREEZE = "`requires_grad_` on a part of a player"
RESUMED: dict[str, Any] = {"saved": ("zero3", "single"), "arrives": (("ddp", 2), ("zero1", 4), ("zero3", 4))}


def freezing(game: Any, often: str, **more: Any) -> Scene:
    return Scene(
        game, FreezingByHand().run, policies=DUEL, often=(often,), steps=6, bucket=SMALL, promises=(FREEZE,), **more
    )  # fmt: skip


WORDS = {
    "freeze": freezing(
        Freezing, "zero3",
        refused=(
            Refused(
                having(Duel, of_judge={"freeze": lambda step: ["trnk"] if step == 3 else []}), "single",
                "player 'judge': freeze names 'trnk' at step 3, and its ModuleDict has no",
            ),
            Refused(
                having(Duel, of_judge={"freeze": lambda step: [""]}), "single",
                "phase 'judge': its loss depends on no weight of judge; is something detach",
            ),
        ),
    ),
    "frozen_by_the_author": freezing(
        ByAuthor, "ddp",
        refused=(
            Refused(Thawing, "single", "player 'judge': weight 'trunk.0.weight' requires a gradient at step 2"),
            Refused(ThawingInTheLoss, "ddp", "player 'judge': weight 'trunk.0.weight' requires a gradient at step 0"),
        ),
    ),
    "frozen in the loss": freezing(
        InTheLoss, "zero3", checked=("ddp",),
        mutants=(Mutant("nothing is frozen", game=having(Duel, of_judge={"clip": 0.05})),),
    ),
    "after": Scene(
        After, AfterByHand().run, policies={**DUEL, **OFFLOADED}, often=("zero3",), bucket=SMALL,
        checked=("ddp",), saved=("zero3",), arrives=(("zero3", 2),), travels_often=False,
        mutants=(Mutant("without it", game=having(After, of_judge={"ema": 0.7}, of_generator={})),),
    ),
    "ema_buffers": Scene(
        Normed, NormedByHand().run, policies=DUEL, often=("zero3",), bucket=SMALL, checked=("ddp",),
        mutants=(Mutant("buffers are copied", game=Copied),),
        saved=("zero3",), arrives=(("ddp", 2), ("ddp", 4)),
    ),
    "ema_per_and_schedule_per": Scene(
        Counting, CountingByHand().run, policies=DUEL, often=("zero3",), bucket=SMALL, steps=6,
        settings=EPOCHS, **RESUMED,
        mutants=(
            Mutant("a fixed decay", game=changed("of_judge", ema=0.8)),
            Mutant("an average by updates", game=changed("of_generator", ema_per="update")),
            Mutant("a schedule by updates", game=changed("of_judge", schedule_per="update")),
            Mutant("a schedule by steps", game=changed("of_generator", schedule_per="step")),
            Mutant("a schedule by epochs", game=changed("of_judge", schedule_per="epoch")),
        ),
    ),
    "follows": Scene(
        Following, FollowingByHand().run, bucket=SMALL, steps=6, checked=("ddp",), **RESUMED,
        often=("zero3",), policies={**DUEL, **OFFLOADED, "judge=zero3,*=ddp": 2, "judge=ddp,*=zero3": 2},
        refused=(
            Refused(Following, "teacher=ddp,*=single", "'teacher' follows 'judge', so it has the same policy; leave"),
        ),
    ),
    "start, until, every, when": Scene(
        InTurn, TurnsByHand().run, often=("ddp",), bucket=SMALL, steps=8, checked=("zero3",),
    ),
    "update": Scene(
        Choosing, ChoosingByHand().run, often=("zero3",), bucket=SMALL, checked=("ddp",),
        policies={**DUEL, **OFFLOADED}, saved=("zero3",),
        mutants=(Mutant("all updates are taken", game=having(Choosing, bound=0.0)),),
    ),
    "when asks other ranks, and draws": Scene(Asking, policies={"ddp": 2}, steps=6),
    "draws outside of losses": Scene(Shaken, policies={"ddp": 2}),
    "draws in hooks": Scene(having(Shaken, optimizer=adam), policies={"zero3": 2}, often=()),
}  # fmt: skip
