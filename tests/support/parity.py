"""Training a game under a strategy for a few steps, and comparing what came of it."""

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from lightning import Trainer
from lightning.fabric.utilities import registry
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from gan import GanModule
from gan.files.checkpoint import Share
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.checkpoint.player_state import average_state, optimizer_state
from strategies.policies import POLICIES
from strategies.policies.ddp import Ddp, Dp
from strategies.sharding.reduction import Reduction
from tests.support import worlds
from tests.support.trained_on import ON_GPUS, accelerator

STEPS = 10
BATCH = 16
INSTALLED = cache(registry.entry_points)  # each Trainer would read what all installed packages offer it
EXACT = 1e-10  # what every policy keeps to in float64
BROKEN = 1e-6  # what a control exceeds


def vectors(step: int) -> dict[str, Tensor]:
    """The global batch of one step, for the games on vectors."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {"x": torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)}


def single(step: int) -> dict[str, Tensor]:
    return {name: value.float() for name, value in vectors(step).items()}


def trainer(strategy: Any, world: int, steps: int, **kwargs: Any) -> Trainer:
    """A quiet Trainer in float64."""
    warnings.filterwarnings("ignore", module="lightning")
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    settings = dict(accelerator=accelerator(), devices=world, max_steps=steps, precision="64-true", strategy=strategy)
    settings["use_distributed_sampler"] = False
    settings |= {"deterministic": "warn"} if ON_GPUS else {}
    with mock.patch.object(registry, "entry_points", INSTALLED):
        return Trainer(**{**quiet, **settings, **kwargs})


def share(batch: Any, rank: int, world: int) -> Any:
    """A rank's part of a global batch."""
    return {name: value[rank * len(value) // world : (rank + 1) * len(value) // world] for name, value in batch.items()}


def parts(steps: int, world: int = 1, batches: Callable[[int], Any] = vectors) -> DataLoader:
    """This rank's parts of the first global batches."""
    rank = torch.distributed.get_rank() if world > 1 else 0
    return DataLoader([share(batches(step), rank, world) for step in range(steps)], batch_size=None)


class Whole:
    """A loader over a rank's parts of numbered global batches, that resumes where it was."""

    def __init__(self, steps: int, rank: int = 0, world: int = 1, batches: Callable[[int], Any] = vectors) -> None:
        self.steps, self.at, self.rank, self.world, self.batches = steps, 0, rank, world, batches

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.steps:
            self.at += 1
            yield share(self.batches(self.at - 1), self.rank, self.world)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Deaf(Ddp):
    """The control: ddp with the synchronisation of gradients taken out."""

    name = "deaf"

    def make_reduction(self) -> Reduction:
        return Reduction(self.storage, self.world.device)


def train(
    game: Callable[[], GanModule],
    batches: Callable[[int], dict[str, Tensor]] = vectors,
    policy: Any = "ddp",
    world: int = 1,
    steps: int = STEPS,
    check: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train and return weights, averages and optimizer states, keyed by name. A control's policy is a class."""
    controls = {control.name: control for control in (Deaf, policy) if isinstance(control, type)}
    policy = policy.name if isinstance(policy, type) else policy
    # Every process draws the same noise.
    with mock.patch.dict(POLICIES, controls), mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"):
        backend = "gloo" if policy == Dp.name else None  # its ranks may share a GPU, which NCCL refuses
        module, strategy = game(), PhaseStrategy(policy, check=check, process_group_backend=backend)
        trainer(strategy, world, steps, **{"sync_batchnorm": True, **kwargs}).fit(module, parts(steps, world, batches))
    return snapshot(module, strategy)


def on(ranks: Any, world: int) -> Callable[..., list[Any]]:
    """Calls a function on all ranks of a world; a world of one is this process."""
    return ranks(world).run if world > 1 else lambda function, *args, **more: [function(*args, **more)]


OFTEN = ("single", "ddp", "zero3")


def often(values: Iterable[Any], these: Collection[Any] = OFTEN) -> list[Any]:
    """Values, or tuples that begin with one, as parameters: `make test` tries `these` alone, `make matrix` all."""
    plain = [each if isinstance(each, tuple) else (each,) for each in values]  # a ParameterSet is a tuple too
    params = [each if hasattr(each, "marks") else pytest.param(*each) for each in plain]
    return [
        pytest.param(*each.values, marks=[*each.marks, *([] if each.values[0] in these else [pytest.mark.slow])])
        for each in params
    ]


def words_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """The words in which a call is refused; none where it is not."""
    try:
        function(*args, **kwargs)
    except UserError as error:
        return str(error)
    return None


@contextmanager
def warned(words: str = "") -> Iterator[list[str]]:
    """Collects what warnings say inside the `with`, also those that were given before; here those with these words."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [said for said in (str(each.message) for each in caught) if words in said]


def refused(*args: Any, **kwargs: Any) -> str | None:
    return words_of(train, *args, **kwargs)


def in_buckets(size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call with buckets of so many bytes."""
    with mock.patch("strategies.sharding.bucket.SIZE", size):
        return function(*args, **kwargs)


def snapshot(module: GanModule, strategy: PhaseStrategy) -> dict[str, Any]:
    """Every tensor that training has made; on ranks other than the first, the weights alone. All ranks must call it."""
    found: dict[str, Any] = {f"weight {k}": v.clone() for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    shares: dict[str, Share] = {}
    for name, policy in strategy.policies.items():
        if policy.ema is not None:
            shares |= {f"ema {name}.{k}": share for k, share in average_state(policy).items()}
        for phase, updater in policy.updaters.items():
            whose = f"{name} in {phase}" if phase else name
            for weight, state in optimizer_state(policy, updater)["state"].items():
                shares |= {f"optimizer {whose}.{weight}.{k}": v for k, v in leaves(state) if isinstance(v, Share)}
            found[f"rate {whose}"] = torch.tensor(updater.optimizer.param_groups[0]["lr"])
    found |= together(shares, strategy.world_size)
    return {name: value.cpu() for name, value in found.items()}


def leaves(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What an optimizer keeps of a weight, also in lists."""
    for key, value in state.items():
        if isinstance(value, list):
            yield from leaves({f"{key}.{number}": each for number, each in enumerate(value)})
        else:
            yield key, value


def together(shares: dict[str, Share], world: int) -> dict[str, Tensor]:
    """What a rank has whole, and on the first also what all have in shares: by hand, without the code this proves."""
    found = {
        k: v.tensor.detach().clone().view(v.shape) for k, v in shares.items() if v.tensor.numel() == v.shape.numel()
    }
    if world == 1:
        return found
    parts: list[Any] | None = [None] * world if torch.distributed.get_rank() == 0 else None
    with mock.patch.object(distributed_c10d, "_pickler", worlds.Pickler):
        torch.distributed.gather_object(shares, parts, dst=0)
    rest = [(k, v) for part in parts or () for k, v in part.items() if k not in found]
    flat = {k: torch.full((v.shape.numel(),), math.nan, dtype=v.tensor.dtype) for k, v in rest}
    for name, share in rest:
        flat[name][share.start : share.stop] = share.tensor.detach().reshape(-1)
    return found | {name: flat[name].view(share.shape) for name, share in rest}


def weights(found: dict[str, Any]) -> dict[str, Any]:
    """What every rank has of a snapshot."""
    return {name: value for name, value in found.items() if name.startswith("weight ")}


def equals(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Assert that the first rank has what one device has, and the others the first one's weights to the last bit."""
    assert distance(found[0], expected) < EXACT
    for other in found[1:]:
        assert distance(weights(other), weights(found[0])) == 0


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two trainings; infinite where they hold other tensors, or what is no number."""
    if one.keys() != other.keys():
        return math.inf
    largest = torch.cat([(one[key].double() - other[key].double()).abs().flatten() for key in one]).max().item()
    return math.inf if math.isnan(largest) else largest
