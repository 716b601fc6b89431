"""How each peer is used, by its own documentation: one function for each, which plays a task and returns the weights.

Where a peer wraps networks, a turn calls the one that learns by its wrapper.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gan import GanModule, Phase, Player
from gan.bench.device import train
from gan.bench.task import HandLoop, Task, Weights, alternate, weights
from strategies import PhaseStrategy


def by_hand(task: Task) -> Weights:
    """Plain torch, with one all-reduce of the gradients in each turn."""
    hand = HandLoop(task)
    hand.play(task.batches)
    return weights(*hand.networks)


def torch_ddp(task: Task) -> Weights:
    """Plain torch, with DistributedDataParallel around each network."""
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
        yield Phase("discriminator", self.judge, "discriminator", second_order=self.task.penalty)
        yield Phase("generator", self.fool, "generator")

    def judge(self, batch: dict[str, Tensor]) -> Tensor:
        return self.task.judge(self.generator, self.discriminator, batch)

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return self.task.fool(self.generator, self.discriminator, batch)


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
    """Accelerate with DeepSpeed: one Accelerator prepares both networks, or each has its own and a plugin of its own.

    The second is what its guide for several models says.
    """
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
