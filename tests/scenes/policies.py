"""What policies do with weights, gradients and groups of ranks, in games that are hard on them."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

from gan import GanModule, Phase, Player
from tests.support.composite import Composite
from tests.support.hard_games import Plain, mlp
from tests.support.parity import single
from tests.support.scene import ENGINES, POLICIES, Refused, Scene, having, made_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.gain = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.gain * torch.tanh(self.norm(self.linear(x)))


class Network(nn.Module):
    """Weights outside of its blocks, of no dimension, of two blocks, and of another memory format."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 1)
        self.picture = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.blocks[3].linear.weight = self.blocks[0].linear.weight

    def forward(self, x):
        return self.head(self.features(x))

    def features(self, x):
        x = self.stem(x)
        x = x + self.picture(x.view(-1, 1, 2, 4)).mean(1).reshape(-1, WIDTH)
        for block in self.blocks:
            x = block(x)
        return x @ self.blocks[1].linear.weight  # after the block's own call


class Odd(GanModule):
    """Networks that are called, read past their calls, and differentiated twice; a graph that two phases use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.maker, self.judge, self.teacher = Network(), Network(), Network()

    def configure_players(self):
        adam = partial(Adam, lr=1e-2)
        yield Player("maker", self.maker, adam, ema=0.8)
        yield Player("judge", self.judge, adam, clip=0.5)
        yield Player("teacher", self.teacher)

    def configure_phases(self):
        yield Phase("judge", self.judged, "judge", micro_batches=2)
        yield Phase("penalty", self.penalty, "judge", second_order=True)
        yield Phase("maker", self.made, "maker", micro_batches=2)

    def fake(self, batch):
        return self.maker.features(batch["x"])[:, :6]

    def judged(self, batch):
        fake = self.shared("fake", self.fake, batch).detach()
        decay = self.judge.blocks[2].linear.weight.square().mean() + self.judge.head.weight.square().mean()
        return {"score": (self.judge(fake) - self.judge(batch["x"])).mean(), "decay": 1e-2 * decay}

    def penalty(self, batch):
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(x).sum(), x, create_graph=True)
        return slope.square().mean()

    def made(self, batch):
        fake = self.shared("fake", self.fake, batch)
        near = (self.teacher.features(fake) - self.teacher.features(batch["x"])).square().mean()
        return -self.judge(fake).mean() + near + self.maker(batch["x"]).square().mean()


class Named(Odd):
    def configure_players(self):
        maker, judge, teacher = super().configure_players()
        yield from (maker, replace(judge, blocks=["blocks.1", "head"]), teacher)


class Led(Named):
    """A player that follows another one, and names no blocks of its own."""

    def __init__(self):
        super().__init__()
        self.led = Network()

    def configure_players(self):
        yield from super().configure_players()
        yield Player("led", self.led, follows="judge", ema=0.9)

    def configure_phases(self):
        yield Phase("judge", lambda batch: (self.judge(batch["x"]) - self.led(batch["x"]) - 1).square().mean(), "judge")


class Listed(Plain):
    def configure_players(self):
        generator, judge = super().configure_players()
        yield Player("generator", nn.ModuleList([generator.module]), generator.optimizer)
        yield judge


class Overwriting(Odd):
    """As U-Nets and networks with activations before convolutions do."""

    def __init__(self):
        super().__init__()
        for block in self.judge.blocks:
            block.linear = nn.Sequential(nn.LeakyReLU(0.2, inplace=True), block.linear)

    def configure_phases(self):
        yield Phase("judge", self.overwrite, "judge")

    def overwrite(self, batch):
        x = self.judge.stem(batch["x"])
        for block in self.judge.blocks:
            x = block(x)
        return x.square().mean()


class Chosen(Odd):
    """Ranks call blocks of different sizes in orders of their own."""

    orders = (0, 1), (1, 0)

    def configure_phases(self):
        yield Phase("judge", self.chosen, "judge")

    def chosen(self, batch):
        x = self.judge.stem(batch["x"])
        for number in self.orders[dist.get_rank()]:
            x = self.judge.blocks[number](x)
        return x.square().mean()


class Crossed(Plain):
    """Both learn in one phase, and backward reaches them in the one order on even ranks, in the other on odd ones."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(6, 6), nn.Linear(6, 6)

    def configure_phases(self):
        yield Phase("both", self.play, ["generator", "discriminator"])

    def play(self, batch):
        order = [self.generator, self.discriminator]
        if self.trainer.global_rank % 2:
            order.reverse()
        losses = {net: net(batch["x"]).square().mean() for net in order}  # backward takes the last one first
        return losses[self.generator] + 3 * losses[self.discriminator]


class LowFirst(Plain):
    """Its generator's first weight is in bfloat16, the others in float64."""

    def __init__(self):
        super().__init__()
        self.double().generator.low = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))


def begins_with_a_norm():
    """A layer norm of samples, which on a CPU takes weights of other kinds than its input's only one way round."""
    return nn.Sequential(nn.LayerNorm(6), mlp(6, 1))


def compiled():
    network = mlp(4, 6)
    network.compile(backend="eager")
    return network


class Renamed(nn.Linear):
    """Has its weight under another name in files, and asks for it when it loads, and for the file's version."""

    _version = 2

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kernel"] = destination.pop(f"{prefix}weight")

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        assert local_metadata["version"] == 2
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Hooked(Plain):
    """The older functions, which make a weight in each forward, and a layer that loads in its own way."""

    def __init__(self) -> None:
        super().__init__()
        for network, norm in ((self.generator, weight_norm), (self.discriminator, nn.utils.spectral_norm)):
            for layer in network:
                if isinstance(layer, nn.Linear):
                    norm(layer)
        self.generator.append(Renamed(6, 6))


def weight_norm(layer: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)


class Adjoint(torch.autograd.Function):
    """As an ODE's solver: its backward asks for all weights, then for their memory, and computes the layers again."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return Adjoint.through(x, weights)

    @staticmethod
    def backward(ctx, slope):
        x, *weights = (each.as_strided(each.shape, each.stride()) for each in ctx.saved_tensors)
        with torch.enable_grad():
            own = [each.detach().requires_grad_() for each in (x, *weights)]
            return torch.autograd.grad(Adjoint.through(own[0], own[1:]), own, slope)

    @staticmethod
    def through(x, weights):
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x


class Solve(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        return Adjoint.apply(x, *(block.linear.weight for block in self.blocks))


def solved():
    return nn.Sequential(nn.Linear(6, WIDTH), Solve(), Block(), Block(), nn.Linear(WIDTH, 1))


class Solver(Plain):
    second_order = False

    def __init__(self):
        super().__init__()
        self.discriminator = solved()

    def configure_phases(self):
        judge, fool = super().configure_phases()
        yield replace(judge, second_order=self.second_order)
        yield replace(fool, second_order=self.second_order)


# ---- the table ----


def read_otherwise(game: Any) -> Refused:
    said = "phase 'judge' read weights in another order on another rank"
    return Refused(game, "zero3 fsdp", (said, "+whole, which gathers a player once a phase"), check=False)


FEWER = having(Chosen, orders=((1, 2, 3), (1, 3)))
BLOCKS = {"fsdp": 2, **dict.fromkeys(["fsdp+whole", "fsdp+offload", "fsdp+recompute"], 2), "fsdp+hybrid:2": 4}
BLOCKS |= dict.fromkeys(["maker=fsdp,*=zero3", "judge=fsdp+whole,*=ddp"], 2)
PIECES = dict.fromkeys(["zero1", "zero2", "zero3+whole", "critic=zero3+whole,*=zero3"], 2)

POLICY_GAMES = {
    # `make matrix` has these under every policy.
    "a_plain_game": Scene(
        Plain, policies={}, mutants=(),
        refused=(
            Refused(
                Plain, "zero2+hybrid:3",
                ("r': 2 ranks cannot be parted into groups of 3", "type zero2+hybrid:N with an N that divides 2"),
            ),
            Refused(
                Plain, "zero3+hybrid:1",
                "gives every rank a whole copy; leave +hybrid out to shard over all ranks, or type ddp"
            ),
            Refused(
                Plain, "generator=zero3+bf16,*=ddp",
                ("player 'generator': with option bf16", "type --precision bf16-mixed"),
            ),
            Refused(
                made_of(Plain, discriminator=begins_with_a_norm), "zero3+bf16",
                ("'discriminator' has the option bf16", "type --strategy discriminator=zero3,*=zero3+bf16"),
                settings={"precision": "bf16-mixed", "batches": single}, unsaid="'generator' has the option",
            ),
        ),
    ),
    "a clip beside a weight in bfloat16": Scene(
        LowFirst, policies={"zero2": 2, "zero3": 2, "fsdp": 2}, settings={"precision": "32-true"}
    ),
    "norms_by_hooks": Scene(
        Hooked, saved=("zero3", "ddp"), arrives=(("pipeline", 2), ("fsdp", 2), ("single", 1)),
        policies={**POLICIES, **ENGINES, "dp": 2, "pipeline": 2}, often=("zero3",),
    ),
    "two_that_learn_together": Scene(
        Crossed, policies=dict.fromkeys(["ddp", "zero1", "zero2"], 2), often=("ddp",),
    ),
    # Under zero3 as for players of many buckets: gathered when they are read, let go, gathered again.
    "in_buckets": Scene(
        Composite, policies=PIECES, four=tuple(PIECES), often=("zero2",), bucket=100,
        refused=(read_otherwise(Chosen), read_otherwise(FEWER)),
    ),
    "blocks": Scene(
        Odd, policies=BLOCKS, four=("fsdp",), often=("fsdp",), checked=tuple(BLOCKS)[1:], steps=2,
    ),
    "blocks of a follower": Scene(Led, policies={"fsdp": 2}, often=()),
    "a backward that needs all blocks at once": Scene(
        Solver, policies={"zero3": 2}, bucket=100, steps=2,
        refused=tuple(
            Refused(Solver, "fsdp", "computes with weights that FSDP2 has freed meanwhile", check=check)
            for check in (True, False)
        ),
    ),
    "a backward that needs all blocks at once, of second order": Scene(
        having(Solver, second_order=True), policies={"fsdp": 2}, often=()
    ),
    "a list of networks": Scene(
        Listed, policies={"fsdp": 2}, often=(),
        refused=(
            Refused(
                made_of(Plain, generator=compiled), "fsdp",
                "'generator': the game compiles its network, and 'fsdp' must gather",
            ),
        ),
    ),
    "blocks that overwrite their input": Scene(Overwriting, policies={"fsdp": 2}, often=("fsdp",), steps=2),
}  # fmt: skip
