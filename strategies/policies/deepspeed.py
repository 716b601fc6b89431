"""deepspeed1, deepspeed2 and deepspeed3: a player's learning shared out by an engine of DeepSpeed."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.optim import Optimizer

from gan.checkpoint import Share
from gan.errors import UserError
from gan.phase import Phase, Player
from strategies.policies.deepspeed_config import settings
from strategies.policies.policy import World
from strategies.policies.resharded import Visiting
from strategies.policies.sharded import Owner
from strategies.policies.zero2 import Zero2
from strategies.sharding.reads import listen
from strategies.sharding.saved_tensors import kept_as_places

KIND = torch.float32  # of the numbers that DeepSpeed computes with


class DeepSpeed2(Zero2):
    """A DeepSpeed engine of ZeRO stage 2 reduces the player's gradients, owns its state and spreads its weights.

    Communication, in order: nothing in forward and backward; after the last backward the engine reduces its gradients,
    a bucket of `reduce_bucket_size` at a time; one number a weight for the norms, and one byte for each weight whose
    gradient is exactly zero, as in ddp; in the update the engine gathers the weights. `averaged` gathers twice.

    Held on each rank: weights whole, and once more this rank's share of them, which its optimizer works on; gradients
    (whole until they are reduced), optimizer state and average / ranks. With `offload` the share of the weights, its
    gradients, optimizer state and average lie in the CPU's memory. A frozen player is whole on each rank.

    [Note: twins]
    Called as DeepSpeed means it, an engine counts each weight's gradients during the backward of its own loss: a second
    engine in that loss is a KeyError, a gradient penalty an IndexError, and when the raw network is called the weights
    are silently wrong. So the engine never sees the network. It is made for twins, parameters of its own that show the
    same memory. Phases run on the author's network with plain autograd, micro-batches add up in its weights, and then
    the gradients are handed to the twins and reduced at once (`engine.coalesce_grad_reduction`). Whatever plain torch
    differentiates is therefore exact. The price: no reduction while backward still runs, as zero2 has it.

    [Note: pieces]
    DeepSpeed lays the twins end to end and steps the rank's part as one long weight. Plain Adam leaves alone a weight
    that the loss did not reach, and counts steps for each weight. So the optimizer that DeepSpeed calls is a stand-in:
    it lets the player's own step on pieces, views of that part, one a weight, as in the zero policies.
    """

    name = "deepspeed2"
    stage = 2
    package = "deepspeed"
    takes = frozenset({"offload", "config"})

    def __init__(self, player: Player, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(player, world, options)
        self.settings = settings(player, self.name, self.stage, self.options)
        self.engine: Engine | None = None
        self.reduced = False
        odd = {p.dtype for p in self._sharded().values()} - {KIND}
        if odd:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in odd)
            raise UserError(
                f"player '{player.name}': strategy '{self.name}' computes in float32 and its weights are {kinds}; "
                f"type --precision 32-true, or --strategy {player.name}=zero{self.stage},*={self.name}"
            )
        if self.alone and "offload" in self.options:
            raise UserError(
                f"player '{player.name}': '{self.name}+offload' needs two processes or more, there is one; "
                f"leave offload out, or type --devices 2"
            )

    def _sharded(self) -> dict[str, nn.Parameter]:
        """The parameters that the engine takes."""
        return self.weights

    # ---- the verbs ----

    def lay_out(self) -> "list[Engine]":
        """One engine takes the bucket's place."""
        others = {name: p for name, p in self._sharded().items() if name not in self.weights}
        self.engine = Engine(self.weights, others, self.stage, self.world, self.group, self.settings, self._step)
        if self.engine.lost:
            import deepspeed

            raise UserError(
                f"player '{self.player.name}': DeepSpeed {deepspeed.__version__} lays out '{self.engine.lost}' in a "
                f"way that strategy '{self.name}' does not know; type pip install '.[deepspeed]', or --strategy "
                f"{self.player.name}=zero{self.stage},*={self.name}"
            )
        return [self.engine] if self.weights else []

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """No backward communicates."""
        return loss

    def finish(self, scale: float) -> Tensor:
        """The engine reduces; then as in zero2."""
        if not self.buckets:
            return super().finish(scale)
        self.drop_reduced()
        self.engine.reduce()
        self.reduced = True
        gradients = [piece.grad for piece in self.owned.values()]
        if scale != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / scale)
        norms = self._norms()
        self._forget_unreached(norms)
        return norms

    def update(self, norm: Tensor) -> None:
        """Clip, let the engine step and spread, then the schedule and the average."""
        Owner.update(self, norm)
        if self.buckets:
            autograd.graph.increment_version(self.stepped)

    def step(self) -> None:
        """The engine's step, which calls `_step` and spreads what came of it."""
        if not self.buckets:
            super().step()
            return
        self.engine.engine.step()
        self.reduced = False
        if not self.engine.engine.was_step_applied():
            raise UserError(
                f"player '{self.player.name}': DeepSpeed did not step, as the norm of all gradients is beyond float32; "
                f"try clip=1.0 or a lower learning rate"
            )

    def _step(self) -> None:
        """See [Note: pieces]. DeepSpeed may call it several times a step; afterwards there is nothing to step on."""
        self.optimizer.step()
        for piece in self.owned.values():
            piece.grad = None

    def drop_reduced(self) -> None:
        """Gradients of a skipped update must leave the engine: it steps on nothing."""
        if self.reduced:
            for piece in self.owned.values():
                piece.grad = None
            self.engine.engine.step()
            self.reduced = False

    def spread(self) -> None:
        """The shares have changed: show it in the weights."""
        if self.engine is not None:
            self.engine.spread()

    def release(self) -> None:
        """No engine any more; the author's parameters have memory of their own."""
        self.reduced = False
        super().release()
        if self.engine is not None and not self.buckets:
            self.engine.release()
        self.engine = None


class DeepSpeed1(DeepSpeed2):
    """As deepspeed2, by an engine of ZeRO stage 1: its gradients are whole on each rank until the update."""

    name = "deepspeed1"
    stage = 1


class DeepSpeed3(Visiting, DeepSpeed2):
    """As deepspeed2, by an engine of ZeRO stage 3: the weights are shared out too, also those of a frozen player.

    Communication, in order: before a phase the engine gathers each learner, one all-gather a weight, and another
    player when the phase's loss first reads it; after the last backward as deepspeed2; in the update only numbers. What
    the phase gathered it lets go: a player that no phase reads moves nothing. `averaged` gathers once.

    Held on each rank between phases: everything / ranks, the weights twice. While a phase uses it a player's weights
    are whole, and remain so for a graph that outlives the phase: see saved_tensors.py.
    """

    name = "deepspeed3"
    stage = 3

    def __init__(self, player: Player, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(player, world, options)
        self.playing = False

    def _sharded(self) -> dict[str, nn.Parameter]:
        return dict(self.player.module.named_parameters())

    def cut(self) -> None:
        """Also the parameters that do not learn; and be told when the player is used."""
        super().cut()
        if self.alone or not self._sharded():
            return
        if self.engine is None:
            self.lay_out()
        listen(self.player.module, self._used)
        for module in self.player.module.modules():
            self.hooks.append(module.register_forward_pre_hook(self._used, prepend=True))

    def _used(self, *_: Any) -> None:
        if self.playing:
            self.gather()

    def gather(self) -> None:
        """The player's weights are whole until it rests."""
        if self.engine is not None:
            self.engine.gather()

    @contextmanager
    def hold(self, phase: Phase) -> Iterator[None]:
        """Whole for the phase. After an error nobody is waited for."""
        if self.engine is None:
            yield
            return
        if self.learning and self.weights:
            self.gather()
        self.playing = True
        try:
            with kept_as_places():
                yield
        finally:
            self.playing = False  # who reads now, gathers nothing
        self.rest()

    def step(self) -> None:
        """What was gathered before is of no use."""
        super().step()
        self.rest()

    @property
    def there(self) -> bool:
        """Whether the engine has gathered them."""
        return self.engine is None or self.engine.gathered

    def rest(self) -> None:
        """Keep the shares alone."""
        if self.engine is not None:
            self.engine.let_go()

    def settle(self) -> None:
        """Gather for good."""
        self.gather()

    def shares(self) -> dict[nn.Parameter, Share | None]:
        """Frozen parameters, too."""
        if self.engine is None:
            return {}
        return {weight: self.engine.share_of(name) for name, weight in self.engine.everything.items()}


class Engine:
    """DeepSpeed's engine for the twins of some weights, which serves a policy as its bucket. See [Note: twins].

    `others` are parameters that do not learn, which stage 3 shares out as well. `step` is called in the engine's step.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        others: Mapping[str, nn.Parameter],
        stage: int,
        world: World,
        group: Any,
        config: Mapping[str, Any],
        step: Callable[[], None],
    ) -> None:
        deepspeed = package(world.device)
        self.weights, self.world, self.sharded = dict(weights), world, stage == 3
        self.everything = {**weights, **others}
        self.twins = {
            name: nn.Parameter(weight.detach().reshape(-1), requires_grad=name in weights)
            for name, weight in self.everything.items()
        }
        learning = [self.twins[name] for name in weights]
        local_rank = world.rank if world.device.index is None else world.device.index
        with mock.patch.dict(os.environ, LOCAL_RANK=os.environ.get("LOCAL_RANK", str(local_rank))):
            self.engine, *_ = deepspeed.initialize(
                model=_Twins(self.twins.values()),
                model_parameters=learning,
                optimizer=_Stepper(learning, step) if learning else None,
                config=dict(config),
                dist_init_required=False,  # the process group is there
            )
        self.optimizer = self.engine.optimizer
        self._gather = deepspeed.zero.GatheredParameters
        self.gathered, self.lost = True, ""
        self.kind = self.shown = KIND
        if self.sharded:
            for twin in self.twins.values():
                twin.ds_process_group = group  # another player's gathers may come in another order on another rank
        self._lay_out()
        if self.sharded:
            self.let_go()
        else:
            self._show()

    def _lay_out(self) -> None:
        """Find the piece of each weight in the long ones that the engine steps. See [Note: pieces]."""
        self.places: dict[str, tuple[int, int, int]] = {}  # name: which long one, from where, how many
        self.firsts: dict[str, int] = {}  # where in the weight that is
        rank, names = self.world.rank, {id(twin): name for name, twin in self.twins.items()}
        self.longs: list[Tensor] = []
        if self.sharded and self.weights:
            self.longs = self.optimizer.fp32_partitioned_groups_flat
            for number, twins in enumerate(self.optimizer.fp16_groups):
                offset = 0
                for twin in twins:
                    name, share = names[id(twin)], twin.partition_numel()
                    self.firsts[name] = rank * share
                    count = min(share, self.weights[name].numel() - rank * share)
                    if count > 0:
                        self.places[name] = (number, offset, count)
                    offset += share
        elif self.weights:
            self.longs = self.optimizer.single_partition_of_fp32_groups
            share, start = self.longs[0].numel(), 0
            for name, weight in self.weights.items():
                low, high = max(start, rank * share), min(start + weight.numel(), (rank + 1) * share)
                self.firsts[name] = low - start
                if low < high:
                    self.places[name] = (0, low - rank * share, high - low)
                start += weight.numel()
        self.pieces = {
            name: nn.Parameter(self.longs[number].detach()[offset : offset + count])
            for name, (number, offset, count) in self.places.items()
        }
        # The engine has copied the weights there: a look whether they are where they are thought to be.
        for name, piece in self.pieces.items():
            if not torch.equal(piece.detach(), self.cut(name, self.weights[name].detach())):
                self.lost = name

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor in the shape of a weight, where the share lies."""
        count = self.places[name][2] if name in self.places else 0
        flat = tensor.reshape(-1)
        part = flat[self.firsts[name] : self.firsts[name] + count] if count else flat[:0]
        return part.to(self.longs[0].device)

    # ---- the weights ----

    def _show(self) -> None:
        for name, weight in self.everything.items():
            weight.data = self.twins[name].data.view(weight.shape)

    def gather(self) -> None:
        """The weights as the ranks' shares have them now."""
        if self.gathered:
            return
        with self._gather(list(self.twins.values())):
            self._show()
        self.gathered = True

    def let_go(self) -> None:
        """Keep the share alone; the parameters show not-a-numbers, which nobody can take for weights."""
        if self.sharded and self.gathered:
            self.gathered = False
            nothing = torch.full((), torch.nan, dtype=KIND, device=self.world.device)
            for weight in self.everything.values():
                weight.data = nothing.expand(weight.shape)

    def spread(self) -> None:
        """The shares have changed by other hands than the engine's."""
        if self.sharded:
            self._lower()
            self.let_go()
        else:
            self.optimizer.update_lp_params()

    def _lower(self) -> None:
        """Stage 3 gathers from a share of its own."""
        for name, piece in self.pieces.items():
            self.twins[name].ds_tensor.data[: piece.numel()].copy_(piece.detach())

    def share_of(self, name: str) -> Share | None:
        """This rank's share of a weight, if it has any."""
        weight = self.everything[name]
        if name in self.weights:
            first, count = self.firsts[name], self.places[name][2] if name in self.places else 0
            own = self.pieces[name].detach() if count else None
        else:
            twin = self.twins.get(name)
            size = -(-weight.numel() // self.world.size) if twin is None else twin.ds_tensor.numel()
            first = self.world.rank * size
            count = min(size, weight.numel() - first)
            own = None if twin is None or count <= 0 else twin.ds_tensor.data[:count]
        if count <= 0:
            return None
        # Once released, the author's parameter is the only one that anybody writes to.
        own = weight.detach().reshape(-1)[first : first + count] if self.engine is None else own
        return Share(own, weight.shape, first)

    def release(self) -> None:
        """Give every weight memory of its own again, and let the engine go. Communicates nothing."""
        for weight in self.everything.values():
            weight.data = weight.data.clone()
        self.gathered = True
        self.engine.destroy()
        self.engine = self.optimizer = None
        self.twins, self.longs, self.sharded = {}, [], False

    # ---- their gradients ----

    def reduce(self) -> None:
        """Average the gradients over the ranks, and hand the pieces their parts."""
        for name, weight in self.weights.items():
            twin, gradient = self.twins[name], weight.grad
            twin.data = weight.data.view(-1)  # in stage 3 it shows nothing, which can have no gradient
            twin.grad = torch.zeros_like(twin) if gradient is None else gradient.reshape(-1)
            weight.grad = None
        with self.engine.coalesce_grad_reduction():
            pass  # on leaving, what lies on the twins is reduced
        if self.longs[0].device != self.world.device:
            torch.accelerator.synchronize(self.world.device)  # gradients are on their way to the CPU
        if self.sharded:
            for twin in self.twins.values():
                twin.data = twin.data.new_empty(0)
        found: dict[tuple[int, int], Tensor] = {}
        for number, long in enumerate(self.longs):
            offset = 0
            for part in [long.grad] if long.grad is not None else self.optimizer.averaged_gradients[number]:
                found[number, offset] = part.view(-1)
                offset += part.numel()
        for name, piece in self.pieces.items():
            number, offset, count = self.places[name]
            whole = found.get((number, offset))
            piece.grad = found[number, 0][offset : offset + count] if whole is None else whole[:count]


class _Twins(nn.Module):
    """Parameters without a network."""

    def __init__(self, twins: Any) -> None:
        super().__init__()
        self.twins = nn.ParameterList(twins)


class _Stepper(Optimizer):
    """What DeepSpeed takes for the optimizer. See [Note: pieces]."""

    def __init__(self, twins: list[nn.Parameter], step: Callable[[], None]) -> None:
        super().__init__(twins, {"lr": 0.0})
        self.let_step = step

    def step(self, closure: None = None) -> None:
        """Step the player's own."""
        self.let_step()


def package(device: torch.device) -> Any:
    """DeepSpeed, for this kind of device."""
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it says much about itself, on every rank
    with mock.patch.dict(os.environ, DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", device.type)):
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import __compatible_ops__

        # An operation for inference on CPUs, which would have to be compiled first and is not used here.
        __compatible_ops__["deepspeed_shm_comm"] = False
        _follow(deepspeed)
        known = torch.device(get_accelerator().device_name()).type
    if known != device.type:
        raise UserError(
            f"DeepSpeed computes on {known} in this process and the run on {device.type}; type "
            f"DS_ACCELERATOR={device.type} in front of the command"
        )
    return deepspeed


def _follow(deepspeed: Any) -> None:
    """DeepSpeed keeps the first process groups it saw; where they were made anew it must look again."""
    if getattr(deepspeed, "followed_by_phases", dist.group.WORLD) is not dist.group.WORLD:
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._release_process_group_references()
    deepspeed.followed_by_phases = dist.group.WORLD


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
