"""The same small GAN under other frameworks and ours: who is exact, and how fast.

Two networks learn in turns, without a gradient penalty (plain) and with one (r1). Every peer is used as its
documentation says. It runs in processes of its own with a time limit, so that it may fail or hang.
  difference  of its weights after ten steps from those of one device. It is exact to 1e-10 in float64, and to 1e-6 for
              DeepSpeed, which computes in float32
  of by hand  its speed compared with a loop by hand in plain torch: 1.00 is as fast. The two run in turns in the same
              processes, in float32, and the fastest round of each counts
  payload     the bytes that collectives get on a rank in a step, of input and output the larger (a network needs
              twice as long to all-reduce a tensor as to gather or scatter it)
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from datasets.batches import check_divides
from gan import GanModule, Phase, Player
from gan.bench.device import train
from gan.bench.harness import Benchmark, Cell, Column, Figures, in_world
from gan.bench.task import STEPS, Feed, Task, Weights, alternate, hand_loop, weights
from gan.files.errors import UserError
from gan.files.system import cores
from strategies import PhaseStrategy
from strategies.policies import POLICIES

GAMES = ("plain", "r1")
THRESHOLD = {torch.float64: 1e-10, torch.float32: 1e-6}  # of the largest difference of a weight after ten steps


@dataclass(frozen=True)
class Peer:
    """A line of the table: how it plays a task, the packages that it needs, and its number format."""

    title: str
    way: Callable[[Task], Weights]
    needs: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return self.title


def peers() -> Iterator[Peer]:
    yield Peer("torch, by hand", by_hand)
    yield Peer("torch, DDP", torch_ddp)
    yield Peer("torch, FSDP2", fsdp2)
    yield Peer("torch, FSDP2 kept gathered", partial(fsdp2, held=True))
    for strategy in ("ddp", "ddp_find_unused_parameters_true"):
        yield Peer(f"Lightning {strategy}", partial(lightning, strategy=strategy))
    yield Peer("Accelerate, DDP", accelerate_ddp, ("accelerate",))
    for number, words in ((1, "one Accelerator"), (2, "two Accelerators")):
        way = partial(accelerate_deepspeed, accelerators=number)
        yield Peer(f"Accelerate, DeepSpeed 2, {words}", way, ("accelerate", "deepspeed", "transformers"), torch.float32)
    for stage in (1, 2, 3):
        way = partial(deepspeed, stage=stage)
        yield Peer(f"DeepSpeed {stage}, two engines", way, ("deepspeed",), torch.float32)
    for name, policy in POLICIES.items():
        if name != "dp" and (policy.max_ranks is None or policy.max_ranks > 1):  # a rank of dp is one of ddp
            own = ((), torch.float64) if policy.package is None else ((policy.package,), torch.float32)
            yield Peer(f"ours, {name}", partial(ours, policy=name), *own)


def compare(way: Callable[[Task], Weights], task: Task, rounds: int, steps: int) -> Figures:
    """On each rank: compare the weights after ten steps with one device, then measure the speed."""
    task = replace(task, rank=dist.get_rank())

    # Is it exact?
    # pyrefly: ignore[bad-argument-type] - torch reads any sequence
    batches = DataLoader([task.batch(step) for step in range(STEPS)], batch_size=None)
    one = replace(task, rank=0, ranks=1)
    alone = by_hand(replace(one, batches=map(one.batch, range(STEPS))))
    difference = distance(way(replace(task, batches=batches)), alone)
    verdict = "exact" if difference <= THRESHOLD[task.dtype] else "WRONG"

    # How fast is it? All are measured in the same number format.
    task = replace(task, dtype=torch.float32)
    feed = Feed(task, rounds, steps)
    way(replace(task, batches=feed))
    peer, hand = min(feed.peer_seconds), min(feed.hand_seconds)
    speed = {"steps/s": steps / peer, "of by hand": hand / peer, "payload, kB": feed.payload}
    return {"verdict": verdict, "difference": difference, **speed}


def distance(one: Weights, other: Weights) -> float:
    """The largest difference of a weight; NaN where a weight is NaN."""
    assert one.keys() == other.keys()
    return torch.stack([(one[name].double() - other[name].double()).abs().max() for name in other]).max().item()


class PeersBenchmark(Benchmark[Cell]):
    name, places = "peers", ("game", "peer")
    rounds = 1  # of processes; those of steps are in them
    columns = (
        *(Column("verdict"), Column("difference", ".0e")),
        *(Column("steps/s", ".1f"), Column("of by hand", ".2f"), Column("payload, kB", ".1f", 1000)),
    )

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--games", nargs="+", choices=GAMES, default=list(GAMES), help="with and without a penalty")
        add("--only", nargs="+", metavar="WORD", help="only peers whose line has one of these words, such as ours DDP")
        add("--width", type=PositiveInt, default=512, help="width of the networks' three hidden layers")
        add("--batch-size", type=PositiveInt, default=128, help="samples a step, of all ranks together")
        add("--ranks", type=PositiveInt, default=2, help="processes")
        add("--device", default="cpu", help="cpu, or cuda and the like: then each rank has one of its own")
        add("--rounds", type=PositiveInt, default=20, help="rounds that are timed")
        add("--steps", type=PositiveInt, default=5, help="steps of the peer and of the loop by hand in a round")
        add("--limit", type=float, default=180, help="seconds after which a peer is said to hang")

    def parse(self, argv: Sequence[str]) -> Namespace:
        own = super().parse(argv)
        if own.ranks < 2:
            raise UserError("peers differ on several ranks only; type --ranks 2 or more")
        check_divides(own.batch_size, own.ranks, "--batch-size ")
        devices = torch.accelerator.device_count()
        if own.device != "cpu" and devices < own.ranks:
            words = f"{own.ranks} ranks need a device each, and there are {devices}"
            raise UserError(f"{words}; leave out --device {own.device}")
        own.peers = [peer for peer in peers() if not own.only or any(word in peer.title for word in own.only)]
        if not own.peers:
            raise UserError(f"no peer's line has {' or '.join(own.only)}; there are {'; '.join(map(str, peers()))}")
        return own

    def cells(self) -> Iterator[Cell]:
        return product(self.settings.games, self.settings.peers)

    def measure(self, cell: Cell) -> Figures:
        """The figures of the first rank; what a peer needs and is not installed is an error."""
        (game, peer), own = cell, self.settings
        missing = [package for package in peer.needs if find_spec(package) is None]
        if missing:
            raise UserError(f"skipped: {' and '.join(missing)} not installed")
        task = Task(game == "r1", own.width, own.batch_size, peer.dtype, 0, own.ranks, device=own.device)
        how = {"ranks": own.ranks, "threads": 1, "limit": own.limit, "device": own.device}
        found = in_world(compare, peer.way, task, own.rounds, own.steps, **how)
        worst = next((each for each in found if each["verdict"] != "exact"), found[0])
        return {**found[0], "verdict": worst["verdict"], "difference": worst["difference"]}

    def heading(self) -> str:
        own = self.settings
        return (
            f"{own.ranks} ranks on {own.device}, of one thread each, three hidden layers of {own.width}, batch "
            f"{own.batch_size}; {cores()} cores, load {os.getloadavg()[0]:.1f} at the end"
        )


# ---- how each peer is used, by its own documentation ----


def by_hand(task: Task) -> Weights:
    """Plain torch, with one all-reduce of the gradients in each turn."""
    networks, play = hand_loop(task)
    play(task.batches)
    return weights(*networks)


def torch_ddp(task: Task) -> Weights:
    generator, discriminator = task.networks()
    wrapped = DistributedDataParallel(generator), DistributedDataParallel(discriminator)
    alternate(task, (generator, wrapped[1]), (wrapped[0], discriminator), task.adams(generator, discriminator))
    return weights(generator, discriminator)


def fsdp2(task: Task, held: bool = False) -> Weights:
    """FSDP2: every layer is a unit, then the network. With `held` the discriminator stays gathered during its turn."""
    networks = generator, discriminator = task.networks()
    mesh = init_device_mesh(task.device, (task.ranks,))
    for network in networks:
        for layer in (*(layer for layer in network if isinstance(layer, nn.Linear)), network):
            fully_shard(layer, mesh=mesh)

    def hold(now: bool) -> None:
        for module in discriminator.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(not now, recurse=False)
                module.set_reshard_after_backward(not now, recurse=False)
                if not now:
                    module.reshard()

    def backward(then_hold: bool, loss: Tensor) -> None:
        loss.backward()
        hold(then_hold)

    backwards = (Tensor.backward, Tensor.backward)
    if held:
        hold(True)
        backwards = partial(backward, True), partial(backward, False)  # the generator's turn is the last of a step
    alternate(task, networks, networks, task.adams(*networks), backwards)
    shards = weights(generator, discriminator).items()
    return {name: shard.full_tensor() if isinstance(shard, DTensor) else shard for name, shard in shards}


class LightningGan(LightningModule):
    """Lightning's manual optimization, with its toggling of optimizers, as in its GAN example."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.task = task
        self.generator, self.discriminator = task.networks()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.task.adams(self.generator, self.discriminator))

    def training_step(self, batch: dict[str, Tensor]) -> None:
        generator_adam, discriminator_adam = self.optimizers()
        for adam, loss in ((discriminator_adam, self.task.judge), (generator_adam, self.task.fool)):
            self.toggle_optimizer(adam)
            adam.zero_grad()
            self.manual_backward(loss(self.generator, self.discriminator, batch))
            adam.step()
            self.untoggle_optimizer(adam)


class OurGan(GanModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.generator, self.discriminator = task.networks()

    def configure_players(self) -> Any:
        yield Player("generator", self.generator, self.task.adam)
        yield Player("discriminator", self.discriminator, self.task.adam)

    def configure_phases(self) -> Any:
        task, networks = self.task, (self.generator, self.discriminator)
        yield Phase("discriminator", partial(task.judge, *networks), "discriminator", second_order=task.penalty)
        yield Phase("generator", partial(task.fool, *networks), "generator")


def lightning(task: Task, strategy: Any, game: type[LightningGan | OurGan] = LightningGan) -> Weights:
    module = game(task)
    precision = "64-true" if task.dtype == torch.float64 else "32-true"
    own = {"accelerator": task.device, "devices": task.ranks, "precision": precision}
    train(module, task.batches, strategy, use_distributed_sampler=False, **own)
    return weights(module.generator, module.discriminator)


def ours(task: Task, policy: str) -> Weights:
    return lightning(task, PhaseStrategy(policy), OurGan)


def accelerate_ddp(task: Task) -> Weights:
    """Accelerate: all goes through `prepare`, and the backward pass through `accelerator.backward`."""
    from accelerate import Accelerator

    _forget()
    accelerator = Accelerator(cpu=task.device == "cpu")
    networks = task.networks()
    *wrapped, generator_adam, discriminator_adam = accelerator.prepare(*networks, *task.adams(*networks))
    generator, discriminator = map(accelerator.unwrap_model, wrapped)
    judging, fooling = (generator, wrapped[1]), (wrapped[0], discriminator)
    alternate(task, judging, fooling, (generator_adam, discriminator_adam), (accelerator.backward,) * 2)
    return weights(generator, discriminator)


def _forget() -> None:
    """Reset Accelerate, which keeps its state for the whole process: a peer plays twice in one."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def accelerate_deepspeed(task: Task, accelerators: int) -> Weights:
    """Accelerate with DeepSpeed: one Accelerator prepares both networks, or each has its own, as its guide says."""
    from accelerate import Accelerator, DeepSpeedPlugin

    _forget()
    plugin, networks = lambda: DeepSpeedPlugin(hf_ds_config=_deepspeed_config(task, 2)), task.networks()
    adams = task.adams(*networks)
    if accelerators == 1:
        both = [Accelerator(deepspeed_plugin=plugin())] * 2
        *engines, generator_adam, discriminator_adam = both[0].prepare(*networks, *adams)
        adams = generator_adam, discriminator_adam
    else:
        both = [Accelerator(deepspeed_plugins={"generator": plugin(), "discriminator": plugin()}), Accelerator()]
        prepared = []
        for name, own, network, adam in zip(("generator", "discriminator"), both, networks, adams, strict=True):
            both[0].state.select_deepspeed_plugin(name)
            prepared.append(own.prepare(network, adam))
        engines, adams = zip(*prepared, strict=True)
    assert all(accelerator.distributed_type == "DEEPSPEED" for accelerator in both)
    alternate(task, engines, engines, adams, tuple(accelerator.backward for accelerator in both))
    return weights(*(engine.module for engine in engines))


def deepspeed(task: Task, stage: int) -> Weights:
    """DeepSpeed: an engine for each network, with `engine.backward` and `engine.step`, which also zeroes gradients."""
    import deepspeed

    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
    networks, config = task.networks(), _deepspeed_config(task, stage)
    engines = tuple(
        deepspeed.initialize(model=network, optimizer=adam, config=config)[0]
        for network, adam in zip(networks, task.adams(*networks), strict=True)
    )
    steps = tuple(SimpleNamespace(step=engine.step, zero_grad=lambda: None) for engine in engines)
    alternate(task, engines, engines, steps, tuple(engine.backward for engine in engines))
    with deepspeed.zero.GatheredParameters([weight for network in networks for weight in network.parameters()]):
        return weights(*networks)


def _deepspeed_config(task: Task, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": task.batch_size // task.ranks,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # else DeepSpeed clips at 1.0
        "steps_per_print": 10**9,
    }
