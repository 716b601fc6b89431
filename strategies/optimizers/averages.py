"""Averaged weights: of a player that follows another one, and of optimizers with two modes.

An optimizer with two modes, such as a schedule-free one, has one kind of weights to train and another one to evaluate.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gan.ema import Ema
from gan.phase import Player
from strategies.optimizers.updater import Modes, Updater
from strategies.sharding.storage import Storage


class Follower:
    """Moves a player's weights towards those of the player that it follows, and copies or averages the buffers.

    Both have the same policy. Where it shards frozen players, both are laid out alike, and a rank averages the share
    that it owns. Elsewhere each rank averages whole weights. Nothing is communicated. One exception: under `zero2+bf16`
    the whole weights are rounded, so the exact ones are gathered before, and the rounded ones again after that.
    """

    def __init__(self, player: Player, storage: Storage, followed: Player, followed_storage: Storage) -> None:
        """Begin as a copy of the followed player. The storages are those of training."""
        self.player, self.storage = player, storage
        self.followed, self.followed_storage = followed, followed_storage
        self.sharded = bool(storage.shares())
        pairs = list(self._pairs())
        others = {name: other for name, _, other in pairs}
        network, averages = None, {}
        if player.ema_buffers == "averaged":
            network, averages = followed.module, dict(player.module.named_buffers())
        self.ema = Ema(others, player.decay, [own for _, own, _ in pairs], network, averages)
        self._move(lambda: self.ema.load_state_dict(None))

    def update(self) -> None:
        self._move(self.ema.update)

    @torch.no_grad()
    def _move(self, move: Callable[[], None]) -> None:
        if not self.sharded:
            self.followed_storage.unshard(exact=True)
        move()
        if self.ema.network is None:
            others = dict(self.followed.module.named_buffers())
            for name, own in self.player.module.named_buffers():
                own.copy_(others[name])
        if self.sharded:
            self.storage.shards_changed(others=True)
        else:
            self.followed_storage.reshard()

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """What this rank owns of each weight, and of the same weight of the followed player."""
        shares, other_shares = self.storage.shares(), self.followed_storage.shares()
        others = dict(self.followed.module.named_parameters())
        for name, weight in self.player.module.named_parameters():
            if weight is others[name]:  # a frozen parameter that both have
                continue
            if not self.sharded:
                yield name, weight, others[name]
            elif (share := shares[weight]) is not None:
                other = other_shares[others[name]]
                assert other is not None and (share.start, share.stop) == (other.start, other.stop)
                yield name, share.tensor, other.tensor


class EvalWeights:
    """The weights of an optimizer's evaluation mode. A policy has them in the place of a moving average.

    [Note: two modes]
    A schedule-free optimizer (Defazio et al. 2024) computes gradients at one point, and evaluates at another one: an
    average, which it can compute from its state. Its `eval()` writes that average into the weights, and its `train()`
    computes the other point again, up to rounding. A validation must not change the training, not even by rounding. So
    the weights are copied before `eval()`, and copied back after `train()`. Between phases the weights are always those
    of training. A checkpoint holds both kinds: these as the weights, the others as their average.
    """

    updates = 0  # a count of its own is not needed: the optimizer counts

    def __init__(self, updater: Updater, parameters: Mapping[str, Tensor]) -> None:
        self.updater, self.parameters = updater, dict(parameters)
        self._turn(training=True)

    def _turn(self, training: bool) -> None:
        optimizer = self.updater.optimizer
        assert isinstance(optimizer, Modes)
        with self.updater.owning():
            (optimizer.train if training else optimizer.eval)()

    def update(self) -> None:
        """Nothing: the optimizer's step has done it."""

    @contextmanager
    @torch.no_grad()
    def swapped(self) -> Iterator[None]:
        """Inside the `with`, the network has the weights of evaluation mode."""
        kept = [parameter.detach().clone() for parameter in self.parameters.values()]
        self._turn(training=False)
        try:
            yield
        finally:
            with torch.no_grad():
                self._turn(training=True)
                for parameter, value in zip(self.parameters.values(), kept, strict=True):
                    parameter.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        with self.swapped():
            return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
