"""How each peer is used, by its own documentation: one function for each, which plays a task and returns the weights.

The same holds for all: networks, losses, optimizers and batches are the task's. In the generator's turn the
discriminator's weights require no gradient. Where a peer wraps networks, a turn calls the one that learns by its
wrapper.
"""

import warnings
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gan import GanModule, Phase, Player
from gan.bench.harness import ONLY_TRAINING
from gan.bench.peers.game import HandLoop, Task, weights
from strategies import PhaseStrategy

Weights = dict[str, Tensor]


def by_hand(task: Task) -> Weights:
    """Plain torch, with one all-reduce of the gradients in each turn."""
    hand = HandLoop(task)
    for batch in task.batches:
        hand.step(batch)
    return hand.weights()


def torch_ddp(task: Task) -> Weights:
    """Plain torch, with DistributedDataParallel around each network; one that does not learn is called without it."""
    generator, discriminator = task.networks()
    generator_ddp, discriminator_ddp = DistributedDataParallel(generator), DistributedDataParallel(discriminator)
    generator_adam, discriminator_adam = task.adam(generator.parameters()), task.adam(discriminator.parameters())
    for batch in task.batches:
        discriminator_adam.zero_grad()
        task.judge(generator, discriminator_ddp, batch).backward()
        discriminator_adam.step()

        discriminator.requires_grad_(False)
        generator_adam.zero_grad()
        task.fool(generator_ddp, discriminator, batch).backward()
        generator_adam.step()
        discriminator.requires_grad_(True)
    return weights(generator, discriminator)


def fsdp2(task: Task, held: bool = False) -> Weights:
    """FSDP2: every layer is a unit, then the network. With `held` the discriminator stays gathered during its turn."""
    networks = task.networks()
    mesh = init_device_mesh(task.device, (task.ranks,))
    for network in networks:
        for layer in network:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(network, mesh=mesh)
    generator, discriminator = networks
    generator_adam, discriminator_adam = task.adam(generator.parameters()), task.adam(discriminator.parameters())
    for batch in task.batches:
        if held:
            discriminator.set_reshard_after_forward(False)
            discriminator.set_reshard_after_backward(False)
        discriminator_adam.zero_grad()
        task.judge(generator, discriminator, batch).backward()
        if held:
            for module in discriminator.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            discriminator.set_reshard_after_forward(True)
            discriminator.set_reshard_after_backward(True)
        discriminator_adam.step()

        discriminator.requires_grad_(False)
        generator_adam.zero_grad()
        task.fool(generator, discriminator, batch).backward()
        generator_adam.step()
        discriminator.requires_grad_(True)
    return {name: shard.full_tensor() for name, shard in weights(generator, discriminator).items()}


class LightningGan(LightningModule):
    """Lightning's manual optimization, with its toggling of optimizers, as in its GAN example."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.task = task
        self.generator, self.discriminator = task.networks()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.task.adam(network.parameters()) for network in (self.generator, self.discriminator)]

    def training_step(self, batch: dict[str, Tensor]) -> None:
        generator_adam, discriminator_adam = self.optimizers()

        self.toggle_optimizer(discriminator_adam)
        discriminator_adam.zero_grad()
        self.manual_backward(self.task.judge(self.generator, self.discriminator, batch))
        discriminator_adam.step()
        self.untoggle_optimizer(discriminator_adam)

        self.toggle_optimizer(generator_adam)
        generator_adam.zero_grad()
        self.manual_backward(self.task.fool(self.generator, self.discriminator, batch))
        generator_adam.step()
        self.untoggle_optimizer(generator_adam)


def lightning(task: Task, strategy: str) -> Weights:
    """Lightning with its own strategy of that name."""
    module = LightningGan(task)
    _trainer(task, strategy).fit(module, task.batches)
    return weights(module.generator, module.discriminator)


class OurGan(GanModule):
    """The same game for this framework."""

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


def ours(task: Task, policy: str) -> Weights:
    """PhaseStrategy with that policy for both players."""
    module = OurGan(task)
    _trainer(task, PhaseStrategy(policy)).fit(module, task.batches)
    return weights(module.generator, module.discriminator)


def _trainer(task: Task, strategy: Any) -> Trainer:
    """A Trainer that only trains."""
    warnings.filterwarnings("ignore", module="lightning")
    return Trainer(
        accelerator=task.device,
        devices=task.ranks,
        strategy=strategy,
        precision="64-true" if task.dtype == torch.float64 else "32-true",
        max_epochs=1,
        use_distributed_sampler=False,
        **ONLY_TRAINING,
    )


def accelerate_ddp(task: Task) -> Weights:
    """Accelerate: all goes through `prepare`, and the backward pass through `accelerator.backward`."""
    from accelerate import Accelerator

    _forget()
    accelerator = Accelerator(cpu=task.device == "cpu")
    networks = task.networks()
    adams = [task.adam(network.parameters()) for network in networks]
    generator, discriminator, generator_adam, discriminator_adam = accelerator.prepare(*networks, *adams)
    for batch in task.batches:
        discriminator_adam.zero_grad()
        accelerator.backward(task.judge(accelerator.unwrap_model(generator), discriminator, batch))
        discriminator_adam.step()

        discriminator.requires_grad_(False)
        generator_adam.zero_grad()
        accelerator.backward(task.fool(generator, accelerator.unwrap_model(discriminator), batch))
        generator_adam.step()
        discriminator.requires_grad_(True)
    return weights(accelerator.unwrap_model(generator), accelerator.unwrap_model(discriminator))


def _forget() -> None:
    """Reset Accelerate, which keeps its state for the whole process: a peer plays twice in one."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def _plugin(task: Task) -> Any:
    from accelerate import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=_deepspeed_config(task, 2))


def accelerate_deepspeed(task: Task) -> Weights:
    """Accelerate with DeepSpeed: one Accelerator prepares both networks."""
    from accelerate import Accelerator

    _forget()
    accelerator = Accelerator(deepspeed_plugin=_plugin(task))
    networks = task.networks()
    adams = [task.adam(network.parameters()) for network in networks]
    generator, discriminator, generator_adam, discriminator_adam = accelerator.prepare(*networks, *adams)
    return _accelerated(
        task, (accelerator, generator, generator_adam), (accelerator, discriminator, discriminator_adam)
    )


def accelerate_deepspeed_two(task: Task) -> Weights:
    """Accelerate with DeepSpeed: an Accelerator and a plugin for each network, as its guide for several models says."""
    from accelerate import Accelerator

    _forget()
    first = Accelerator(deepspeed_plugins={"generator": _plugin(task), "discriminator": _plugin(task)})
    second = Accelerator()
    prepared = []
    for name, accelerator, network in zip(
        ("generator", "discriminator"), (first, second), task.networks(), strict=True
    ):
        first.state.select_deepspeed_plugin(name)
        prepared.append((accelerator, *accelerator.prepare(network, task.adam(network.parameters()))))
    return _accelerated(task, *prepared)


def _accelerated(task: Task, generating: tuple, discriminating: tuple) -> Weights:
    (of_generator, generator, generator_adam), (of_discriminator, discriminator, discriminator_adam) = (
        generating,
        discriminating,
    )
    assert of_generator.distributed_type == of_discriminator.distributed_type == "DEEPSPEED"
    for batch in task.batches:
        of_discriminator.backward(task.judge(generator, discriminator, batch))
        discriminator_adam.step()
        discriminator_adam.zero_grad()

        discriminator.requires_grad_(False)
        of_generator.backward(task.fool(generator, discriminator, batch))
        generator_adam.step()
        generator_adam.zero_grad()
        discriminator.requires_grad_(True)
    return weights(generator.module, discriminator.module)


def deepspeed(task: Task, stage: int) -> Weights:
    """DeepSpeed: an engine for each network, with `engine.backward` and `engine.step`."""
    import deepspeed

    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
    engines = []
    for network in task.networks():
        adam = task.adam(network.parameters())
        engine, *_ = deepspeed.initialize(model=network, optimizer=adam, config=_deepspeed_config(task, stage))
        engines.append(engine)
    generator, discriminator = engines
    for batch in task.batches:
        discriminator.backward(task.judge(generator, discriminator, batch))
        discriminator.step()

        discriminator.module.requires_grad_(False)
        generator.backward(task.fool(generator, discriminator, batch))
        generator.step()
        discriminator.module.requires_grad_(True)
    with deepspeed.zero.GatheredParameters([*generator.module.parameters(), *discriminator.module.parameters()]):
        return weights(generator.module, discriminator.module)


def _deepspeed_config(task: Task, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": task.batch_size // task.ranks,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # else DeepSpeed clips at 1.0
        "steps_per_print": 10**9,
    }
