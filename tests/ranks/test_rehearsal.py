"""What several GPUs do otherwise than gloo's ranks, rehearsed: policies x games train as one device does there too."""

import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from functools import cache, partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gan import noise
from strategies import PhaseStrategy
from tests.ranks.test_games import GAMES, pictures
from tests.ranks.test_placing import fit, learned
from tests.scenes.losses import Contrast, ContrastInTwo
from tests.support.composite import Composite
from tests.support.doubled import doubled
from tests.support.hard_games import BatchNormPenalty, Micro4, Plain
from tests.support.parity import equals, train, vectors
from tests.support.placed_games import Distil, write
from tests.support.rehearsal import ordered
from tests.support.rehearsal.threads import device_threads
from tests.support.staged_games import Staged
from tests.support.worlds import Ranks, apart

STEPS = 2


class Checkpointed(Plain):
    """A published network that computes a part of itself again in backward: a batch norm, noise and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8, bias=False), Again(), nn.Linear(8, 6))


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.norm(x) + 0.1 * torch.randn_like(x) + 0.1 * noise.randn(x.shape, like=x)))


class Forgetful(Checkpointed):
    """Its checkpoint does not keep the random state, with which the ranks that add up travel."""

    def __init__(self) -> None:
        super().__init__()
        self.generator[1] = Norm()


class Norm(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


STAGES = "encoder=ddp,discriminator=ddp,*=pipeline"
ROWS: list[tuple[Any, str]] = [
    (Composite, "zero3+recompute"),
    (ContrastInTwo, "zero3"),
    (Checkpointed, "ddp"),
    (Staged, f"{STAGES}+chunks:2+schedule:interleaved+recompute"),
]
RARELY: list[tuple[Any, str]] = [
    *((Composite, policy) for policy in ("ddp", "zero1", "zero2", "fsdp", "zero3+offload", "deepspeed2")),
    (Contrast, "ddp+recompute"),
    (BatchNormPenalty, "zero3+recompute"),
    (Forgetful, "ddp"),
    (Micro4, "generator=pipeline+chunks:2+schedule:1f1b,*=ddp"),
    (GAMES["sean"], "generator=zero3+recompute,*=zero1"),
    (GAMES["wgan_gp"], "zero3"),
    (GAMES["stylegan"], "fsdp"),
    (Checkpointed, "zero3"),
    (Staged, f"{STAGES}+chunks:2"),
    (GAMES["sean"], "ddp"),
]
TRIED = ("ddp", "zero3+recompute")


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    """Two ranks whose groups keep NCCL's order and rules."""
    found = Ranks(2, backend=ordered.NAME)
    yield found
    found.close()


@pytest.fixture(scope="module")
def alone() -> Callable[[Any], dict[str, Any]]:
    """Each game trained by one process, once, as ever."""
    return cache(lambda game: train(game, batches_of(game), "single", steps=STEPS))


def batches_of(game: Any) -> Any:
    return pictures if game in GAMES.values() else vectors


def rehearsed(game: Any, policy: Any, world: int = 2, check: bool = True, **settings: Any) -> dict[str, Any]:
    """A training with both: backwards in threads of their own, and the groups of the world that runs this."""
    with device_threads(), doubled(policy):
        return train(game, batches_of(game), policy, world, STEPS, check, **settings)


@pytest.mark.parametrize(
    ("game", "policy"),
    [*ROWS, *(pytest.param(*each, marks=pytest.mark.slow) for each in RARELY)],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_it_trains_as_one_device_does(game, policy, world, alone):
    """The first step is tried in a game that has everything."""
    equals(world.run(rehearsed, game, policy, check=game is Composite and policy in TRIED), alone(game))


def served(folder: str) -> dict[str, Any]:
    """On each of three ranks, two of which serve: each sort has a group of its own."""
    ordered.register()
    strategy = partial(PhaseStrategy, process_group_backend=ordered.NAME)
    with device_threads(), mock.patch("tests.ranks.test_placing.PhaseStrategy", strategy):
        return fit(partial(Distil, folder), "teacher=zero3@1-2,eye=ddp@1-2,*=ddp", 1, 3, STEPS)


@pytest.mark.slow
def test_so_do_ranks_that_serve_and_are_served(tmp_path):
    write(tmp_path)
    expected = fit(partial(Distil, str(tmp_path)), "single", steps=STEPS)
    found, *_ = apart(partial(served, str(tmp_path)), 3)
    equals([learned(found)], learned(expected))


# ---- the rehearsal itself ----

variable: ContextVar[str] = ContextVar("variable", default="nothing")


class Asks(torch.autograd.Function):
    """Notes where its backward runs."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        Asks.seen.append((variable.get(), threading.get_ident(), torch.is_grad_enabled()))
        if slope.isnan().any():
            raise ValueError("no number")
        return slope * 2


def test_a_backward_has_another_thread_without_the_variables_of_the_one_that_asks():
    x, Asks.seen = torch.ones(2, requires_grad=True), []
    token = variable.set("set")
    try:
        with device_threads():
            Asks.apply(x).sum().backward()
            (slope,) = torch.autograd.grad(Asks.apply(x).pow(2).sum(), x, create_graph=True)
            with pytest.raises(ValueError, match="no number"):
                Asks.apply(x).backward(torch.full((2,), torch.nan))
        Asks.apply(x).sum().backward()
    finally:
        variable.reset(token)
    assert slope.tolist() == [4, 4] and x.grad.tolist() == [4, 4]
    assert [(what, grad) for what, _, grad in Asks.seen] == [
        *(("nothing", False), ("nothing", True), ("nothing", False)),
        ("set", False),
    ]
    assert [ident == threading.get_ident() for _, ident, _ in Asks.seen] == [False, False, False, True]


def says(function: Callable[[], Any]) -> str:
    try:
        function()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def in_order() -> list[str]:
    """What an operation that is called first does is done before the next one, though nobody waits for it."""
    group = dist.new_group()
    tensor = torch.ones(1)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(4)]
    works[-1].wait()
    assert tensor.item() == 16 and all(work.is_completed() for work in works)
    return group.done


def test_a_group_does_one_thing_after_the_other(world):
    assert world.run(in_order) == [["allreduce SUM of torch.float32 [1]"] * 4] * 2


REFUSED = [
    (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)), "torch.int16, a type that NCCL does not know"),
    (lambda: dist.broadcast(torch.ones(2, 3).mT, 0), "not contiguous"),
    (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.BAND), "NCCL has no BAND"),
    (lambda: dist.all_reduce(torch.ones(1, device="meta")), "on meta, whose memory NCCL cannot send"),
    (lambda: dist.recv(torch.ones(1)), "NCCL receives from a rank that is named"),
]


def refused() -> list[str]:
    return [says(function) for function, _ in REFUSED]


def test_what_nccl_refuses_is_refused(world):
    for found in world.run(refused):
        assert [words in said for said, (_, words) in zip(found, REFUSED, strict=True)] == [True] * len(REFUSED), found


def receive_both(other: int, group: Any) -> None:
    tensors = torch.ones(2, 1)
    for work in (dist.irecv(tensors[0], other, group=group), dist.isend(tensors[1], other, group=group)):
        work.wait()


UNLIKE: dict[str, tuple[Callable[[int, Any], Any], str]] = {  # what each of two ranks does, and what both are told
    "shapes": (
        lambda rank, group: dist.all_reduce(torch.ones(2 + rank), group=group),
        "rank 0: allreduce SUM of torch.float32 [2]; rank 1: allreduce SUM of torch.float32 [3]",
    ),
    "operations": (
        lambda rank, group: (partial(dist.broadcast, src=0) if rank else dist.all_reduce)(torch.ones(2), group=group),
        "rank 0: allreduce SUM of torch.float32 [2]; rank 1: broadcast of torch.float32 [2]",
    ),
    "receives": (
        lambda rank, group: receive_both(1 - rank, group),
        "rank 0: recv of torch.float32 [1]; rank 1: recv of torch.float32 [1]",
    ),
    "never": (
        lambda rank, group: dist.barrier(group=group) if rank else dist.recv(torch.ones(1), 1, group=group),
        "rank 0 waits in recv of torch.float32 [1] with rank 1; rank 1 waits in barrier of nothing",
    ),
}


def unlike(kind: str) -> str:
    """In a group that is broken then."""
    with mock.patch.object(ordered, "LIMIT", timedelta(seconds=1)):
        group = dist.new_group()
    return says(partial(UNLIKE[kind][0], dist.get_rank(), group))


@pytest.mark.parametrize("kind", UNLIKE)
def test_ranks_that_would_wait_for_ever_are_named(kind, world):
    for said in world.run(unlike, kind):
        assert UNLIKE[kind][1] in said, said
