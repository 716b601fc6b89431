"""The players of a game, each under its policy: from the set-up of a training to its end."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer

from gan.ema import Ema
from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Player
from strategies.advice import instead
from strategies.assignment import USABLE, assign, memory
from strategies.check.replicas import Writes
from strategies.checkpoint.player_state import last_averages, remember_averages
from strategies.choice import Choice
from strategies.first_weights import FirstWeights
from strategies.optimizers import LossScale
from strategies.options.compile import compiling
from strategies.placing.remote_player import RemotePlayer, Servers
from strategies.policies.policy import Policy
from strategies.ranks_strategy import RanksStrategy
from strategies.world import World


class Players:
    """Empty before set-up. `servers` are the lines to the ranks that serve players."""

    def __init__(self) -> None:
        self.policies: dict[str, Policy] = {}
        self.servers: Mapping[str, Servers] = {}
        self.world = World()
        self.first: FirstWeights  # made in set-up
        self.compiling = ExitStack()
        self._writes: Writes | None = None  # inside gathered()
        self._averaging = False  # inside averaged()

    # ---- set-up, in this order ----

    def assign(self, strategy: RanksStrategy, game: GanModule, choice: Mapping[str, Choice]) -> None:
        self.world, precision = strategy.world, strategy.precision_plugin
        self.policies = assign(choice, game, self.world, precision, self.servers)
        if _needs_loss_scale(precision):
            scaler = getattr(precision, "scaler", None)  # off where the device has none: Lightning makes it for cuda
            begin = (scaler.get_scale(), scaler.get_growth_interval()) if scaler and scaler.is_enabled() else ()
            for policy in self.policies.values():
                policy.loss_scale = LossScale(*begin)

    def adopt(self, first: FirstWeights, training: bool) -> None:
        """Their first weights. What a policy shards gets its values after the policy has adopted its player."""
        self.first = first
        first.begin(self.policies.values() if training else ())
        for policy in self.policies.values():
            policy.adopt(training)
            if self.world.size > 1 and policy.name != "pipeline":
                _refuse_rows_of_samples(policy.player)
        first.fill_shards()
        if any(policy.compiled or policy.compiled_by_author for policy in self.policies.values()):
            self.compiling.enter_context(compiling())

        # What needs all of them: serving ranks, followers.
        for servers in dict.fromkeys(self.servers.values()):
            servers.meet()
        for policy in self.policies.values():
            if training:
                policy.follow()
        _stop_what_never_learns(first.game, training)

    def optimizers(self) -> list[Optimizer]:
        return [each.optimizer for policy in self.policies.values() for each in policy.updaters.values()]

    def schedules(self) -> list[LRSchedulerConfig]:
        """Their schedules, as Lightning names them to callbacks."""
        return [
            LRSchedulerConfig(updater.schedule, name="-".join(filter(None, ("lr", name, phase))))
            for name, policy in self.policies.items()
            for phase, updater in policy.updaters.items()
            if updater.schedule is not None
        ]

    # ---- whole weights ----

    @contextmanager
    def gathered(self, write: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for policy in self.policies.values():
                stack.enter_context(policy.gathered())
            outer, self._writes = self._writes, Writes(self.policies, write, self.world)
            try:
                yield
                self._writes.check(self._averaging)
            finally:
                self._writes = outer

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self._averaging:  # a validation step is inside already
            yield
            return
        writes = self._writes
        if writes is not None:
            writes.check(averaged=False)
        self._averaging = True
        try:
            with ExitStack() as stack:
                if self.policies and (kept := last_averages(self.first.game)):
                    stack.callback(remember_averages, self.first.game, kept)  # that is no write of a person's
                for policy in self.policies.values():
                    stack.enter_context(policy.averaged())
                if writes is not None:
                    writes.begin()
                yield
                if writes is not None:
                    writes.check(averaged=True)
        finally:
            self._averaging = False
        if writes is not None:  # the weights of before are whole again, for the rest of gathered()
            self._unshard(self.policies.values())
            writes.begin()

    # ---- the end ----

    def give_back(self) -> None:
        """Make the author's weights whole again, where they fit on this rank."""
        # The averages that this rank has whole, which a validation after the training shows.
        whole = {name: each for name, each in self.policies.items() if each.storage.owned is each.storage.weights}
        averages = {name: each.ema.state_dict() for name, each in whole.items() if isinstance(each.ema, Ema)}
        self._unshard(self._that_fit() if self.first.begin_sharded else self.policies.values())
        remember_averages(self.first.game, averages)

    def _that_fit(self) -> list[Policy]:
        free = min(self.world.gather(memory(self.world.device, self.world.per_node))) * USABLE
        small = []
        for policy in self.policies.values():
            if isinstance(policy, RemotePlayer):
                continue
            if self.first.bytes_of(policy) > max(free, 0):
                rank_zero_warn(
                    f"player '{policy.player.name}' stays sharded after the training, for its weights do not fit into "
                    f"half of the memory that is free; load a checkpoint to use it"
                )
            else:
                small.append(policy)
                free -= self.first.bytes_of(policy)
        return small

    def _unshard(self, policies: Iterable[Policy]) -> None:
        for policy in policies:
            policy.storage.unshard(exact=True)

    def release(self) -> None:
        for servers in dict.fromkeys(self.servers.values()):
            servers.end()
        self.servers = {}
        for policy in self.policies.values():
            policy.release()
        self.compiling.close()
        self.world.groups.release()


def _stop_what_never_learns(game: GanModule, training: bool) -> None:
    """A parameter of no player is never updated, so it requires no gradient. In a training, say what never learns."""
    of_players = {id(p) for player in game.players.values() for p in player.module.parameters()}
    lost = [name for name, each in game.named_parameters(recurse=False) if id(each) not in of_players]
    if training and lost:
        rank_zero_warn(f"'{lost[0]}' is a parameter of no player, and never learns; put it into a player's module")
    for parameter in game.parameters():
        if id(parameter) not in of_players:
            parameter.requires_grad_(False)
    if not training:
        return
    taught = {name for phase in game.phases for name in phase.learners}
    for player in game.players.values():
        if not player.frozen and player.name not in taught:
            rank_zero_warn(
                f"player '{player.name}' has an optimizer, and no phase teaches it, so it never learns; yield "
                f"Phase(..., learners='{player.name}'), or leave its optimizer out"
            )

    # Lightning warns of modules in eval mode. It need not where the author has put none there: see Policy.adopt.
    frozen = {part for player in game.players.values() if player.frozen for part in player.module.modules()}
    if all(part.training or part in frozen for part in game.modules()):
        warnings.filterwarnings("ignore", message="Found .* in eval mode at the start of training")


def _refuse_rows_of_samples(player: Player) -> None:
    """torch rescales rows of such a table when they are read. A rank reads those of its own samples."""
    for name, module in player.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserError(
                f"player '{player.name}': {name or 'it'} has max_norm={module.max_norm}, by which each rank would "
                f"rescale the rows that its own samples read; leave max_norm out and type Player(..., after=...), a "
                f"function that rescales all rows, or type {instead(player.name, 'pipeline')}"
            )


def _needs_loss_scale(precision: Precision) -> bool:
    """Whether small gradients would become zero without a loss scale."""
    return isinstance(precision, MixedPrecision) and precision.precision == "16-mixed"
