"""Golden figures of published families of networks: the recipe of weights, inputs and draws, and how to compare."""

import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from gan import noise
from nets.ada import COINS, NORMAL, UNIFORM
from strategies import PhaseStrategy
from tests.support.parity import trainer
from tests.support.trained_on import ON_GPUS

FOLDER = Path(__file__).parents[3] / "shared" / "golden"
DEVICE = os.environ.get("TESTS_GOLDEN_ON", "cuda" if ON_GPUS else "cpu")  # where networks compute the figures


def load(name: str) -> dict[str, Any]:
    """The figures; without them the test is skipped."""
    if not (FOLDER / name).exists():
        pytest.skip(f"no golden figures: shared/golden/{name} is not beside the checkout")
    return tree_map_only(Tensor, lambda figure: figure.to(DEVICE), torch.load(FOLDER / name, weights_only=True))


class Recipe:
    """Draws by name: `normal`, `uniform` and `integers` of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _rng(self, name: str) -> numpy.random.Generator:
        return numpy.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def normal(self, name: str, *shape: int) -> Tensor:
        return torch.as_tensor(self._rng(name).standard_normal(shape), dtype=torch.float64).to(DEVICE)

    def uniform(self, name: str, *shape: int, low: float = 0, high: float = 1) -> Tensor:
        return torch.as_tensor(self._rng(name).uniform(low, high, shape), dtype=torch.float64).to(DEVICE)

    def integers(self, name: str, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.as_tensor(self._rng(name).integers(low, high, shape)).to(DEVICE)

    def pictures(self, name: str, *shape: int) -> Tensor:
        return self.integers(name, 256, *shape).double() / 127.5 - 1

    def labels(self, name: str, batch: int, classes: int) -> Tensor:
        if not classes:
            return torch.zeros(batch, 0, dtype=torch.float64)
        return torch.nn.functional.one_hot(self.integers(name, classes, batch), classes).double()

    def augmentation(self, prefix: str, batch: int) -> tuple[Tensor, Tensor]:
        """What an Augmentation draws first, in its order: all uniform numbers, and all normal ones."""

        def column(name: str, draw: Callable[..., Tensor]) -> Tensor:
            whole, _, part = name.rpartition(".")
            if part in ("x", "y"):
                whole = "cutout.center" if whole == "cut" else whole
                return draw(prefix + whole, batch, 2)[:, "xy".index(part)]
            return draw(prefix + name, batch)

        coins = [self.uniform(f"{prefix}{coin}.coin", batch) for coin in COINS]
        uniform = [column(name, self.uniform) for name in UNIFORM]
        return torch.stack(coins + uniform, 1), torch.stack([column(name, self.normal) for name in NORMAL], 1)


def weights(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """A published state dict by the recipe of FAMILIES-others.md, each tensor from its published key alone."""
    return {key: _weight(key, tuple(shape), seed) for key, shape in shapes.items()}


def _weight(key: str, shape: tuple[int, ...], seed: int) -> Tensor:
    last, x = key.rpartition(".")[2], Recipe(seed).normal(key, *shape)
    if last in ("num_batches_tracked", "initialized"):
        return torch.zeros(shape, dtype=torch.int64 if last == "num_batches_tracked" else torch.uint8)
    if last in ("running_var", "stored_var", "weight_g"):
        return 0.5 + x.abs()
    if last in ("running_mean", "stored_mean", "loc"):
        return 0.1 * x
    if last == "u0" or (last in ("weight_u", "weight_v") and len(shape) == 1):
        return x / x.norm()
    if last == "sv0":
        return torch.ones(shape, dtype=torch.float64)
    if last == "gamma":
        return x
    if last == "scale" or (last in ("gain", "weight") and len(shape) == 1):
        return 1 + 0.1 * x
    return x.div_(math.prod(shape[1:]) ** 0.5) if len(shape) > 1 else x.mul_(0.1)


@contextmanager
def drawing(draws: Sequence[Tensor]) -> Iterator[None]:
    """Inside the `with`, gan.noise gives these tensors, in this order, and none may be left over."""
    left = list(draws)

    def given(shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
        assert tuple(left[0].shape) == tuple(shape), (left[0].shape, shape)
        return left.pop(0) if like is None else left.pop(0).to(like)

    def whole(low: int, high: int, shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
        return given(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "randint", whole)
        patch.setattr(noise, "rand", given)
        patch.setattr(noise, "randn", given)
        yield
        assert not left


def recorded(game: Any, *phases: str) -> list[dict[str, float]]:
    """The losses of these phases, as they are computed in a training that comes."""
    seen = []

    def recording(loss: Callable[..., Any], batch: Any) -> dict[str, Tensor]:
        losses = loss(batch)
        seen.append({name: value.item() for name, value in losses.items()})
        return losses

    for phase in phases:
        setattr(game, phase, partial(recording, getattr(game, phase)))
    return seen


def train(game: Any, batches: Sequence[Any]) -> None:
    """Play a step with each of these batches, by a Trainer on one device. A trial would take of the given noise."""
    trainer(PhaseStrategy("single", check=False), 1, len(batches)).fit(game, DataLoader(batches, batch_size=None))


def size(x: Tensor) -> list[float]:
    """[norm, sum], as the golden files have them."""
    return [x.norm().item(), x.sum().item()]


def sizes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    """[norm, sum] of each, by name."""
    return {name: size(tensor.detach()) for name, tensor in tensors}


def gradients(network: torch.nn.Module) -> dict[str, list[float]]:
    """[norm, sum] of each, after a backward."""
    return sizes((name, weight.grad) for name, weight in network.named_parameters())


def difference(found: Any, wanted: Any) -> float:
    """How far a figure is from the golden one: against its largest value, or its norm. See FAMILIES-stylegan.md."""
    if isinstance(wanted, Tensor):
        scale = max(wanted.abs().max().item(), 1e-6)
        return (found - wanted).abs().max().item() / scale
    if isinstance(wanted, list) and len(wanted) == 2 and all(isinstance(each, float) for each in wanted):
        found = size(found) if isinstance(found, Tensor) else found
        return max(abs(a - b) for a, b in zip(found, wanted, strict=True)) / max(wanted[0], 1e-6)
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        return max((difference(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        return max((difference(found[key], wanted[key]) for key in wanted), default=0.0)
    return abs(found - wanted) / max(abs(wanted), 1e-6) if math.isfinite(wanted) else float(found != wanted)
