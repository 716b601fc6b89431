"""deepspeed1, 2 and 3: the same training as one device, mixed with other policies, saved and resumed anywhere."""

import gc
import json
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Adam

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.policies import POLICIES
from strategies.policies.choice import choices
from strategies.policies.deepspeed import DeepSpeed2
from strategies.sharding.deepspeed_engine import package
from tests.support.doubled import doubled
from tests.support.hard_games import HARD, Plain
from tests.support.parity import EXACT, distance, equals, often, parts, refused, single, train, trainer, weights

installed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install '.[deepspeed]'")
STAGES = ["deepspeed1", "deepspeed2", "deepspeed3"]
LAST_OFTEN = often(STAGES, ["deepspeed3"])
ROUNDED = 1e-6  # what float32 keeps to, relative to the largest number of a kind


@contextmanager
def quickly():
    """DeepSpeed collects garbage for half a second whenever it makes an engine of stage 3."""
    with mock.patch.object(gc, "collect", lambda *_: 0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train_doubled(game, policy, world):
    """In float64, as DeepSpeed has it only in tests."""
    with doubled(), quickly():
        return train(game, policy=policy, world=world)


# ---- in float32, as it is ----


def train_single(policy, game=Plain, world=1):
    with quickly():
        return train(game, single, policy, world, precision="32-true")


def kind(name):
    """Whose numbers, and which of his."""
    what, place = name.split(" ", 1)
    return what, place.split(".")[0], place.split(".")[-1] if what == "optimizer" else ""


def relative(one, other):
    """The largest difference, relative to the largest number of its kind."""
    assert one.keys() == other.keys()
    largest = {}
    for name, value in one.items():
        largest[kind(name)] = max(largest.get(kind(name), 0.0), value.abs().max().item())
    return max(((one[name] - other[name]).abs().max() / largest[kind(name)]).item() for name in one)


@installed
@pytest.mark.parametrize("policy", LAST_OFTEN)
@pytest.mark.parametrize("name", often(["SometimesReached", "Penalty"], ["SometimesReached"]))
def test_parity_in_single_precision(name, policy, ranks):
    results = ranks(2).run(train_single, policy, HARD[name], 2)
    assert relative(train_single("single", HARD[name]), results[0]) < ROUNDED
    assert distance(weights(results[1]), weights(results[0])) == 0


# ---- what is left behind ----


class ThreeMoments(Plain):
    """An optimizer with state of more than two kinds."""

    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, optimizer=partial(Adam, lr=1e-2, amsgrad=True))


@installed
@pytest.mark.slow
def test_an_optimizer_may_have_state_of_more_than_two_kinds(ranks):
    found = ranks(2).run(train_doubled, ThreeMoments, "deepspeed2", 2)
    assert distance(found[0], train(ThreeMoments, policy="single")) < EXACT


def left_behind(policy):
    """Engines, and names in torch that stand for something else after a run."""
    places = (torch, torch.nn.functional, nn.Module, nn.Linear, torch.Tensor)
    before, strategy = [dict(vars(place)) for place in places], PhaseStrategy(policy)
    with quickly():
        trainer(strategy, 2, 1, precision="32-true").fit(Plain(), parts(1, 2, single))
    replaced = [
        name
        for place, names in zip(places, before, strict=True)
        for name, value in vars(place).items()
        if name in names and value is not names[name]
    ]
    return [each.storage.engine for each in strategy.policies.values()], replaced


@installed
@pytest.mark.parametrize("policy", LAST_OFTEN)
def test_no_engine_is_left_and_torch_is_as_it_was(policy, ranks):
    """DeepSpeed by itself replaces torch's linear function for the rest of the process."""
    assert ranks(2).run(left_behind, policy) == [([None, None], [])] * 2


# ---- its own configuration ----


@installed
@pytest.mark.parametrize("policy", LAST_OFTEN)
@pytest.mark.slow
def test_parity_with_a_configuration_of_its_own(policy, ranks, hard_alone, tmp_path):
    """Buckets so small that there are several, and each switch the other way."""
    zero = {
        "stage": int(policy[-1]),
        "allgather_bucket_size": 16,
        "contiguous_gradients": False,
        "overlap_comm": policy != "deepspeed1",
        "reduce_bucket_size": 16,
        "sub_group_size": 20,
        "use_multi_rank_bucket_allreduce": False,
    }
    said = {"zero_optimization": zero, "gradient_clipping": "auto", "wall_clock_breakdown": False}
    (tmp_path / "ds.json").write_text(json.dumps(said))
    policy = f"{policy}+config:{tmp_path / 'ds.json'}"
    equals(ranks(2).run(train_doubled, HARD["TwoPhases"], policy, 2), hard_alone("TwoPhases"))


UNSAYABLE = {
    "fp16": {"enabled": True},
    "gradient_clipping": 1.0,
    "train_batch_size": 8,
    "optimizer": {"type": "Adam"},
    "compression_training": {},
    "zero_optimization.reduce_scatter": False,  # of no section
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "zero_quantized_weights": True,
        "reduce_bucket_size": "many",
        "sub_group_size": -5,
    },
}


@installed
def test_what_a_configuration_may_not_say_is_refused_at_once(ranks, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(UNSAYABLE))
    policy = f"generator=deepspeed2+config:{tmp_path / 'ds.json'},*=ddp"
    names = [*list(UNSAYABLE)[:-1], *(f"zero_optimization.{name}" for name in UNSAYABLE["zero_optimization"])]
    for answer in ranks(2).run(refused, Plain, single, policy, 2, 1, precision="32-true"):
        assert answer.startswith("player 'generator': deepspeed2+config:")
        assert f"take out {', '.join(names)}, because" in answer


# ---- refusals ----


@installed
def test_double_precision_is_refused(ranks):
    """What to type is right for all players at once."""
    for typed, other in (
        ("generator=deepspeed2,*=ddp", "generator=zero2,*=ddp"),
        ("generator=deepspeed2+offload,*=deepspeed1", "generator=zero2,*=zero1"),
        ("deepspeed2", "zero2"),
    ):
        for message in ranks(2).run(refused, Plain, single, typed, 2, 1):
            assert message == (
                "player 'generator': strategy 'deepspeed2' computes in float32 and its weights are float64; "
                f"type --precision 32-true, or --strategy {other}"
            )


@installed
def test_an_offload_without_an_engine_is_refused():
    with pytest.raises(UserError, match=r"player 'generator': 'deepspeed2\+offload' needs two processes or more"):
        train_single("deepspeed2+offload")


@installed
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", r"option 'config:' of strategy 'deepspeed2': name a file"),
        ("missing.json", r"option 'config:missing.json' of strategy 'deepspeed2': cannot read it"),
        ("list.json", r"expected a JSON object"),
        ("null.json", r"option 'config:null.json' .*: expected a JSON object, and one in zero_optimization"),
        ("broken.json", r"cannot read it: Expecting"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused_at_once(text, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "null.json").write_text('{"zero_optimization": null}')
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=answer):
        PhaseStrategy(f"deepspeed2+config:{text}")


@pytest.mark.parametrize("policy", [*STAGES, "deepspeed", "generator=ddp,*=deepspeed"])
def test_a_missing_package_is_said_when_the_strategy_is_made(policy):
    with (
        mock.patch("strategies.policies.choice.find_spec", lambda name: None),
        pytest.raises(UserError, match=r"needs its package: pip install '.\[deepspeed\]' \(coordinated-gans"),
    ):
        PhaseStrategy(policy)


def looked_again():
    deepspeed = package(torch.device("cpu"))
    deepspeed.utils.groups._WORLD_GROUP = kept = object()
    package(torch.device("cpu"))
    before = deepspeed.utils.groups._WORLD_GROUP is kept
    with mock.patch.object(deepspeed, "world_of_phases", object()):
        package(torch.device("cpu"))
    return before, deepspeed.utils.groups._WORLD_GROUP


@installed
def test_process_groups_that_were_made_anew_are_looked_up_again(ranks):
    assert ranks(2).run(looked_again) == [(True, None)] * 2


@installed
def test_deepspeed_is_another_word_for_deepspeed2():
    assert POLICIES["deepspeed"] is DeepSpeed2
    assert choices("deepspeed", POLICIES)["*"].policy == "deepspeed"
