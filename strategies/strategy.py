"""PhaseStrategy: the Lightning strategy that plays a game's phases and asks each player's policy what differs."""

import os
import secrets
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn

from gan import noise
from gan.checkpoint import Share, load_module_state
from gan.errors import UserError
from gan.module import GanModule
from gan.phase import Losses, Phase
from gan.pool import ImagePool
from nets.norm import convert_sync_batchnorm
from strategies import auto, random_state
from strategies.checkpoint.lightning_io import WholeCheckpointIO
from strategies.checkpoint.module_state import module_state
from strategies.checkpoint.ranks import Ranks
from strategies.choice import Choice, choices
from strategies.guard import Guard
from strategies.loss_scale import LossScale
from strategies.micro_batches import cut, rows
from strategies.options.compile import played
from strategies.policies import dp as threads
from strategies.policies.ddp import Replicated
from strategies.policies.deepspeed import DeepSpeed1, DeepSpeed2, DeepSpeed3
from strategies.policies.dp import Replicas, Threads
from strategies.policies.policy import Policy, World
from strategies.policies.replica import ADVICE
from strategies.policies.zero1 import Zero1
from strategies.policies.zero2 import Zero2
from strategies.policies.zero3 import Zero3
from strategies.processes.launcher import launcher
from strategies.processes.lost_ranks import Survivor
from strategies.processes.stopping import Ending, Stopped

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Policy, Replicated, Zero1, Zero2, Zero3, DeepSpeed1, DeepSpeed2, DeepSpeed3, Threads)
}
POLICIES |= {"fsdp": Zero3, "deepspeed": DeepSpeed2}


class PhaseStrategy(DDPStrategy):
    """Trains a `GanModule`, each player under a policy of its own.

    `policy` is a name for all players, or a mapping from player to name in which `*` stands for the rest:
    `PhaseStrategy("zero3")`, `PhaseStrategy({"generator": "zero3", "*": "ddp"})`; as the command line writes it,
    `PhaseStrategy("generator=zero3,*=ddp")`. Options of a policy stand behind it: `zero3+offload`.
    `check_replicas` compares the players on all ranks after every phase. Processes, devices and the process group are
    Lightning's own: the other arguments are those of its DDPStrategy.
    """

    def __init__(
        self,
        policy: str | Mapping[str, str] = "ddp",
        *,
        check_replicas: bool = False,
        start_method: str = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        _refuse_other(checkpoint_io)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.choice = choices(policy, {**POLICIES, "auto": auto.Auto})
        self.threaded = _threaded(self.choice)
        if self.threaded and self.cluster_environment is None:
            self.cluster_environment = LightningEnvironment()
        self.replicas: Replicas | None = None
        self.check_replicas = check_replicas
        self.policies: dict[str, Policy] = {}
        self.guard = Guard()
        self.ending = Ending()
        self.losses: dict[str, Tensor] = {}
        self.seed = 0
        self._random_states: list[dict[str, Any]] | None = None
        self._after_step: dict[str, Any] | None = None
        self._set_aside: dict[str, Any] | None = None
        self.survivor: Survivor | None = None
        self.advice = ""  # what to type when a rank was lost

    # ---- one phase ----

    def run(self, phase: Phase, batch: Any) -> None:
        """Play one phase: losses, gradients, one update of each learner. The template of all policies."""
        learners = [self.policies[name] for name in phase.learners]
        self._begin(phase)
        for learner in self._one_by_one(learners, phase):
            learner.drop_gradients()
        scale = min((learner.loss_scale.scale for learner in learners if learner.loss_scale), default=1.0)

        with ExitStack() as held:
            held.enter_context(played(phase, [n for n, p in self.policies.items() if p.compiled]))
            for policy in self.policies.values():
                held.enter_context(policy.hold(phase))

            # Accumulate gradients; learners' gradients are reduced during the last backward.
            parts = cut(batch, phase.micro_batches, phase.name)
            sums: dict[str, Tensor] = {}
            for index, part in enumerate(parts):
                losses = self._losses(phase, part, index)
                for name, loss in losses.items():
                    sums[name] = sums.get(name, 0) + loss.detach() / len(parts)
                total = sum(losses.values()) * (scale / len(parts))
                if not self._any(total.requires_grad):
                    raise UserError(
                        f"phase '{phase.name}': its loss depends on no weight of {', '.join(phase.learners)}; "
                        f"is something detached, or computed under no_grad?"
                    )
                for learner in learners:
                    total = learner.arm(total, last=index == len(parts) - 1)
                if total.requires_grad:
                    total.backward()
            self._agree(phase)
            sums = self._means(sums)

            # Update weights; a player whose gradients are not finite skips its turn, on all ranks together.
            for learner in self._one_by_one(learners, phase):
                norms = learner.finish(scale)
                norm = torch.linalg.vector_norm(norms)
                self.losses[f"{phase.name}/{learner.player.name}_grad_norm"] = norm
                finite = all(map(_finite, norms.tolist()))
                if finite:
                    learner.update(norm)
                if learner.loss_scale is not None:
                    learner.loss_scale.update(finite)
                self.guard.saw(phase, learner, finite, sums, self)
                learner.drop_gradients()
        self.losses.update({f"{phase.name}/{name}": loss for name, loss in sums.items()})
        self.ending.played += 1
        if self.check_replicas:
            self._compare_replicas(phase)

    def _losses(self, phase: Phase, part: Any, index: int) -> dict[str, Tensor]:
        """The named losses of one micro-batch, computed in the run's precision."""
        size = rows(part)
        rank, ranks = self._place()
        here = rank * size * phase.micro_batches + index * size
        total = ranks * size * phase.micro_batches
        place = noise.Place((self.seed, self.lightning_module.step, phase.name), here, size, total)
        with noise.at(place), self._forward():
            losses: Losses = phase.loss(part)
        named = {"loss": losses} if isinstance(losses, Tensor) else losses
        if not isinstance(named, Mapping) or not named:
            raise UserError(
                f"phase '{phase.name}': its loss must return a scalar or named scalars, got {type(losses).__name__}"
            )
        for name, loss in named.items():
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise UserError(f"phase '{phase.name}': its loss '{name}' is not a scalar tensor; take its mean")
        return {name: loss.reshape(()) for name, loss in named.items()}

    def _begin(self, phase: Phase) -> None:
        """Every player knows its part; under dp the first replica's policies have one."""
        if (replica := threads.here()) is not None and replica.number > 0:
            replica.learn(self.policies, phase.learners)
            return
        for policy in self.policies.values():
            policy.begin(phase)

    def _agree(self, phase: Phase) -> None:
        """Ranks that gathered weights piece by piece, each in an order of its own, have gathered nonsense."""
        orders = [policy.agree() for policy in self.policies.values()]
        if all(order is None for order in orders):
            return
        code = zlib.crc32(repr(orders).encode())
        largest = torch.tensor([code, -code], device=self.root_device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if largest[0] != -largest[1]:
            raise UserError(
                f"phase '{phase.name}' read weights in another order on another rank; where layers are chosen by "
                f"sample, type zero3+whole, which gathers a player once a phase"
            )

    @contextmanager
    def all_learning(self) -> Iterator[None]:
        """Every player that can learn requires gradients, for what several phases will use."""
        if (replica := threads.here()) is not None and replica.number > 0:
            with replica.all_learning(self.policies):
                yield
            return
        before = {name: policy.learning for name, policy in self.policies.items()}
        second_order = any(phase.second_order for phase in self.lightning_module.phases)
        for policy in self.policies.values():
            policy.learn(not policy.player.frozen)
        try:
            with ExitStack() as stack:
                for policy in self.policies.values():
                    if second_order and policy.compiled is not None:
                        stack.enter_context(policy.compiled.as_written())
                yield
        finally:
            for name, policy in self.policies.items():
                policy.learn(before[name])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """All players with their averaged weights, where they keep an average."""
        if threads.here() is not None:
            raise UserError(f"averaged() in a step: under strategy dp the first device alone has averages; {ADVICE}")
        with ExitStack() as stack:
            for policy in self.policies.values():
                stack.enter_context(policy.averaged())
            yield

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All players' parameters are whole on all ranks for a while, between phases; every rank must call it."""
        with ExitStack() as stack:
            for policy in self.policies.values():
                stack.enter_context(policy.gathered())
            yield

    def _compare_replicas(self, phase: Phase) -> None:
        """Raise where a weight differs between ranks: a replica that has drifted trains another network."""
        for policy in self.policies.values():
            with policy.gathered():
                for name, weight in policy.player.module.named_parameters():
                    first = weight.detach().clone()
                    if self.world_size > 1:
                        dist.broadcast(first, 0)
                    if not self.reduce_boolean_decision(torch.equal(first, weight.detach())):
                        raise UserError(
                            f"after phase '{phase.name}' of step {self.lightning_module.step}, weight '{name}' of "
                            f"player '{policy.player.name}' differs between ranks; does its loss depend on the rank?"
                        )

    # ---- one step ----

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """End here if any rank was told to: the step before is over, logged, and saved by whoever saves."""
        if self.ending.look():
            raise Stopped

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One pass over the phases, which Lightning counts as one step whatever the number of optimizers."""
        game = self.lightning_module
        self.guard.raise_if_hopeless()
        game.forget_shared()
        self.losses = {}
        play = game.training_step if self.replicas is None else self.replicas.step
        output = play(*args, **kwargs)
        game.forget_shared()
        self._log(game)
        progress = game.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        self._after_step = random_state.capture()
        return output

    def _log(self, game: GanModule) -> None:
        """Log the means over ranks of the step's losses, where a logger is due or the epoch ends.

        Not in every step: Lightning's bookkeeping for a handful of numbers takes milliseconds.
        """
        if not (game.trainer._logger_connector.should_update_logs or game.trainer.is_last_batch):
            return
        if self.losses:
            values = torch.stack([loss.float() for loss in self.losses.values()])
            self.losses = dict(zip(self.losses, self.reduce(values, reduce_op="mean"), strict=True))
        skipped = {f"{name}/skipped": float(policy.skipped) for name, policy in self.policies.items() if policy.skipped}
        game.log_dict({**self.losses, **skipped})

    def on_train_end(self) -> None:
        """The author's weights are whole again. A run whose last steps were all skipped says so."""
        for policy in self.policies.values():
            policy.settle()
        self.guard.raise_if_hopeless()

    # ---- one process for several devices ----

    @property
    def num_processes(self) -> int:
        """Lightning's, of which there is one for all devices under dp."""
        return 1 if self.threaded else super().num_processes

    @property
    def root_device(self) -> torch.device:
        """Lightning's; under dp the first of the devices."""
        return self.parallel_devices[0] if self.threaded else super().root_device

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Lightning's; in a step under dp from all replicas."""
        if threads.here() is not None:
            return self.replicas.gather(tensor, sync_grads)
        return super().all_gather(tensor, group, sync_grads)

    def _place(self) -> tuple[int, int]:
        """Which rank this is of how many; under dp the replicas count."""
        replica = threads.here()
        return (self.global_rank, self.world_size) if replica is None else (replica.number, len(self.replicas))

    def _one_by_one(self, learners: list[Policy], phase: Phase) -> Iterable[Policy]:
        """The learners; under dp for the first replica to deal with, while the others wait."""
        return learners if self.replicas is None else self.replicas.for_the_first(learners, f"phase '{phase.name}'")

    def _means(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's losses; under dp the means over the replicas."""
        return losses if self.replicas is None else self.replicas.means(losses)

    def _any(self, value: bool) -> bool:
        """Whether it is true, under dp for any replica."""
        return value if self.replicas is None else any(self.replicas.every("the sum of losses", value))

    def _forward(self) -> AbstractContextManager[Any]:
        """The run's precision around a loss."""
        context = self.precision_plugin.forward_context()
        return context if self.replicas is None else self.replicas.forward(context)

    def _one_process(self) -> None:
        """Refuse to be one of several: each would train on everything."""
        launched = [env for env in (TorchElasticEnvironment, SLURMEnvironment) if env.detect()]
        others = max([self.num_nodes, *(env().world_size() for env in launched)])
        if others > 1:
            raise UserError(f"strategy dp is one process on one machine, and there are {others}; {ADVICE}")

    # ---- set-up ----

    def _configure_launcher(self) -> None:
        """Refuse what cannot be before any process is started; one process is this one: nothing to launch."""
        if self.threaded:
            self._one_process()
        ranks = self.num_processes * self.num_nodes
        for player, choice in self.choice.items():
            if choice.policy in POLICIES and (POLICIES[choice.policy].max_ranks or ranks) < ranks:
                whose = "all players" if player == "*" else f"player '{player}'"
                raise UserError(
                    f"policy '{choice.policy}' of {whose} trains on one device and there are {ranks} ranks; "
                    f"type --strategy ddp, or --devices 1"
                )
        if ranks > 1:
            self._launcher = launcher(self, self._start_method)

    def setup_distributed(self) -> None:
        """One process needs no process group either; several are tied together, to end together."""
        if self.num_processes * self.num_nodes > 1:
            super().setup_distributed()
            if self.survivor is not None:
                self.survivor.tie(self.cluster_environment.main_address, self.advice, self.broadcast, self._gather)
        else:
            self.set_world_ranks()

    def setup(self, trainer: Trainer) -> None:
        """Lightning's order of set-up, with players adopted one by one instead of one wrapped module."""
        training = trainer.state.fn == TrainerFn.FITTING
        game = self._game(self.lightning_module)
        self.accelerator.setup(trainer)
        if training and self._layer_sync is not None:
            convert_sync_batchnorm(game)
        self.precision_plugin.convert_module(game)
        self.model_to_device()
        if self.world_size > 1:
            _sync_module_states(game)
        game.assemble()
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))
        self.seed, run = self.broadcast((seed, secrets.token_hex(8)))
        self.ending = Ending(run if self.world_size > 1 else "")
        if training and self.world_size > 1:
            # In place of Lightning's collectives for the same.
            trainer._signal_connector._sigterm_notifier_fn = self.ending.wish
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._adopt_players(game, training)
        self.setup_precision_plugin()

    def _adopt_players(self, game: GanModule, training: bool) -> None:
        world = World(self.world_size, self.global_rank, self.root_device, self.num_processes)
        chosen = self._decided(game, self._chosen(list(game.players)))
        self.policies = {
            name: POLICIES[chosen[name].policy](player, world, chosen[name].options)
            for name, player in game.players.items()
        }
        for name, policy in self.policies.items():
            if "bf16" in policy.options and self.precision_plugin.precision != "bf16-mixed":
                raise UserError(
                    f"player '{name}': option bf16 shows layers weights in bfloat16, which need autocast beside them; "
                    f"type --precision bf16-mixed, or leave bf16 out"
                )
        self.guard = Guard()
        if training:
            # ModelCheckpoint thinks that a manual optimization wants weights from before the update.
            warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
            self._warn_of_unsynchronised_batch_norm()
        for policy in self.policies.values():
            policy.adopt(training)
            if _scaled(self.precision_plugin):
                policy.loss_scale = LossScale()
        if training and self.threaded and len(self.parallel_devices) > 1:
            self._make_replicas(game)
        owned = {id(p) for player in game.players.values() for p in player.module.parameters()}
        for parameter in game.parameters():
            if id(parameter) not in owned:
                parameter.requires_grad_(False)
        learners = [policy for policy in self.policies.values() if policy.optimizer is not None]
        self.optimizers = [policy.optimizer for policy in learners]
        self.lr_scheduler_configs = [
            LRSchedulerConfig(policy.schedule, name=f"lr-{policy.player.name}")
            for policy in learners
            if policy.schedule is not None
        ]

    def _make_replicas(self, game: GanModule) -> None:
        self.replicas = Replicas(game, self.parallel_devices, self.policies)
        rank_zero_warn(
            f"strategy dp: one process, and a replica with a thread for each of {len(self.parallel_devices)} devices. "
            f"All weights are copied to the others in every step; {self.root_device} alone adds up gradients and holds "
            f"the optimizers' states and averages; the threads take turns at Python. That is for a quick try; to "
            f"train, {ADVICE}"
        )

    def _chosen(self, players: list[str]) -> dict[str, Choice]:
        unknown = [name for name in self.choice if name not in (*players, "*")]
        missing = [name for name in players if name not in self.choice and "*" not in self.choice]
        if unknown:
            raise UserError(
                f"--strategy names no player of this game: {', '.join(unknown)}; known: {', '.join(players)}"
            )
        if missing:
            raise UserError(f"--strategy says nothing of {', '.join(missing)}; add '*=ddp' for the rest")
        return {name: self.choice.get(name, self.choice.get("*")) for name in players}

    def _decided(self, game: GanModule, chosen: dict[str, Choice]) -> dict[str, Choice]:
        """With a policy for each player that was left to `auto`, the same on all ranks, and said in a table."""
        open_ = [name for name, choice in chosen.items() if choice.policy == "auto"]
        if not open_:
            return chosen
        sizes = {name: auto.size_of(game.players[name]) for name in chosen}
        free = torch.tensor(auto.memory(self.root_device, self.num_processes), dtype=torch.float64)
        free = self.reduce(free.to(self.root_device), reduce_op="min").item()
        taken = sum(
            sizes[name].on_a_rank(str(choice), self.world_size) for name, choice in chosen.items() if name not in open_
        )
        decisions = auto.decide({name: sizes[name] for name in open_}, taken, free, self.world_size)
        if self.is_global_zero:
            print(auto.told(decisions, free), flush=True)
        return {**chosen, **{each.player: each.choice(chosen[each.player]) for each in decisions}}

    def _game(self, module: LightningModule) -> GanModule:
        if not isinstance(module, GanModule):
            raise UserError(
                f"PhaseStrategy trains a gan.GanModule, got {type(module).__name__}; "
                f"derive it from GanModule, or use one of Lightning's own strategies"
            )
        return module

    def _warn_of_unsynchronised_batch_norm(self) -> None:
        if self.world_size == 1 and not (self.threaded and len(self.parallel_devices) > 1):
            return
        for policy in self.policies.values():
            for name, module in policy.player.module.named_modules():
                if (
                    isinstance(module, nn.modules.batchnorm._BatchNorm)
                    and type(module).__module__ == "torch.nn.modules.batchnorm"
                    and type(module) is not nn.SyncBatchNorm
                    and not policy.player.frozen
                ):
                    rank_zero_warn(
                        f"player '{policy.player.name}': batch norm '{name}' sees only its own rank's samples, so "
                        f"training differs from one device's; type Trainer(sync_batchnorm=True)"
                    )
                    return

    # ---- evaluation uses averaged weights, and disturbs no training ----

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """With averaged weights. Around each step, not all of them: a checkpoint written between holds training's."""
        with self.averaged():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """With averaged weights."""
        with self.averaged():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """With averaged weights."""
        with self.averaged():
            return super().predict_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Put training's random states aside: those after its last step, for the loader has drawn since."""
        self._set_aside = self._after_step or random_state.capture()

    def on_validation_end(self) -> None:
        """Go on as if nothing had been drawn."""
        random_state.restore(self._set_aside)
        self._set_aside = None

    # ---- checkpoints ----

    @property
    def checkpoint_io(self) -> WholeCheckpointIO:
        """Ours alone knows shares."""
        return WholeCheckpointIO(self._ranks())

    def _ranks(self) -> Ranks:
        return Ranks(self.global_rank, self.world_size)

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        _refuse_other(io)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Averages exist once the players are adopted."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shares of the weights, and what else the modules keep."""
        return module_state(self.lightning_module, self._dealt(), self.is_global_zero, self._slots)

    def _slots(self, pool: ImagePool) -> dict[int, dict[int, Tensor]]:
        """The images that this rank answers for; under dp those of all replicas."""
        replicas = [] if self.replicas is None else self.replicas.replicas[1:]
        pools = [pool, *(replica.own(pool) for replica in replicas)]
        return {place: images for each in pools for place, images in each.get_extra_state().items()}

    def _dealt(self) -> dict[nn.Parameter, Share | None]:
        return {weight: share for policy in self.policies.values() for weight, share in policy.shares().items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's checkpoint, with the players' averages and scales and every rank's random states.

        Every rank writes its shares; where to, the first says. The file system must be one that all machines share.
        """
        checkpoint["game"] = type(self.lightning_module).__name__
        checkpoint["players"] = {name: policy.state_dict() for name, policy in self.policies.items()}
        checkpoint["seed"] = self.seed
        checkpoint["random_states"] = self._gather(self._set_aside or random_state.capture())
        where = self._gather(os.path.abspath(filepath))[0]
        self.checkpoint_io.save_checkpoint(checkpoint, where, storage_options)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """This rank's shares of a player's optimizer state."""
        optimizer = getattr(optimizer, "optimizer", optimizer)
        return next(policy for policy in self.policies.values() if policy.optimizer is optimizer).optimizer_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Weights and averages, after a look whether they are of this game at all. Each rank reads what it owns."""
        game = type(self.lightning_module).__name__
        saved = list(checkpoint.get("players", ()))
        if checkpoint.get("game") != game or saved != list(self.policies):
            raise UserError(
                f"the checkpoint is of {checkpoint.get('game', 'another program')} with players "
                f"{', '.join(saved) or 'unknown'}; this game is {game} with players {', '.join(self.policies)}"
            )
        ranks = self._ranks()
        ranks.each(lambda: self._load_weights(checkpoint["state_dict"], strict))
        for policy in self.policies.values():
            policy.loaded()
        ranks.each(lambda: self._load_averages(checkpoint["players"]))

    def _load_weights(self, saved: Mapping[str, Any], strict: bool) -> None:
        try:
            load_module_state(self.lightning_module, saved, self._dealt(), strict)
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint's networks are of other sizes than this run's; resume with the settings it was "
                f"trained with. {error}"
            ) from error

    def _load_averages(self, saved: Mapping[str, Any]) -> None:
        for name, policy in self.policies.items():
            policy.load_average(saved[name]["ema"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Everything else that training goes on with."""
        learners = [policy for policy in self.policies.values() if policy.optimizer is not None]

        def load() -> None:
            for policy, state in zip(learners, checkpoint["optimizer_states"], strict=True):
                policy.load_optimizer_state(state)

        self._ranks().each(load)
        for name, policy in self.policies.items():
            policy.load_training_state(checkpoint["players"][name])
        self.seed = checkpoint["seed"]
        self._random_states = checkpoint["random_states"]

    def on_train_start(self) -> None:
        """After a load, once set-up has drawn what it draws, go on with the random states of training."""
        states, self._random_states = self._random_states, None
        if states is None:
            return
        if len(states) == self.world_size:
            random_state.restore(states[self.global_rank])
        else:
            random_state.reseed(noise.seed_for(self.seed, self.lightning_module.step, self.global_rank))

    def _gather(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def teardown(self) -> None:
        """Give the networks back as their author made them."""
        if self.replicas is not None:
            self.replicas.close()
            self.replicas = None
        for policy in self.policies.values():
            policy.release()
        super().teardown()


def _threaded(choice: Mapping[str, Choice]) -> bool:
    """Whether replicas in threads stand for ranks: for all players, as there is one backward for all."""
    policies = {POLICIES.get(each.policy) for each in choice.values()}
    if Threads not in policies:
        return False
    if len(policies) > 1:
        others = ", ".join(sorted({each.policy for each in choice.values()} - {"dp"}))
        raise UserError(
            f"strategy dp is for all players together, and some have {others}; type --strategy dp, or ddp in place "
            f"of dp"
        )
    return True


def _scaled(precision: Precision) -> bool:
    """Whether gradients would vanish without a loss scale."""
    return isinstance(precision, MixedPrecision) and precision.precision == "16-mixed"


def _refuse_other(io: Any) -> None:
    if io is not None and not isinstance(io, WholeCheckpointIO):
        raise UserError(
            f"{type(io).__name__} cannot write what ranks hold in shares, and PhaseStrategy writes its checkpoints "
            f"itself; leave {type(io).__name__} out"
        )


def _finite(number: float) -> bool:
    return number - number == 0
