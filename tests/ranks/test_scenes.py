"""Five questions to each scene of tests/scenes/: whether it trains as one device does, and what must differ differs;
whether it resumes to the last bit, and travels to other policies and ranks; and what is refused, by name."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest

from gan.files.errors import UserError
from strategies.policies import POLICIES
from tests.scenes import SCENES
from tests.support.duel import fit
from tests.support.parity import BROKEN, EXACT, Deaf, distance, weights
from tests.support.scene import PROMISED, Mutant

UNCHANGED = Mutant("")


def play(
    name: str,
    policy: str,
    world: int,
    mutant: Mutant | int = UNCHANGED,
    save: str | None = None,
    resume: str | None = None,
    size: int | None = None,
    check: bool = False,
    alone: bool = False,
) -> dict[str, Any]:
    """Train a scene on one rank, or a mutant of it: that of this number, as not every one can be sent to a rank."""
    scene = SCENES[name]
    mutant = scene.mutants[mutant] if isinstance(mutant, int) else mutant
    game = mutant.game or (scene.alone if alone and scene.alone else scene.game)
    callbacks, settings = (mutant.callbacks or scene.callbacks)(), scene.settings | mutant.settings
    how = {"callbacks": callbacks, "sync_batchnorm": True, "batches": mutant.batches or scene.batches, **settings}
    how |= {"save": save, "at": scene.steps // 2, "resume": resume, "size": size or scene.bucket}
    with mock.patch.dict(POLICIES, {Deaf.name: Deaf}):
        return fit(game, policy, world, scene.steps, check=check, **how)


def refusal(name: str, policy: str, world: int, number: int) -> str | None:
    """The words in which a scene's game is refused."""
    wrong = SCENES[name].refusals()[number]
    mutant = Mutant("", game=wrong.game, settings=wrong.settings, callbacks=list)
    try:
        play(name, policy, world, mutant, check=wrong.check)
    except (UserError, RuntimeError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return None


@pytest.fixture(scope="module")
def on_ranks(ranks) -> Callable[..., list[Any]]:
    """Call a function on all ranks of a world; a world of one is this process."""

    def call(function: Callable[..., Any], name: str, policy: str, world: int, **how: Any) -> list[Any]:
        if world == 1 or policy == "dp":
            return [function(name, policy, world, **how)]
        return ranks(world).run(function, name, policy, world, **how)

    return call


@pytest.fixture(scope="module")
def expected() -> Callable[[str], dict[str, Any]]:
    """What a loop by hand, or one device, makes of a scene: once."""

    @cache
    def get(name: str) -> dict[str, Any]:
        scene = SCENES[name]
        return scene.by_hand(scene.steps) if scene.by_hand else play(name, "single", 1, alone=True)

    return get


@pytest.fixture(scope="module")
def journey(on_ranks, tmp_path_factory) -> Callable[[str, str], tuple[list[dict[str, Any]], str]]:
    """A scene's training under a policy, and its checkpoint on the way if there is one: once."""

    @cache
    def get(name: str, policy: str, world: int) -> tuple[list[dict[str, Any]], str]:
        scene, save = SCENES[name], str(tmp_path_factory.mktemp("scene") / "half.ckpt")
        more = {"save": save} if policy in scene.saved else {}
        return on_ranks(play, name, policy, world, check=policy in scene.checked, **more), save

    return get


def same(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """The first rank has what is wanted; the others have the first one's weights to the last bit."""
    assert distance({name: found[0][name] for name in wanted}, wanted) < EXACT
    for other in found[1:]:
        assert distance(weights(other), weights(found[0])) == 0


def differ(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """By numbers, in what both have."""
    both = found.keys() & wanted.keys()
    assert BROKEN < distance({name: found[name] for name in both}, {name: wanted[name] for name in both}) < math.inf


def asked(of: Callable[[Any], Iterator[tuple[str, bool, tuple[Any, ...]]]]) -> list[Any]:
    """Parameters for all scenes: ids, whether only `make matrix` asks, and values after the scene's name."""
    return [
        pytest.param(
            name,
            *values,
            id=f"{name}-{of_them}",
            marks=[pytest.mark.slow] * slow + [pytest.mark.promise(what, PROMISED) for what in scene.promises],
        )
        for name, scene in SCENES.items()
        for of_them, slow, values in of(scene)
    ]


def policies(scene: Any) -> Iterator[Any]:
    for policy, world in scene.policies.items():
        yield policy, policy not in scene.often, (policy, world)
    for policy in scene.four:
        yield f"{policy}-4", True, (policy, 4)


def mutants(scene: Any) -> Iterator[Any]:
    """`make test` plays the first one that is not slow."""
    first = next((mutant for mutant in scene.mutants if not mutant.slow), None)
    for number, mutant in enumerate(scene.mutants):
        yield mutant.name, mutant is not first, (number,)


def saves(scene: Any) -> Iterator[Any]:
    for number, policy in enumerate(scene.saved):
        yield policy, number > 0 or policy not in scene.often or not scene.travels_often, (policy,)


def arrivals(scene: Any) -> Iterator[Any]:
    for number, (policy, world) in enumerate(scene.arrives):
        yield f"{policy}-{world}", number > 0 or world > 2 or not scene.travels_often, (policy, world)


def refusals(scene: Any) -> Iterator[Any]:
    """`make test` asks each game for the same words once, under its first policy."""
    said = []
    for number, wrong in enumerate(scene.refusals()):
        yield str(number), wrong.slow or (wrong.game, wrong.words) in said, (number,)
        said.append((wrong.game, wrong.words))


@pytest.mark.parametrize(("name", "policy", "world"), asked(policies))
def test_it_trains_as_one_device(name, policy, world, journey, expected):
    same(journey(name, policy, world)[0], expected(name))


@pytest.mark.parametrize(("name", "number"), asked(mutants))
def test_what_must_differ_differs(name, number, on_ranks, expected):
    mutant = SCENES[name].mutants[number]
    world = 1 if "single" in mutant.policy else mutant.ranks
    differ(on_ranks(play, name, mutant.policy, world, mutant=number)[0], expected(name))


@pytest.mark.parametrize(("name", "policy"), asked(saves))
def test_it_resumes_to_the_last_bit(name, policy, journey, on_ranks):
    unbroken, half = journey(name, policy, SCENES[name].policies[policy])
    resumed = on_ranks(play, name, policy, SCENES[name].policies[policy], resume=half)
    assert [distance(one, other) for one, other in zip(resumed, unbroken, strict=True)] == [0] * len(unbroken)


@pytest.mark.parametrize(("name", "policy", "world"), asked(arrivals))
def test_it_travels_to_another_policy_or_number_of_ranks(name, policy, world, journey, on_ranks, expected):
    """There in buckets of the usual size."""
    first = SCENES[name].saved[0]
    _, half = journey(name, first, SCENES[name].policies[first])
    same(on_ranks(play, name, policy, world, resume=half, size=2**20), expected(name))


@pytest.mark.parametrize(("name", "number"), asked(refusals))
def test_it_is_refused_by_name(name, number, on_ranks):
    wrong = SCENES[name].refusals()[number]
    world = 1 if "single" in wrong.policy else 2
    for said in on_ranks(refusal, name, wrong.policy, world, number=number):
        words = (wrong.words,) if isinstance(wrong.words, str) else wrong.words
        assert said is not None and all(each in said for each in words) and wrong.unsaid not in said, said


def test_scenes_say_what_they_are():
    """Each has a control, and a checkpoint to begin from where it travels."""
    for name, scene in SCENES.items():
        assert scene.mutants or scene.refused, name
        assert scene.saved or not scene.arrives, name
