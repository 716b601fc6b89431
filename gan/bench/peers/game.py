"""The game that all peers play, in plain torch: two networks, two turns, and a feed of batches that takes the time."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LATENT, FEATURES, GAMMA = 64, 64, 1.0
STEPS = 10  # weights are compared after these
Batch = Mapping[str, Tensor]
Network = Callable[[Tensor], Tensor]


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

    @property
    def adam(self) -> Callable[..., Adam]:
        """Both players' optimizer. With an eps of 1e-8 Adam would enlarge float32 rounding errors of tiny gradients."""
        return partial(Adam, lr=1e-3, betas=(0.5, 0.99), eps=1e-4)

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


class HandLoop:
    """The loop by hand: after each backward pass one all-reduce of all gradients, as StyleGAN3 does it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.generator, self.discriminator = task.networks()
        self.generator_adam = task.adam(self.generator.parameters())
        self.discriminator_adam = task.adam(self.discriminator.parameters())

    def step(self, batch: Batch) -> None:
        # The discriminator's turn.
        self.discriminator_adam.zero_grad()
        self.task.judge(self.generator, self.discriminator, batch).backward()
        self.average(self.discriminator)
        self.discriminator_adam.step()

        # The generator's turn: the gradient passes through the discriminator, but its weights need no gradient.
        self.discriminator.requires_grad_(False)
        self.generator_adam.zero_grad()
        self.task.fool(self.generator, self.discriminator, batch).backward()
        self.average(self.generator)
        self.generator_adam.step()
        self.discriminator.requires_grad_(True)

    def average(self, learner: nn.Module) -> None:
        """Replace the gradients by their mean over the ranks."""
        if self.task.ranks == 1:
            return
        gradients = [weight.grad for weight in learner.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.task.ranks
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(like) for part, like in zip(parts, gradients, strict=True)])

    def weights(self) -> dict[str, Tensor]:
        return weights(self.generator, self.discriminator)


def weights(generator: nn.Module, discriminator: nn.Module) -> dict[str, Tensor]:
    """Copies of both networks' weights, with the same keys for every peer."""
    both = {"generator": generator, "discriminator": discriminator}
    return {
        f"{who}.{key}": value.detach().clone() for who, net in both.items() for key, value in net.state_dict().items()
    }


class Feed:
    """Batches for one peer. Between them it runs the loop by hand, and takes the time of both.

    The peer keeps its own loop, with all that this costs: it only asks for the next batch. First comes a round that
    does not count, and a step in which collectives are counted. Then come `rounds` rounds, each with `steps` steps of
    the peer and of the loop by hand; every second round the other one is first. When the peer asks for the last batch,
    the round before has ended.
    """

    def __init__(self, task: Task, rounds: int, steps: int) -> None:
        self.hand, self.rounds, self.steps = HandLoop(task), rounds, steps
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
        with Payload() as payload:
            yield self.stock[0]
        self.payload = payload.bytes
        self.peer_seconds, self.hand_seconds = [], []
        for number in range(self.rounds):
            if number % 2:
                self._by_hand()
            began = _now()
            yield from self._round()
            self.peer_seconds.append(_now() - began)
            if not number % 2:
                self._by_hand()
        yield self.stock[0]

    def _round(self) -> Iterator[Batch]:
        return (self.stock[step % len(self.stock)] for step in range(self.steps))

    def _by_hand(self) -> None:
        began = _now()
        with torch.enable_grad():
            for batch in self._round():
                self.hand.step(batch)
        self.hand_seconds.append(_now() - began)


def _now() -> float:
    """The time, after all ranks have arrived here."""
    dist.barrier()
    return time.perf_counter()


class Payload(TorchDispatchMode):
    """Counts the bytes that collectives get, of input and output the larger, also of those started in C++.

    So a tensor of N bytes counts N in an all-reduce, in a gather and in a scatter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        space, _, rest = str(function).partition(".")
        if "c10d" in space and "barrier" not in rest and "wait_tensor" not in rest:
            self.bytes += max(map(_bytes, (*args, result)))
        return result


def _bytes(tree: object) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
