"""What an update takes beside its gradients, and what runs around it: the same on all ranks, or refused by name."""

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD, Adafactor, Adam, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gan import Phase, Player
from gan.ranks import mean
from tests.support.hard_games import Micro2, One, Plain, mlp
from tests.support.scene import Mutant, Refused, Scene, having

SAME = "must be the same on all ranks: keep gan.ranks.mean(x) in place of x"


class Reads(Plain):
    """Its updates read a number of this rank's own samples, or (`of_all`) of all ranks'."""

    of_all, seen = staticmethod(lambda number: number), 1.0

    def judge(self, batch):
        self.seen = float(self.of_all(batch["x"].detach().abs().mean()))
        return super().judge(batch)

    def configure_players(self):
        generator, _ = super().configure_players()
        return [generator, Player("discriminator", self.discriminator, partial(SGD, lr=1e-2), **self.more())]


def shrink(game, module):
    for weight in module.parameters():
        weight.mul_(1 - game.seen / 100)


def clips(game):
    nn.utils.clip_grad_norm_(game.discriminator.parameters(), 1e-3)


# ---- Lightning's hooks ----


class Forgetting(Plain):
    """As ReDo and warm restarts: the hook changes the moments of a weight, if there are any."""

    def on_before_optimizer_step(self, optimizer):
        for weight in optimizer.param_groups[0]["params"]:
            if "exp_avg" in optimizer.state[weight]:
                optimizer.state[weight]["exp_avg"].mul_(0.5)


class Halves(Plain):
    """The same between steps."""

    def on_train_batch_end(self, *_):
        for optimizer in self.trainer.optimizers:
            Forgetting.on_before_optimizer_step(self, optimizer)


class Saves(Plain):
    """A checkpoint of one's own."""

    def on_train_batch_end(self, *_):
        self.trainer.optimizers[0].state_dict()


class Restarts(Plain):
    """A warm restart between steps: the optimizer forgets some moments, each in a way that people write."""

    def on_train_batch_end(self, *_):
        for optimizer in self.trainer.optimizers:
            first, second, third, _ = optimizer.param_groups[0]["params"]
            optimizer.state.pop(first, None)
            optimizer.state[second] = {}
            del optimizer.state[third]


class Twins(One):
    """Two networks, each with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.twin = mlp(6, 3)

    def configure_players(self):
        return [*super().configure_players(), Player("twin", self.twin, partial(Adam, lr=1e-2))]

    def configure_phases(self):
        yield Phase("play", self.play, ["net", "twin"])

    def play(self, batch):
        return super().play(batch) + (self.twin(batch["x"]) - 1).square().mean()


class Heirs(Twins):
    """As in evolutionary GANs: after each step the second network gets the moments of the first one."""

    def on_train_batch_end(self, *_):
        of_net, of_twin = (optimizer.state.values() for optimizer in self.trainer.optimizers)
        for own, other in zip(of_twin, of_net, strict=True):
            own.update(copy.deepcopy(other))


class Toggles(Plain):
    """As e4e's: the loss freezes the network again when it is done, so torch gives it no gradients."""

    def judge(self, batch):
        losses = super().judge(batch)
        self.discriminator.requires_grad_(False)
        return losses

    def configure_phases(self):
        return [phase for phase in super().configure_phases() if phase.name == "discriminator"]

    def on_train_batch_start(self, *_):
        self.discriminator.requires_grad_(True)


# ---- a forward that runs again, or on one rank only ----


class Tosses(nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.layer, self.past, self.calls = nn.Linear(6, 6), [], 0

    def forward(self, x):
        return torch.tanh(self.layer(x) * self.factor())

    def factor(self):
        return 0.5 + random.random() + np.random.rand()


class Counts(Tosses):
    def factor(self):
        self.calls += 1
        return self.calls


class Assigned(Tosses):
    def factor(self):
        return self.gain


class Keeps(Tosses):
    def factor(self):
        self.past.append(1)
        return len(self.past)


class OfItems(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)

    def forward(self, items):
        return super().forward(next(items) if isinstance(items, Iterator) else items)


class Iterating(nn.Sequential):
    def forward(self, x):
        return self[2](self[1](iter([self[0](x)])))


class OfCounts(OfItems):
    """It counts in an array of NumPy's, of which torch knows nothing."""

    def forward(self, x, counts):
        counts += 1
        return torch.tanh(super().forward(x) * counts[0])


class Tallied(nn.Sequential):
    def forward(self, x):
        counts = np.zeros(1)
        return self[2](self[1](self[0](x), counts), counts)


class Three(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Tanh(), parametrizations.weight_norm(nn.Linear(6, 6)))


class Exchanging(nn.Sequential):
    def forward(self, x):
        layer, self[2][0] = self[2][0], nn.Identity()
        without = super().forward(x)
        self[2][0] = layer
        return without + super().forward(x)


class Caching(nn.Sequential):
    def forward(self, x):
        with parametrize.cached():
            return super().forward(x) + super().forward(-x)


class Tossing(Plain):
    block, network = Tosses, nn.Sequential

    def __init__(self):
        super().__init__()
        random.seed(3)
        np.random.seed(3)
        self.generator = self.network(nn.Linear(4, 6), self.block(), self.block())

    def configure_players(self):
        generator, discriminator = super().configure_players()
        yield replace(generator, blocks=["1", "2"])
        yield discriminator


class Assigns(nn.Sequential):
    """As AdaIN in MUNIT: the network gives its layers what they scale with."""

    def forward(self, x):
        found = 0
        for gain in (x.mean(1, keepdim=True), 2.0):
            self[1].gain = self[2].gain = gain
            found = found + super().forward(x)
        return found


Counting, Assigning = having(Tossing, block=Counts), having(Tossing, block=Assigned, network=Assigns)
Keeping = having(Tossing, block=Keeps)


class Featured(Tossing):
    """Hooks in blocks leave features and a count with the game, as feature matching takes them."""

    block = Three

    def __init__(self):
        super().__init__()
        self.features, self.times = [], 0
        for layer in self.generator[1:]:
            layer[0].register_forward_hook(self.keep)

    def keep(self, layer, args, made):
        self.times += 1
        self.features.append(made)
        return made * (self.times % 3)

    def fake(self, real):
        made, features, self.features = super().fake(real), self.features, []
        return made + sum(each.mean() for each in features)


class InARow(Plain):
    """A hook keeps features in a list of the row of layers that is recomputed in groups."""

    def __init__(self):
        super().__init__()
        self.discriminator.features = []
        self.discriminator[1].register_forward_hook(lambda *passed: self.discriminator.features.append(passed[-1]))
        self.discriminator.register_forward_hook(self.take)

    @staticmethod
    def take(network, args, made):
        (kept,) = network.features
        network.features.clear()
        return made + kept.mean(1, keepdim=True)


LEFT = []


class FeaturedOutside(Featured):
    """Its hooks keep features in a list of the program, which is emptied after a forward and not before one."""

    def configure_players(self):
        generator, discriminator = super().configure_players()
        yield from (generator, Player("discriminator", discriminator.module))

    def configure_phases(self):
        return [phase for phase in super().configure_phases() if phase.name == "generator"]

    def keep(self, layer, args, made):
        LEFT.append(made)

    def fake(self, real):
        made, features = super().fake(real), [*LEFT]
        LEFT.clear()
        return made + sum(each.mean() for each in features)


class Perturbed(Plain):
    """Sharpness-aware: the gradient of the generator at other weights than its own."""

    def fool(self, batch):
        near = {name: 1.1 * weight for name, weight in self.generator.named_parameters()}
        return softplus(-self.discriminator(functional_call(self.generator, near, (batch["x"][:, :4],)))).mean()


# ---- hooks of a batch ----


class Augments(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])} if self.trainer.training else batch


class Degrades(Plain):
    """As Real-ESRGAN: by a picture of noise for all samples, whose size changes from step to step."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        noise = torch.randn((3, 5, 8, 4)[self.step % 4], 6, dtype=batch["x"].dtype).mean(0)
        return {**batch, "x": batch["x"] + noise + 0.1 * torch.randn_like(batch["x"])}


class DegradesSome(Plain):
    """It draws for the samples that it chooses, of which one rank has none in step 2."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.step != 2 or dist.get_rank() == 1:
            batch["x"] = batch["x"] + torch.randn(6, dtype=batch["x"].dtype)
        return {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}


class Normalises(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] - self.middle(batch["x"].mean(0))}

    middle = staticmethod(lambda own: own)


def changes(game, batch, index):
    batch["x"].add_(0.3 * torch.randn_like(batch["x"]))


def replaces(game, batch, index):
    batch["x"] = batch["x"] - batch["x"].mean(0)


# ---- optimizers that are not what their class says ----


def centred(parameters):
    optimizer = SGD(parameters, lr=1e-2)

    def centre(optimizer, *_):
        for weight in optimizer.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.grad -= weight.grad.mean()

    optimizer.register_step_pre_hook(centre)
    return optimizer


class Hooked(Plain):
    make = staticmethod(centred)

    def configure_players(self):
        generator, _ = super().configure_players()
        return [generator, Player("discriminator", self.discriminator, self.make)]


Unhooked = having(Hooked, make=partial(SGD, lr=1e-2))


def hook_late(game):
    for optimizer in game.trainer.optimizers:
        optimizer.register_step_post_hook(lambda *_: None)


class Regroups(Unhooked):
    """Layers of rates of their own, found by the weights' identity."""

    def on_train_start(self):
        (optimizer,) = (each for each in self.trainer.optimizers if isinstance(each, SGD))
        first, mine = optimizer.param_groups[0], set(map(id, self.discriminator[2].parameters()))
        chosen = [weight for weight in first["params"] if id(weight) in mine]
        first["params"] = [weight for weight in first["params"] if id(weight) not in mine]
        optimizer.add_param_group({"params": chosen, "lr": 1e-3})


class Lookahead(Optimizer):
    """Published ones call the optimizer inside of them `optimizer`, as Lightning's wrapper does."""

    shared = True

    def __init__(self, weights, lr=1e-2):
        self.optimizer = Adam(weights, lr=lr)
        super().__init__(self.optimizer.param_groups, {})

    def step(self):
        if self.shared:
            self.optimizer.state = self.state
        self.optimizer.step()


class Unmade(Optimizer):
    """As LSGM published its average of weights: around an optimizer, and without super().__init__."""

    def __init__(self, weights):
        self.optimizer = Adam(weights, lr=1e-2)
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


class Masters(Optimizer):
    """It has whole weights for those in bfloat16, a mask, and a count."""

    def __init__(self, weights, lr=1e-2):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state.update(master=weight.float(), mask=torch.ones_like(weight) > 0, count=torch.zeros((), dtype=int))
            state["count"] += 1
            state["master"][state["mask"]] -= 1e-3 * weight.grad.float()[state["mask"]] / state["count"]
            weight.copy_(state["master"])


class Objects(Masters):
    """As GaLore's: an object of its own, in which tensors are."""

    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["projector"] = Tosses()


def save(game, *_):
    game.trainer.save_checkpoint("early.ckpt")


# ---- the table ----

ALL = dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "fsdp"), 2)
PIPED = "generator=pipeline,*=ddp"
CLIPS = having(Plain, on_after_backward=clips)
NOT_WHOLE = "write on_before_optimizer_step(self, optimizer), where they are the means"
BATCH = "on_train_batch_start changes the batch: what it draws or computes is each rank's own"
ALONE = "a checkpoint would not have what "
EARLY = (
    "a checkpoint is saved while a step is played, or a step or epoch begins, and no training could go on from it; "
    "save in on_train_batch_end"
)
untried = partial(Refused, check=False)
AS_PLAIN = {"mutants": (Mutant("it does nothing", game=Plain),)}


def reads(more: Any, words: str, often: tuple[str, ...] = ()) -> Scene:
    game = having(Reads, more=more)
    return Scene(
        having(game, of_all=staticmethod(mean)), policies=ALL, often=often, checked=tuple(ALL), mutants=(),
        refused=(Refused(game, "zero3 ddp zero1 zero2 fsdp", (words, SAME)),),
    )  # fmt: skip


def resumed(make: Any, **more: Any) -> Scene:
    return Scene(having(Hooked, make=make), policies={"single": 1}, saved=("single",), steps=8, **more)


UPDATES = {
    "reads_rate": reads(
        lambda game: {"schedule": partial(LambdaLR, lr_lambda=lambda _: 1 / game.seen)},
        "player 'discriminator': 'lr' of group 0 is",
        ("zero3",),
    ),
    "reads_decay": reads(
        lambda game: {"ema": lambda _: min(1.0, game.seen / 10)},
        "player 'discriminator': the decay of its average is",
    ),
    "reads_weights": reads(
        lambda game: {"after": partial(shrink, game)},
        "player 'discriminator': after= has left other weights on each rank",
    ),
    "clips_after_backward": Scene(
        CLIPS, policies={"ddp": 2}, **AS_PLAIN,
        refused=(
            untried(CLIPS, "zero2 zero3 fsdp", NOT_WHOLE),
            untried(having(Micro2, on_after_backward=clips), "ddp", NOT_WHOLE),
        ),
    ),
    "moments_in_a_hook": Scene(
        Forgetting, policies={PIPED: 2}, often=(), **AS_PLAIN,
        refused=(untried(Forgetting, "zero1 zero3", "of which this rank's optimizer has a piece"),),
    ),
    "moments_between_steps": Scene(
        Restarts, policies={"zero1": 2, "zero3": 2, "fsdp": 2, "deepspeed2": 2},
        mutants=(Mutant("it goes on", game=Plain),),
        refused=(
            untried(Halves, "zero3 zero1", "of which this rank's optimizer has a piece"),
            untried(Saves, "zero3", "update each dict of optimizer.state.values()"),
        ),
    ),
    "moments_of_another": Scene(
        Heirs, policies={"zero1": 2, "zero3": 2, "fsdp": 2}, often=(), mutants=(Mutant("it keeps its own", game=Twins),)
    ),
    "frozen_when_done": Scene(Toggles, policies={"zero2": 2, "zero3": 2, "fsdp": 2}, **AS_PLAIN),
    "what_runs_again": Scene(  # to the last bit: test_recompute.py
        Tossing, policies={}, mutants=(),
        refused=(
            Refused(
                having(Tossing, block=OfItems, network=Iterating), "single+recompute",
                "block '1' of player 'generator' gets an iterator, and recompute calls the block twice; give it a list",
            ),
            Refused(
                having(Tossing, block=Three, network=Exchanging), "single+recompute",
                "phase 'generator': block '2' of player 'generator' has computed something else when backward ran it",
            ),
            Refused(
                having(Tossing, block=Three, network=Caching), "zero3+recompute",
                ("type --strategy generator=zero3,*=zero3+recompute", "has computed something else when backward"),
            ),
            Refused(
                having(Tossing, block=OfCounts, network=Tallied), "zero3+recompute",
                ("would not train as one device does", "With option recompute a block runs twice"),
            ),
            Refused(
                FeaturedOutside, "single+recompute",
                "if a hook in block '1' of player 'generator' fills a list, empty that list before each forward",
                check=False,
            ),
            Refused(Tossing, PIPED, "draws by NumPy or Python's random, which only the rank of its stage"),
        ),
    ),
    "weights_for_one_call": Scene(
        Perturbed, policies={"single+recompute": 1, "zero3+recompute": 2}, often=("single+recompute",),
    ),
    "hook_of_a_batch": Scene(
        Augments, policies={"ddp": 2}, checked=("ddp",), **AS_PLAIN,
        refused=(
            Refused(Normalises, "ddp", "would not train as one device does"),
            untried(having(Plain, on_train_batch_start=changes), "ddp", BATCH),
            untried(having(Plain, on_train_batch_start=replaces), "ddp", BATCH),
        ),
    ),
    "changing_draws_of_a_hook": Scene(
        Degrades, policies={"ddp": 2}, checked=("ddp",), steps=4, mutants=(Mutant("without a trial", "ddp"),),
        refused=(
            Refused(
                DegradesSome, "ddp",
                ("on_after_batch_transfer of step 2: ranks 0 and 1 draw 1 and 2 times", "draw before an `if`"),
            ),
        ),
    ),
    "a hook of a batch that asks all": Scene(
        having(Normalises, middle=staticmethod(mean)), policies={"ddp": 2}, often=(), checked=("ddp",),
    ),
    "hook_of_an_optimizer": Scene(
        Hooked, policies={"zero1": 2}, often=("zero1",), mutants=(Mutant("unhooked", game=Unhooked),),
        refused=(
            Refused(
                Hooked, "zero3",
                (
                    "SGD with hooks, a `step` or a state of your own may not give the same result on pieces",
                    "type --strategy discriminator=zero1,*=zero3, or leave these out",
                ),
            ),
            Refused(having(Unhooked, on_train_start=hook_late), "zero3", "do that in the function that makes it"),
            untried(
                Regroups, "single zero3",
                "player 'discriminator': a hook has changed which weights are in optimizer.param_groups",
            ),
        ),
    ),
    "optimizer_inside": resumed(
        Lookahead, mutants=(),
        refused=(
            untried(
                having(Hooked, make=type("Apart", (Lookahead,), {"shared": False})), "single",
                ALONE + "Apart keeps in 'optimizer', which has a state of its own",
            ),
            untried(
                having(Hooked, make=Unmade), "single",
                ALONE + "Unmade keeps in the form of its own state_dict(). If it averages",
            ),
            untried(
                having(Hooked, make=Objects), "single",
                "could not have the state of Objects: 'projector' is a tests.scenes.updates.Tosses, which",
            ),
        ),
    ),
    # torch gives all of a loaded state the type of the weight.
    "types_of_a_state": resumed(
        Masters, settings={"precision": "bf16-true"}, mutants=(Mutant("another", game=Unhooked),)
    ),
    "shapes_of_a_state": resumed(partial(Adafactor, lr=1e-2)),
    "a state of NAdam": resumed(NAdam, mutants=(Mutant("another", game=Unhooked),)),
    "saves_in_a_step": Scene(
        Plain, policies={}, mutants=(),
        refused=tuple(
            untried(having(Plain, **{f"on_{hook}": save}), "single", EARLY)
            for hook in ("before_zero_grad", "train_batch_start", "train_epoch_start")
        ),
    ),
}  # fmt: skip
