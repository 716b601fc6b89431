"""dp: one process, and a replica of the game for each device. It is for all players of a game or for none."""

from typing import Any

from torch import Tensor

from strategies.policies.policy import Policy
from strategies.policies.replica import Replica


class Dp(Policy):
    """The player on the first device, and a copy of it on each of the others.

    Communication, all of it within the process, in order: before a step all weights and buffers of the game go to
    every other device, and each device gets its part of the batch; during forward and backward the sums of
    synchronised batch norms; after a phase's last backward the learner's gradients go to the first device and are
    added up there; after the update the learner's weights go to every other device. Only the first device clips, steps
    and averages, so only it holds the optimizer's state and the average. No communication overlaps with computation,
    and all threads share one Python interpreter. So dp is for a quick try.

    What gan.noise draws depends on the sample only. But all threads of a CPU share torch's global random state, and
    draw from it in any order. A run that uses it cannot be repeated exactly. See threads.py for how the replicas play.
    """

    name = "dp"
    max_ranks = 1
    takes = frozenset()  # a replica is neither compiled nor sharded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replicas: list[Replica] = []  # those on the other devices

    def finish(self, scale: float) -> Tensor:
        """The mean of the replicas' gradients; a weight that none of them reached has none."""
        for replica in self.replicas:
            for weight in self.weights.values():
                own = replica.of(weight)
                gradient, own.grad = own.grad, None
                if gradient is not None:
                    gradient = gradient.to(weight.device)
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        return super().finish(scale * (1 + len(self.replicas)))

    def update(self, norm: Tensor) -> None:
        super().update(norm)
        for replica in self.replicas:
            if self.player.after is None:
                replica.take(self.weights.values())
            else:
                replica.take_module(self.player.module)

    def _count(self, what: str) -> None:
        super()._count(what)
        moved = [follower for follower in self.followers if follower.player.ema_per == what]
        for follower in moved:
            for replica in self.replicas:
                replica.take_module(follower.player.module)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for replica in self.replicas:
            for weight in self.weights.values():
                replica.of(weight).grad = None

    def release(self) -> None:
        super().release()
        self.replicas = []
