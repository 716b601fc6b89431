"""Policy: how one player is trained on the devices. This class is also the policy for a single device."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gan.ema import Ema
from gan.files.errors import UserError
from gan.phase import Phase, Player
from nets.norm import torchs_own
from strategies import private
from strategies.advice import type_instead
from strategies.optimizers.averages import EvalWeights, Follower
from strategies.optimizers.making import check_pieces, updaters_of, without_closure
from strategies.optimizers.stepped_apart import why_not_apart
from strategies.optimizers.updater import LossScale, Modes, Updater
from strategies.options.compile import Compiled, compiled_by_author, refuse_forgetful
from strategies.options.recompute import Recompute
from strategies.policies.belongings import Belongings, Switch
from strategies.policies.whole_weights import WholeWeights
from strategies.sharding.reduction import Reduction
from strategies.sharding.storage import Storage
from strategies.sharding.unshard_on_read import saved_by_reference
from strategies.world import World, equal_on_ranks


class Policy(WholeWeights):
    """One player on one device. A policy for many devices chooses another storage and another reduction.

    `storage` knows where the weights are and which part of them this rank owns. `reduction` averages the gradients
    over the ranks. A policy is these two: it overrides `keep`, `make_storage` and `make_reduction`. Who calls what:

        players.py   adopt, follow           in set-up, before and after the weights have their first values
        steps.py     begin_step, end_step    around the phases of a step
        turn.py      during                  around a phase; in it, for a learner:
                       reduction.arm           before each backward
                       reduction.finish        after the last one
                       update                  if all gradients are finite; moves the averages, too
                       reduction.drop          at the end
        turn.py      for_several_phases      around what makes a graph that later phases use too
        players.py   gathered, averaged      between phases: to save, validate or compare, and for an author's code
        players.py   release                 after the training

    Between steps a weight, buffer, average or state that a rank has whole is the same on all ranks: a checkpoint takes
    the copy of any rank. The norms that `reduction.finish` returns are the same on all ranks too, because each rank
    decides by itself whether to update.
    """

    name = "single"
    takes: frozenset[str] = frozenset({"compile", "recompute"})  # the options it supports: see choice.py
    communicates_only_in_its_turn = False  # in phases in which the player learns, and between phases
    runs_everywhere = True  # each rank that calls the network runs all of its forward
    in_stages = False  # a layer runs on the rank of its stage alone, for the samples of a group of ranks
    package: str | None = None  # a package that it needs; the extra of this name installs it

    def __init__(self, player: Player, world: World, options: Mapping[str, Any], belongings: Belongings) -> None:
        super().__init__(player, world, options, belongings)
        self.lenders: list[Policy] = []  # of the players that store parameters which this one has too
        self.reduction = Reduction(self.storage, world.device)
        self.updaters: dict[str, Updater] = {}  # in training, by phase; the player's own is that of ""
        self.updater: Updater | None = None  # of the phase that is played
        self.followed: Policy | None = None  # that of the player that this one follows
        self.follower: Follower | None = None
        self.followers: list[Follower] = []  # what follows this player
        self.loss_scale: LossScale | None = None
        self.compiled: Compiled | None = None
        self.compiled_by_author = any(map(compiled_by_author, self.belongings.readers))
        self.taken = ExitStack()  # calls of modules that the policy answers, until it is released
        self.skipped = 0
        self.tried = False
        self.names = {name for name, _ in player.module.named_parameters()}
        self.switch = Switch(player, self.requiring_grad)

    # ---- once ----

    @property
    def begins_sharded(self) -> bool:
        """Whether training begins with weights that may have no values yet. See first_weights.py."""
        return self.divided and not self.keep

    def adopt(self, training: bool) -> None:
        """Prepare the player. Its weights are already on the device, and equal on all ranks."""
        if {"compile", "recompute"} <= self.options.keys():
            raise UserError(
                f"player '{self.player.name}': options compile and recompute exclude each other, for torch.compile "
                f"itself chooses what backward computes again; type {self.name}+compile or {self.name}+recompute"
            )
        if self.player.frozen:
            modes = [module.training for module in self.belongings.modes_kept]
            self.player.module.eval()
            for module, mode in zip(self.belongings.modes_kept, modes, strict=True):
                module.training = mode
        if training:
            if self.world.size > 1 and self.world.device.type == "cpu" and torchs_own(self.player.module):
                raise UserError(
                    f"player '{self.player.name}': torch's SyncBatchNorm needs GPUs; type "
                    f"Trainer(sync_batchnorm=True), with which all batch norms are synchronised on CPUs too"
                )
            if self.weights:
                self.updaters = updaters_of(self.player, self.makers, self.weights)
                self.updater = self.updaters[""]
            if self.divided:
                self.storage = self.make_storage()
                if self.weights:
                    self.reduction = self.make_reduction()
        if self.player.ema is not None and self.player.follows is None:
            network = self.player.module if self.player.ema_buffers == "averaged" else None
            self.ema = Ema(self.storage.owned, self.player.decay, network=network)
        for updater in self.updaters.values():
            if self.storage.owns_pieces:
                check_pieces(self.player, updater, self.name)
            if self.storage.owns_part:
                updater.step_owned(self.storage)
            if isinstance(updater.optimizer, Modes):
                self.ema = EvalWeights(updater, self.storage.owned)
            updater.make_schedule(self.player)
        if training and "recompute" in self.options:
            self.recompute = self.make_recompute()
            blocks = ", ".join(self.recompute.blocks) or "its network as a whole"
            private.say(f"player '{self.player.name}' recomputes {blocks}")
        if "compile" in self.options:
            self.compiled = Compiled(self.player, self._unshard)
        if training and self.compiled_by_author:
            refuse_forgetful(self.player)

    def _unshard(self) -> None:
        """Make all weights of the player's network whole, also those that others store."""
        for policy in (self, *self.lenders):
            policy.storage.unshard()

    def follow(self) -> None:
        """Begin to follow the other player, if this one follows any. Both are adopted for training."""
        if self.followed is not None:
            self.follower = Follower(self.player, self.storage, self.followed.player, self.followed.storage)
            self.followed.followers.append(self.follower)

    @property
    def average(self) -> Ema | EvalWeights | None:
        """The moving average that the player has, or that it is."""
        return self.ema if self.follower is None else self.follower.ema

    def check_apart(self) -> None:
        """Refuse an optimizer whose step on some of the weights may differ from its step on all."""
        for phase, updater in self.updaters.items():
            with without_closure(self.player, updater.optimizer):
                why = None if updater.elementwise else why_not_apart(self.makers[phase], self.weights)
            if why is not None:
                raise UserError(
                    f"player '{self.player.name}': policy '{self.name}' gives each rank some of the weights, and that "
                    f"does not work with {type(updater.optimizer).__name__}: {why}; type "
                    f"{type_instead(self.player.name, 'ddp')}"
                )

    def adopt_dry(self) -> None:
        """Prepare the player for a plan, which plays it without values: see strategies/cost/dry.py."""
        if self.divided:
            self.storage = self.make_storage()
            if self.weights:
                self.reduction = self.make_reduction()

    def make_storage(self) -> Storage:
        """Where the weights are stored in training, if the player is divided."""
        return self.storage

    def make_reduction(self) -> Reduction:
        """How gradients are averaged over the ranks, if the player is divided and learns."""
        return self.reduction

    def make_recompute(self) -> Recompute:
        """How the player's blocks compute again what they do not keep."""
        begin_again = None if self.on_read is None else self.on_read.begin_again
        return Recompute(self.player, begin_again=begin_again, readers=self.belongings.readers)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        groups = self.world.groups
        return groups.shared(self.player.name) if self.communicates_only_in_its_turn else groups.own()

    def release(self) -> None:
        """Give the author's parameters their own memory again, and remove hooks.

        Communicates nothing, because a rank may be lost. So weights that are still sharded have no values then.
        """
        self.released = True
        self.taken.close()
        self.withheld.close()
        self.switch.turn(True)
        self.switch.end_step()
        if self.on_read is not None:
            self.on_read.release()
            self.on_read = None
        self.reduction.drop()
        self.reduction.release()
        self.storage.release()
        for option in (self.compiled, self.recompute):
            if option is not None:
                option.release()
        self.compiled = self.recompute = None
        for name in ("group", "mesh", "sharing"):  # what policies cache: a reference would keep threads
            vars(self).pop(name, None)

    @property
    def optimizer(self) -> Optimizer | None:
        """That of the phase that is played; otherwise the last one's."""
        return None if self.updater is None else self.updater.optimizer

    @property
    def learners_updater(self) -> Updater:
        """What updates a player that learns, in the phase that is played."""
        assert self.updater is not None
        return self.updater

    # ---- around a step ----

    def begin_step(self, step: int, tried: bool = False) -> None:
        """Before the phases of a step. `tried`: it is checked, and so is what `Player(after=...)` writes."""
        self.switch.begin_step(step)
        self.tried = tried
        if tried:
            self.check_parameters()

    def end_step(self, epoch_ended: bool) -> None:
        """After the phases of a step. `epoch_ended`: it was the last step of an epoch."""
        self.switch.end_step()
        self._count("step")
        if epoch_ended:
            self._count("epoch")
            self.check_parameters()

    def check_parameters(self) -> None:
        """Refuse what came to the network while it trained: it would train on without these weights."""
        if new := [name for name, _ in self.player.module.named_parameters() if name not in self.names]:
            raise UserError(
                f"player '{self.player.name}': weight '{new[0]}' was added while training, so no optimizer has it, and "
                f"no run with it could be resumed; make all layers in __init__, and let a phase with start= use them"
            )

    def _count(self, what: str) -> None:
        """Move the schedule and the averages that count this: an update, a step or an epoch."""
        if self.player.schedule_per == what:
            for updater in [self.learners_updater] if what == "update" else self.updaters.values():
                if updater.schedule is not None:
                    updater.schedule.step()
        if self.ema is not None and self.player.ema_per == what:
            self.ema.update()
        for follower in self.followers:
            if follower.player.ema_per == what:
                follower.update()

    # ---- in a phase ----

    def during(self, phase: Phase, trying: bool = False) -> AbstractContextManager[Any]:
        """Begin a phase, and return the context around it, in which weights are whole when they are read.

        Only the phase's learners require gradients; gradient still flows through the other players. `trying`: it is
        played for a trial, on a few samples.
        """
        self.switch.turn(self.player.name in phase.learners)
        self.updater = self.updaters.get(phase.name, self.updaters.get(""))
        self.reduction.trying = trying
        if self.compiled is not None:
            self.compiled.use(not phase.second_order)
        if self.on_read is None:
            return nullcontext()
        return self.on_read.during(phase.name, phase.second_order, self.switch.on and bool(self.weights), trying)

    def as_one_device(self) -> AbstractContextManager[Any]:
        """A context around a step that is tried as one device: on a CPU without recompute, so that both are compared.

        A GPU may have no room for that.
        """
        if self.recompute is None or self.world.device.type != "cpu":
            return nullcontext()
        return mock.patch.object(self.recompute, "on", False)

    def for_several_phases(self) -> AbstractContextManager[Any]:
        """A context around what makes a graph that later phases use too: `GanModule.shared`."""
        return nullcontext() if self.on_read is None else saved_by_reference()

    def update(self, norm: Tensor) -> None:
        """Clip, step the optimizer, call `Player(after=...)`. Then move what counts updates: a schedule, averages."""
        if self.player.clip is not None:
            nn.utils.clip_grads_with_norm_(self.storage.owned.values(), self.player.clip, norm)
        self.learners_updater.check_members(self.player)
        updater = self.learners_updater
        with updater.owning(), without_closure(self.player, updater.optimizer):
            self.storage.step(updater.optimizer, self.reduction.stepped)
        if self.recompute is not None:
            self.recompute.updates += 1
        if self.player.after is not None:
            with torch.no_grad(), ExitStack() as stack:
                for policy in (self, *self.lenders):
                    stack.enter_context(policy.lent("after="))
                self.player.after(self.player.module)
                if self.tried and not equal_on_ranks(list(self.player.module.parameters()), self.world.device):
                    raise UserError(
                        f"player '{self.player.name}': after= has left other weights on each rank; what it reads must "
                        f"be the same on all ranks: keep gan.ranks.mean(x) in place of x"
                    )
        self._count("update")
