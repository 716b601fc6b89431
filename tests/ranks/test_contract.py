"""What every entry of POLICIES must pass, written once. A new policy is tested by being entered, here and there.

Policies that break a promise are mistakes of tests/mutants/mistakes.txt.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from torch.optim import Adafactor

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.policies import POLICIES
from strategies.policies.choice import OPTIONS
from strategies.sharding import bucket
from tests.support.composite import MIXES, Composite, Sized, SizedEvenly
from tests.support.counted import forget, held
from tests.support.duel import fit, loader
from tests.support.hard_games import Plain
from tests.support.journey import travel
from tests.support.parity import EXACT, distance, equals, often, on, single, trainer, words_of
from tests.support.planned import payload, planned
from tests.support.watch import WatchedStrategy

STEPS, HALF = 4, 2  # a phase of every third step is due in both halves
TRIED = "zero3"  # whose first step is tried; of the other policies: `checked` of scenes


@dataclass(frozen=True)
class Promise:
    """What a policy moves and keeps, in multiples of P, the bytes of a player's weights.

    `moves`: the collectives of a phase with one learner, which reads one other player of the same size. There is a
    third player, which plays no part and must add nothing. None: it moves activations, and has a test of its own.
    `keeps`: what each of n ranks keeps between phases of a player that learns with Adam and an average.
    `keeps_frozen`: the same of a frozen player. `fixed`: bytes beside it for each learner, whatever its size.
    """

    moves: dict[str, int] | None
    keeps: Callable[[int], float]
    keeps_frozen: Callable[[int], float] = lambda n: 1
    fixed: int = 0
    cut: bool = True  # the optimizer sees pieces of weights
    composite: str = ""  # what is typed for `Composite`, if the policy alone refuses some of its players
    sized: type[Sized] = Sized  # what is weighed


GATHER, REDUCE, SUM = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
PROMISES = {
    # keeps: weights, buckets of gradients, Adam's two moments, the average
    "single": Promise({}, lambda n: 1 + 0 + 2 + 1, cut=False),
    "ddp": Promise({SUM: 1}, lambda n: 1 + 1 + 2 + 1, cut=False),
    "zero1": Promise({SUM: 1, GATHER: 1}, lambda n: 1 + 1 + 2 / n + 1 / n, cut=False),
    "zero2": Promise({REDUCE: 1, GATHER: 1}, lambda n: 1 + 0 + 2 / n + 1 / n),
    "zero3": Promise({REDUCE: 1, GATHER: 2}, lambda n: 1 / n + 0 + 2 / n + 1 / n, lambda n: 1 / n),
    "fsdp": Promise({REDUCE: 1, GATHER: 2}, lambda n: 1 / n + 0 + 2 / n + 1 / n, lambda n: 1 / n),
    # Engines of DeepSpeed keep a copy of the weights that the rank owns; stage 3 keeps a bucket of its own as well.
    "deepspeed1": Promise({SUM: 1, GATHER: 1}, lambda n: 1 + 1 / n + 0 + 2 / n + 1 / n),
    "deepspeed2": Promise({SUM: 1, GATHER: 1}, lambda n: 1 + 1 / n + 0 + 2 / n + 1 / n),
    "deepspeed3": Promise(
        {REDUCE: 1, GATHER: 2}, lambda n: 2 / n + 1 / n + 2 / n + 1 / n, lambda n: 1 / n, fixed=4 * 6 * 2**20
    ),
    # Networks of four equal layers, of which each rank has some.
    "pipeline": Promise(
        None,
        lambda n: 1 / n + 0 + 2 / n + 1 / n,
        lambda n: 1 / n,
        cut=False,
        composite="teacher=pipeline,*=ddp",
        sized=SizedEvenly,
    ),
}
PROMISES["dp"] = PROMISES["ddp"]
NAMES = list(dict.fromkeys(policy.name for policy in POLICIES.values()))


def promise(name: str) -> Promise:
    if name not in PROMISES:
        pytest.fail(f"policy '{name}' is in POLICIES, but not in PROMISES of {__file__}: say what it moves and keeps")
    return PROMISES[name]


def missing(name: str) -> bool:
    package = POLICIES[name].package
    return package is not None and find_spec(package) is None


POLICY = [
    pytest.param(name, marks=pytest.mark.skipif(missing(name), reason=f"needs {POLICIES[name].package}"))
    for name in NAMES
]
RARELY = {"deepspeed1", "deepspeed2", "deepspeed3"}  # `make test` tries them in tests/ranks/test_deepspeed.py only
WORLDS = [
    pytest.param(
        name,
        world,
        marks=[*each.marks, *([pytest.mark.slow] if name in RARELY or world == 4 else [])],
        id=f"{name}-{world}",
    )
    for each, name in zip(POLICY, NAMES, strict=True)
    for world in ((1,) if POLICIES[name].max_ranks == 1 else (2, 4))
]

ON_TWO = [each for each in WORLDS if each.values[1] != 4]
SLOW = pytest.mark.slow


def rarely(name: str) -> list[Any]:
    """All policies and worlds. Of this one `make test` asks the question in a file of its own."""
    return [
        pytest.param(*each.values, marks=[*each.marks, *[SLOW] * (each.values[0] == name)], id=each.id)
        for each in WORLDS
    ]


# ---- the same training, saved and resumed ----


def trained(policy: str, world: int, save: str | None = None, resume: str | None = None) -> dict[str, Any]:
    typed = (PROMISES[policy].composite if policy in PROMISES else "") or policy
    return fit(Composite, typed, world, STEPS, save, resume, size=bucket.SIZE, at=HALF, sync_batchnorm=True)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return trained("single", 1)


@pytest.mark.parametrize(("policy", "world"), rarely("dp"))  # test_dp.py
def test_it_trains_as_one_device_and_goes_on_from_its_own_checkpoint(policy, world, ranks, alone, tmp_path):
    """Bit for bit. From policy to policy: below."""
    path = str(tmp_path / "half.ckpt")
    play = on(ranks, world)
    unbroken = play(trained, policy, world, save=path)
    equals(unbroken, alone)
    for one, other in zip(play(trained, policy, world, resume=path), unbroken, strict=True):
        assert distance(one, other) == 0


MORE = {  # and the ranks that each is tried on
    **dict.fromkeys(MIXES, 2),
    **dict.fromkeys([f"zero{stage}+offload" for stage in (1, 2, 3)], 2),
    **dict.fromkeys(["zero1+hybrid:2", "zero2+hybrid:2", "zero3+hybrid:2+offload", "fsdp+hybrid:2+offload"], 4),
    **dict.fromkeys(["fsdp+offload", "fsdp+whole", "fsdp+recompute", "zero3+recompute", "generator=fsdp,*=zero3"], 2),
    **dict.fromkeys([f"deepspeed{stage}+offload" for stage in (1, 2, 3)], 2),
    **dict.fromkeys(["generator=deepspeed3,*=ddp", "generator=deepspeed1,*=zero3"], 2),
    "generator=ddp,*=deepspeed2+offload": 2,
}


def needing(policies: Iterable[Any]) -> list[Any]:
    """The same; those with DeepSpeed in them are skipped where it is not installed."""
    deepspeed = pytest.mark.skipif(missing("deepspeed2"), reason="needs DeepSpeed")
    return [pytest.param(each, marks=[deepspeed] * ("deepspeed" in str(each)), id=str(each)) for each in policies]


@pytest.mark.parametrize("policy", often(needing(MORE), [MIXES[1], "zero3+offload"]))
def test_mixes_and_options_train_as_one_device(policy, ranks, alone):
    equals(ranks(MORE[policy]).run(trained, policy, MORE[policy]), alone)


@pytest.mark.parametrize(
    "policies",
    [
        ("zero1", "fsdp", "single", "zero3", "zero2", "generator=zero3,*=zero1"),
        *needing([("deepspeed1", "zero3", "deepspeed2", "single", "deepspeed3", "ddp")]),
    ],
)
def test_a_checkpoint_goes_from_policy_to_policy(policies, ranks, unbroken, tmp_path):
    """A step under each, at changing numbers of ranks."""
    path = None
    for step, policy in enumerate(policies, 1):
        before, path = path, str(tmp_path / f"{step}.ckpt")
        arrived = travel(ranks, policy, step, save=path, resume=before)
    assert distance(arrived, unbroken) < EXACT


# ---- bytes and memory ----


def whole(policy: str) -> int:
    """The bytes of one player of the game that is weighed."""
    return 4 * sum(weight.numel() for weight in promise(policy).sized().first.parameters())


P = whole("ddp")


def weighed(policy: str, world: int) -> tuple[dict[str, dict[str, float]], float]:
    """Multiples of P: what each kind of collective moved in each phase of the third step, and what a rank keeps then.

    It keeps all tensors that Python knows and did not know before.
    """
    forget()
    kept, strategy = [], WatchedStrategy(policy, check=policy == TRIED)
    weighing = LambdaCallback(on_train_batch_end=lambda *_: kept.append(held()))
    made = trainer(strategy, world, 3, precision="32-true", callbacks=[weighing])
    made.fit(promise(policy).sized(), loader(policy, world, single))
    # A trace has the bytes that a collective reads and those that it fills: of a whole, and of a share of it.
    both = {GATHER: 1 + 1 / world, REDUCE: 1 + 1 / world, SUM: 1}
    moved: dict[str, dict[str, float]] = {}
    for step, phase, trace in strategy.traces:
        for kind, size in trace.collectives if step == 2 else ():
            sums = moved.setdefault(phase, {})
            sums[kind] = sums.get(kind, 0) + size / both.get(kind, 1) / whole(policy)
    return moved, kept[-1] / whole(policy)


@pytest.mark.parametrize(("policy", "world"), rarely("pipeline"))  # test_pipeline.py
def test_a_phase_moves_what_it_promises_and_a_rank_keeps_it_between_phases_and_no_more(policy, world, ranks):
    said = promise(policy)
    keeps = 2 * (said.keeps(world) + said.fixed / P) + said.keeps_frozen(world)
    for moved, kept in on(ranks, world)(weighed, policy, world):
        for phase in ("first", "second") if said.moves is not None else ():
            # Beside them there are norms and flags, a few bytes a weight.
            counted = {kind: times for kind, times in moved.get(phase, {}).items() if times > 0.01}
            assert counted == pytest.approx(said.moves, rel=0.01), phase
        assert kept == pytest.approx(keeps, abs=0.05)


# ---- what `gan.plan` says ----


PLANNED = {"allreduce_": "all-reduce", GATHER: "all-gather", REDUCE: "reduce-scatter"}


@pytest.mark.parametrize("name", [name for name in NAMES if POLICIES[name].max_ranks is None])
def test_it_is_planned_as_it_promises(name):
    """So a new policy cannot forget to say what it costs. No engine is made, so DeepSpeed need not be there."""
    said, world = promise(name), 4
    cost = planned(said.sized, name, world, single(0))
    kept = sum(held.bytes for held in cost.held.values()) / whole(name)
    assert kept == pytest.approx(2 * (said.keeps(world) + said.fixed / P) + said.keeps_frozen(world), abs=0.05)
    for phase, moves in payload(cost).items() if said.moves is not None else ():
        counted = {kind: size / whole(name) for kind, size in moves.items() if size / whole(name) > 0.01}
        assert counted == pytest.approx({PLANNED[kind]: times for kind, times in said.moves.items()}, rel=0.01), phase


# ---- refusals ----


class Whole2d(Plain):
    """An optimizer that looks at whole weights."""

    def configure_players(self):
        generator, discriminator = super().configure_players()
        yield generator
        yield replace(discriminator, optimizer=partial(Adafactor, lr=1e-2))


def refusal(policy: str, world: int) -> str | None:
    return words_of(fit, Whole2d, policy, world, 1, batches=single, precision="32-true")


@pytest.mark.parametrize(("policy", "world"), ON_TWO)
def test_it_refuses_what_it_does_not_know_or_cannot_do(policy, world, ranks):
    """What a policy does not know is refused when it is typed; what it cannot train exactly, before it trains."""
    with pytest.raises(UserError, match=f"unknown option 'magic' of strategy '{policy}'; known: "):
        PhaseStrategy(f"{policy}+magic")
    for option in OPTIONS.keys() - POLICIES[policy].takes:
        with pytest.raises(UserError, match=f"strategy '{policy}' has no option '{option}'; type "):
            PhaseStrategy(f"{policy}+{option}")
    for message in on(ranks, world)(refusal, policy, world):
        if promise(policy).cut:
            assert message is not None
            assert f"player 'discriminator': policy '{policy}' cuts weights into pieces, and Adafactor" in message
            assert f"type --strategy discriminator=zero1,*={policy}" in message
        else:
            assert message is None


def test_a_policy_that_promises_nothing_is_told_where_to():
    assert set(NAMES) == set(PROMISES)
    with pytest.raises(pytest.fail.Exception, match=r"policy 'mine' is in POLICIES, but not in PROMISES of .*contract"):
        promise("mine")
