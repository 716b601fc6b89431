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
import torch.distributed as dist
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from gan.errors import UserError
from strategies import PhaseStrategy
from strategies.choice import choices
from strategies.policies.deepspeed import DeepSpeed1, DeepSpeed2, DeepSpeed3
from strategies.sharding.deepspeed_engine import package
from strategies.strategy import POLICIES
from tests.ranks.test_conduct import validated
from tests.ranks.test_zero import Lopsided
from tests.support.doubled import doubled
from tests.support.hard_games import HARD, Plain, Teacher
from tests.support.journey import travel
from tests.support.parity import BROKEN, EXACT, distance, share, train, trainer, vectors, weights
from tests.support.saved import without_optimizers
from tests.support.watch import WatchedStrategy

installed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install '.[deepspeed]'")
STAGES = ["deepspeed1", "deepspeed2", "deepspeed3"]
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


@pytest.mark.parametrize("policy", STAGES)
def test_one_process_is_one_device(policy):
    if find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: pip install '.[deepspeed]'")
    assert distance(train_single(policy), train_single("single")) == 0


# ---- in float32, as it is ----


def single(step):
    return {name: value.float() for name, value in vectors(step).items()}


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
@pytest.mark.parametrize("policy", STAGES)
@pytest.mark.parametrize("name", ["SometimesReached", "Penalty"])
def test_parity_in_single_precision(name, policy, ranks):
    results = ranks(2).run(train_single, policy, HARD[name], 2)
    assert relative(train_single("single", HARD[name]), results[0]) < ROUNDED
    assert distance(weights(results[1]), weights(results[0])) == 0


# ---- controls ----


class Unreduced(DeepSpeed2):
    """In which one rank's gradients are everyone's."""

    name = "unreduced"

    def finish(self, scale):
        for weight in self.weights.values():
            if weight.grad is not None:
                dist.broadcast(weight.grad, 0)
        return super().finish(scale)


class Zeroed(DeepSpeed1):
    """As DeepSpeed itself does: a weight out of reach has a gradient of zeros."""

    name = "zeroed"

    def finish(self, scale):
        everything = list(self.weights.values())
        with mock.patch("strategies.sharding.deepspeed_engine.drop_unreached", lambda *_: everything):
            return super().finish(scale)


class Stale(DeepSpeed3):
    """That goes on with the weights it gathered first."""

    name = "stale"

    def make_storage(self):
        storage = super().make_storage()
        storage.reshard = lambda: None
        return storage


def train_without(broken, game):
    POLICIES[broken.name] = broken
    return train_doubled(game, broken.name, 2)


@installed
@pytest.mark.parametrize(("broken", "name"), [(Unreduced, "Plain"), (Zeroed, "TwoPhases"), (Stale, "Plain")])
def test_the_control_without_one_part_differs(name, broken, ranks, hard_alone):
    assert distance(ranks(2).run(train_without, broken, HARD[name])[0], hard_alone(name)) > BROKEN


# ---- what is moved and held ----


def moved(policy, game):
    """The collectives of every phase of the third step on this rank."""
    module, strategy = game(), WatchedStrategy(policy)
    data = DataLoader([share(single(step), dist.get_rank(), 2) for step in range(3)], batch_size=None)
    with quickly():
        trainer(strategy, 2, 3, precision="32-true").fit(module, data)
    return [(phase, trace.collectives) for step, phase, trace in strategy.traces if step == 2]


@installed
@pytest.mark.parametrize("policy", STAGES)
def test_a_phase_moves_only_its_learners_bytes_and_each_once(policy, ranks):
    """A collective's bytes here are those of what it reads and what it fills: a whole, and a share of it."""
    for phase, collectives in ranks(2).run(moved, policy, Plain)[0]:
        learner = [weight.numel() for weight in getattr(Plain(), phase).parameters()]
        exact, norms = 4 * sum(learner), 8 * len(learner)
        aligned = 4 * (sum(learner) + -sum(learner) % 4)  # DeepSpeed's; in stage 3 each weight by itself
        if policy == "deepspeed3":
            players = [phase, "generator" if phase == "discriminator" else "discriminator"]
            shares = [4 * -(-w.numel() // 2) for player in players for w in getattr(Plain(), player).parameters()]
            gathered = [("_allgather_base_", 3 * share) for share in shares]
            reduced = 3 * sum(shares[: len(learner)])
            assert collectives == [*gathered, ("_reduce_scatter_base_", reduced), ("allreduce_", norms), *OWN]
        else:
            spread = ("_allgather_base_", aligned * 3 // 2)
            assert collectives == [("allreduce_", exact), ("allreduce_", norms), spread]


OWN = [("allreduce_", 8)]  # the norm again, which DeepSpeed's stage 3 always takes


def held(policy, world):
    game, strategy = Lopsided(), PhaseStrategy(policy)
    data = DataLoader([share(single(0), dist.get_rank(), world)] * 2, batch_size=None)
    made = trainer(strategy, world, 2, precision="32-true")
    found = {}

    def look(*_):
        each, storages = strategy.policies["net"], {}
        for tensor in [*each.storage.longs, *game.net.parameters()]:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        found["weights"] = sum(storages.values())
        found["moments"] = sum(t.nbytes for s in each.optimizer.state.values() for t in s.values() if t.ndim)
        found["average"] = sum(average.nbytes for average in each.ema.average)
        found["frozen"] = sum(p.untyped_storage().nbytes() for p in game.teacher.parameters())

    made.callbacks.append(_At(look))
    with quickly():
        made.fit(game, data)
    return found


class _At:
    """Called when a batch is over."""

    def __new__(cls, look):
        from lightning import Callback

        callback = Callback()
        callback.on_train_batch_end = look
        return callback


@installed
@pytest.mark.parametrize("policy", STAGES)
def test_a_rank_holds_its_share(policy, ranks):
    game = Lopsided()
    whole = 4 * sum(p.numel() for p in game.net.parameters())
    teacher = 4 * sum(p.numel() for p in game.teacher.parameters())
    sharded = policy == "deepspeed3"
    for found in ranks(4).run(held, policy, 4):
        assert found["moments"] <= 2 * whole / 4 * 1.01
        assert found["average"] <= whole / 4 * 1.01
        assert found["weights"] < whole * (0.26 if sharded else 1.26)
        assert found["frozen"] < 20 if sharded else found["frozen"] == teacher


# ---- checkpoints that travel ----


@installed
def test_the_control_a_journey_without_its_optimizers_arrives_elsewhere(saved, unbroken, ranks, tmp_path):
    damaged = without_optimizers(saved("deepspeed2"), tmp_path / "damaged.ckpt")
    assert distance(travel(ranks, "deepspeed3", 6, resume=damaged), unbroken) > BROKEN


# ---- one process, shared graphs, and what is left behind ----


@installed
@pytest.mark.parametrize("policy", STAGES)
def test_one_process_validates_with_averages_too(policy):
    with mock.patch("strategies.sharding.deepspeed_engine.DTYPE", torch.float64):
        seen, _ = validated(policy, 1)
    assert distance(seen, validated("single", 1)[0]) == 0


class Convolved(Teacher):
    """Networks whose weights autograd keeps as they are, in a graph that two phases share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        conv = partial(nn.Conv1d, kernel_size=3, padding=1)
        self.generator = nn.Sequential(
            nn.Linear(4, 6), nn.Unflatten(1, (1, 6)), conv(1, 3), nn.Tanh(), conv(3, 1), nn.Flatten()
        )
        self.teacher = nn.Sequential(nn.Unflatten(1, (1, 6)), conv(1, 1), nn.Flatten())


@installed
@pytest.mark.parametrize("policy", ["deepspeed3", "teacher=ddp,*=deepspeed3", "teacher=deepspeed3,*=ddp"])
def test_a_shared_graph_outlives_its_phase(policy, ranks):
    results = ranks(2).run(train_doubled, Convolved, policy, 2)
    assert distance(results[0], train(Convolved, policy="single")) < EXACT


def engines(policy):
    strategy, data = PhaseStrategy(policy), DataLoader([share(single(0), dist.get_rank(), 2)], batch_size=None)
    with quickly():
        trainer(strategy, 2, 1, precision="32-true").fit(Plain(), data)
    return [each.storage.engine for each in strategy.policies.values()]


@installed
@pytest.mark.parametrize("policy", STAGES)
def test_no_engine_is_left(policy, ranks):
    assert ranks(2).run(engines, policy) == [[None, None]] * 2


def what_it_leaves_in_torch(policy):
    """Names in torch that stand for something else after a run."""
    places = (torch, torch.nn.functional, nn.Module, nn.Linear, torch.Tensor)
    before = [dict(vars(place)) for place in places]
    data = DataLoader([share(single(0), dist.get_rank(), 2)], batch_size=None)
    with quickly():
        trainer(PhaseStrategy(policy), 2, 1, precision="32-true").fit(Plain(), data)
    return [
        name
        for place, names in zip(places, before, strict=True)
        for name, value in vars(place).items()
        if name in names and value is not names[name]
    ]


@installed
@pytest.mark.parametrize("policy", STAGES)
def test_torch_is_as_it_was(policy, ranks):
    """DeepSpeed by itself replaces torch's linear function for the rest of the process."""
    assert ranks(2).run(what_it_leaves_in_torch, policy) == [[], []]


# ---- its own configuration ----


@installed
@pytest.mark.parametrize("policy", STAGES)
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
    results = ranks(2).run(train_doubled, HARD["TwoPhases"], f"{policy}+config:{tmp_path / 'ds.json'}", 2)
    assert distance(results[0], hard_alone("TwoPhases")) < EXACT
    assert distance(weights(results[1]), weights(results[0])) == 0


def refused(policy, game=Plain, precision="32-true"):
    data = DataLoader([share(single(0), dist.get_rank(), 2)], batch_size=None)
    try:
        with quickly():
            trainer(PhaseStrategy(policy), 2, 1, precision=precision).fit(game(), data)
    except UserError as error:
        return str(error)
    return None


@installed
def test_what_a_configuration_may_not_say_is_refused_at_once(ranks, tmp_path):
    said = {
        "fp16": {"enabled": True},
        "gradient_clipping": 1.0,
        "train_batch_size": 8,
        "optimizer": {"type": "Adam"},
        "compression_training": {},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "zero_quantized_weights": True},
    }
    (tmp_path / "ds.json").write_text(json.dumps(said))
    for answer in ranks(2).run(refused, f"generator=deepspeed2+config:{tmp_path / 'ds.json'},*=ddp"):
        assert answer.startswith("player 'generator': deepspeed2+config:")
        for words in (
            "fp16 (type --precision 16-mixed)",
            "gradient_clipping (type Player(clip=...))",
            "train_batch_size (type --batch-size)",
            "optimizer (the player brings its own)",
            "compression_training (not known to leave training as it is)",
            "zero_optimization.stage 3 (type deepspeed3)",
            "zero_optimization.offload_optimizer (type deepspeed2+offload)",
            "zero_optimization.zero_quantized_weights (not known to leave training as it is)",
        ):
            assert words in answer


# ---- refusals ----


@installed
def test_double_precision_is_refused(ranks):
    for message in ranks(2).run(refused, "generator=deepspeed2,*=ddp", Plain, "64-true"):
        assert message == (
            "player 'generator': strategy 'deepspeed2' computes in float32 and its weights are float64; "
            "type --precision 32-true, or --strategy generator=zero2,*=deepspeed2"
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
        ("broken.json", r"cannot read it: Expecting"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused_at_once(text, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match=answer):
        PhaseStrategy(f"deepspeed2+config:{text}")


@pytest.mark.parametrize("policy", [*STAGES, "deepspeed", "generator=ddp,*=deepspeed"])
def test_a_missing_package_is_said_when_the_strategy_is_made(policy):
    with (
        mock.patch("strategies.choice.find_spec", lambda name: None),
        pytest.raises(UserError, match=r"needs its package: pip install '.\[deepspeed\]' \(coordinated-gans"),
    ):
        PhaseStrategy(policy)


def looked_again():
    deepspeed = package(torch.device("cpu"))
    deepspeed.utils.groups._WORLD_GROUP = kept = object()
    package(torch.device("cpu"))
    before = deepspeed.utils.groups._WORLD_GROUP is kept
    with mock.patch.object(deepspeed, "followed_by_phases", object()):
        package(torch.device("cpu"))
    return before, deepspeed.utils.groups._WORLD_GROUP


@installed
def test_process_groups_that_were_made_anew_are_looked_up_again(ranks):
    assert ranks(2).run(looked_again) == [(True, None)] * 2


@installed
def test_deepspeed_is_another_word_for_deepspeed2():
    assert POLICIES["deepspeed"] is DeepSpeed2
    assert choices("deepspeed", POLICIES)["*"].policy == "deepspeed"


class ThreeMoments(Plain):
    """An optimizer that keeps three tensors a weight."""

    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, optimizer=partial(Adam, lr=1e-2, amsgrad=True))


@installed
def test_parity_with_state_of_more_than_two_kinds(ranks):
    results = ranks(2).run(train_doubled, ThreeMoments, "deepspeed2", 2)
    assert distance(results[0], train(ThreeMoments, policy="single")) < EXACT
