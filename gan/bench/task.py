"""The game that all peers play: two networks, two turns, a loop by hand, and a feed of batches that takes the time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam

from gan.bench.device import Counter, now_on_all, payload

LATENT, FEATURES, GAMMA = 64, 64, 1.0
STEPS = 10  # weights are compared after these
Batch = Mapping[str, Tensor]
Weights = dict[str, Tensor]
Network = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor], object]


@dataclass(frozen=True)
class Task:
    """What a peer gets: sizes, number format, its rank, and the batches to train on."""

    penalty: bool
    width: int
    batch_size: int
    dtype: torch.dtype
    rank: int
    ranks: int
    batches: Iterable[Batch] = ()
    device: str = "cpu"

    def networks(self) -> tuple[nn.Sequential, nn.Sequential]:
        """Generator and discriminator, the same on every rank, with activations that can be differentiated twice."""
        torch.manual_seed(0)
        return self._network(LATENT, FEATURES), self._network(FEATURES, 1)

    def _network(self, inside: int, outside: int) -> nn.Sequential:
        sizes = [inside, self.width, self.width, self.width, outside]
        layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.SiLU())]
        return nn.Sequential(*layers[:-1]).to(self.device, self.dtype)

    def adam(self, weights: Iterable[nn.Parameter]) -> Adam:
        """Both players' optimizer. With an eps of 1e-8 Adam would enlarge float32 rounding errors of tiny gradients."""
        return Adam(weights, lr=1e-3, betas=(0.5, 0.99), eps=1e-4)

    def adams(self, generator: nn.Module, discriminator: nn.Module) -> tuple[Adam, Adam]:
        return self.adam(generator.parameters()), self.adam(discriminator.parameters())

    def batch(self, step: int) -> Batch:
        """This rank's rows of a step's global batch."""
        dice = torch.Generator().manual_seed(1000 + step)
        rows = self.batch_size // self.ranks
        draw = partial(torch.randn, generator=dice, dtype=torch.float64)
        whole = {"x": draw(self.batch_size, FEATURES), "z": draw(self.batch_size, LATENT)}
        return {name: part[self.rank * rows :][:rows].to(self.device, self.dtype) for name, part in whole.items()}

    def judge(self, generator: Network, discriminator: Network, batch: Batch) -> Tensor:
        """The discriminator's loss, with R1 (Mescheder et al. 2018) where the task has a penalty."""
        with torch.no_grad():
            fake = generator(batch["z"])
        real = batch["x"].detach().requires_grad_(self.penalty)
        score = discriminator(real)
        loss = softplus(discriminator(fake)).mean() + softplus(-score).mean()
        if self.penalty:
            (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            loss = loss + GAMMA / 2 * slope.square().sum(1).mean()
        return loss

    def fool(self, generator: Network, discriminator: Network, batch: Batch) -> Tensor:
        return softplus(-discriminator(generator(batch["z"]))).mean()


def alternate(
    task: Task,
    judging: Sequence[nn.Module],
    fooling: Sequence[nn.Module],
    adams: Sequence[Any],
    backwards: Sequence[Backward] = (Tensor.backward, Tensor.backward),
) -> None:
    """Take both turns with each batch. Of a pair, the generator's is the first; a turn has its own pair of networks."""
    for batch in task.batches:
        adams[1].zero_grad()
        backwards[1](task.judge(judging[0], judging[1], batch))
        adams[1].step()

        # The gradient passes through the discriminator, but its weights need no gradient.
        fooling[1].requires_grad_(False)
        adams[0].zero_grad()
        backwards[0](task.fool(fooling[0], fooling[1], batch))
        adams[0].step()
        fooling[1].requires_grad_(True)


def weights(generator: nn.Module, discriminator: nn.Module) -> Weights:
    """Copies of both networks' weights, with the same keys for every peer."""
    both = {"generator": generator, "discriminator": discriminator}
    return {f"{who}.{key}": own.detach().clone() for who, net in both.items() for key, own in net.state_dict().items()}


def hand_loop(task: Task) -> tuple[tuple[nn.Module, nn.Module], Callable[[Iterable[Batch]], None]]:
    """Both networks, and the loop by hand that trains them on batches."""
    networks = task.networks()
    adams, backwards = task.adams(*networks), [partial(_backward, task.ranks, network) for network in networks]
    return networks, lambda batches: alternate(replace(task, batches=batches), networks, networks, adams, backwards)


def _backward(ranks: int, learner: nn.Module, loss: Tensor) -> None:
    """A backward pass, and one all-reduce of all gradients to their mean over the ranks, as StyleGAN3 does it."""
    loss.backward()
    if ranks == 1:
        return
    gradients = [weight.grad for weight in learner.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= ranks
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(like) for part, like in zip(parts, gradients, strict=True)])


class Feed:
    """Batches for one peer. Between them it runs the loop by hand, and takes the time of both.

    The peer keeps its own loop, with all that this costs: it only asks for the next batch. First comes a round that
    does not count, and a step in which collectives are counted. Then come `rounds` rounds, each with `steps` steps of
    the peer and of the loop by hand; every second round the other one is first. When the peer asks for the last batch,
    the round before has ended.
    """

    def __init__(self, task: Task, rounds: int, steps: int) -> None:
        (_, self.hand), self.rounds, self.steps = hand_loop(task), rounds, steps
        self.stock = [task.batch(step) for step in range(4)]
        self.peer_seconds: list[float] = []
        self.hand_seconds: list[float] = []
        self.payload = 0

    def __len__(self) -> int:
        """The exact number of batches, so that no peer has to fetch one in advance to see whether there is more."""
        return (self.rounds + 1) * self.steps + 2

    def __iter__(self) -> Iterator[Batch]:
        self._by_hand()
        yield from self._round()
        with Counter(payload) as counter:
            yield self.stock[0]
        self.payload = counter.total
        self.peer_seconds, self.hand_seconds = [], []
        for number in range(self.rounds):
            if number % 2:
                self._by_hand()
            began = now_on_all()
            yield from self._round()
            self.peer_seconds.append(now_on_all() - began)
            if not number % 2:
                self._by_hand()
        yield self.stock[0]

    def _round(self) -> Iterator[Batch]:
        return (self.stock[step % len(self.stock)] for step in range(self.steps))

    def _by_hand(self) -> None:
        began = now_on_all()
        with torch.enable_grad():
            self.hand(self._round())
        self.hand_seconds.append(now_on_all() - began)
