"""Games whose losses use forward-mode derivatives and torch.func."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.optim import Adam

from gan import GanModule, Phase, Player, noise
from tests.support.hard_games import mlp


class Derived(GanModule):
    """A network of several layers, a frozen teacher, and one loss, which each game below writes."""

    second_order = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(mlp(8, 8), nn.Tanh(), mlp(8, 6))
        self.teacher = mlp(8, 6)

    def configure_players(self) -> Iterator[Player]:
        yield Player("net", self.net, partial(Adam, lr=1e-2), ema=0.8)
        yield Player("teacher", self.teacher)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("net", self.loss, "net", second_order=self.second_order)

    def place(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """A point between a sample and noise, its two times, and the speed there."""
        x = batch["x"]
        far, times = noise.randn(x.shape, like=x), noise.rand((len(x), 2), like=x).sort(1).values
        r, t = times.split(1, 1)
        return (1 - t) * x + t * far, r, t, far - x


def joined(network: nn.Module, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
    return network(torch.cat([z, r, t], 1))


def along(network: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Its output, and the derivative of that along the path."""
    return jvp(partial(joined, network), (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))


class MeanFlow(Derived):
    """Geng et al. 2025: the mean speed between two times, by one derivative along the path."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        u, change = along(self.net, z, r, t, v)
        return (u - (v - (t - r) * change).detach()).square().mean()


class Consistency(Derived):
    """The derivative of a frozen teacher, and that of the network, through which the gradient flows."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        (_, taught), (u, change) = (along(network, z, r, t, v) for network in (self.teacher, self.net))
        return (change - taught).square().mean() + u.square().mean()


class Duals(Derived):
    """The same derivative by dual numbers."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        with forward_ad.dual_level():
            made = joined(self.net, forward_ad.make_dual(z, v), r, forward_ad.make_dual(t, torch.ones_like(t)))
            u, change = forward_ad.unpack_dual(made)
        return (u - change).square().mean()


class Changed(Derived):
    """The network with other weights in place of its own, made of its own."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        weights = {name: 0.9 * weight + 0.01 for name, weight in self.net.named_parameters()}
        changed = functional_call(self.net, weights, (torch.cat([z, r, t], 1),))
        return (changed - joined(self.net, z, r, t) - v).square().mean()


class Slopes(Derived):
    """A gradient by torch.func.grad, in which the loss takes a gradient again."""

    second_order = True

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        slope = grad(lambda z: joined(self.net, z, r, t).square().sum())(z)
        each = vmap(grad(lambda z, r, t: self.net(torch.cat([z, r, t])).sum()))(z, r, t)
        return (slope - v).square().mean() + (each - slope).square().mean()


class SlopesOfWeights(Derived):
    """A gradient with respect to weights, by torch.func: each step learns from the network after a step of its own."""

    second_order = True

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        z, r, t, v = self.place(batch)
        weights = dict(self.net.named_parameters())

        def size(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(self.net, weights, (torch.ones(1, 8, dtype=z.dtype),)).square().sum()

        slopes = grad(size)(weights)
        ahead = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
        return (functional_call(self.net, ahead, (torch.cat([z, r, t], 1),)) - v).square().mean()


GAMES = {game.__name__: game for game in (MeanFlow, Consistency, Duals, Changed, Slopes, SlopesOfWeights)}
