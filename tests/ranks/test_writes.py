"""Weights that code writes, in a forward or between phases: kept under every policy, or refused by name."""

import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from lightning import Callback

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.sharding.bucket import Bucket
from strategies.sharding.deepspeed_engine import Engine
from tests.ranks.test_contract import Saves, loader, needing
from tests.support.doubled import doubled
from tests.support.hard_games import Plain
from tests.support.parity import (
    BROKEN,
    EXACT,
    distance,
    equals,
    in_buckets,
    often,
    parts,
    refused,
    snapshot,
    train,
    trainer,
)
from tests.support.writing_games import (
    WRITES,
    Writing,
    WritingAlone,
    WritingData,
    WritingFrozen,
    WritingLate,
    WritingOther,
    write,
)

WAYS = {"copy_": Writing, "data.copy_": WritingData, "data=": WritingOther}
OURS = ("ddp", "zero1", "zero2", "zero3", "fsdp")
COPIES = ("zero1+offload", "zero2+offload", "zero3+offload", "zero3+whole", "zero3+hybrid:2", "fsdp+offload")
ENGINES = ("deepspeed1", "deepspeed2", "deepspeed3", "deepspeed3+offload")


def playing(ranks, policy, function, *args, **kwargs):
    """The results of all ranks."""
    context = doubled() if "deepspeed" in policy else nullcontext()
    with context:
        return ranks(2).run(doubly if "deepspeed" in policy else straight, function, args, {**kwargs, "policy": policy})


def straight(function, args, kwargs):
    return function(*args, world=2, **kwargs)


def doubly(function, args, kwargs):
    with doubled():
        return function(*args, world=2, **kwargs)


# ---- in a forward ----


@pytest.fixture(scope="module")
def alone():
    return {game: train(game, policy="single") for game in (*WAYS.values(), WritingFrozen)}


@pytest.mark.promise("weights that a forward writes", "the training of one device, or a refusal by name")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", often(OURS))
def test_what_a_forward_writes_is_kept(policy, way, ranks, alone):
    equals(playing(ranks, policy, train, WAYS[way]), alone[WAYS[way]])


@pytest.mark.parametrize("policy", often(needing([*COPIES, *ENGINES])))
def test_it_is_kept_where_the_shard_is_a_copy(policy, ranks, alone):
    equals(playing(ranks, policy, train, WritingData), alone[WritingData])


@pytest.mark.parametrize("game", [WritingData, WritingFrozen])
def test_it_is_kept_bucket_by_bucket(game, ranks, alone):
    """Resharded between forward and backward, and then gathered again."""
    equals(ranks(2).run(in_buckets, 100, train, game, policy="zero3", world=2), alone[game])


def forgetting(where, name, game, policy):
    with mock.patch.object(where, name, lambda *_: None):
        return train(game, policy=policy, world=2)


@pytest.mark.promise("weights that a forward writes")
@pytest.mark.parametrize("policy", ["zero3", "zero2+offload"])
def test_the_control_that_keeps_no_writes_differs(policy, ranks, alone):
    found = ranks(2).run(forgetting, Bucket, "keep_writes", WritingData, policy)
    assert distance(found[0], alone[WritingData]) > BROKEN


@pytest.mark.parametrize("policy", ["zero1", "zero2"])
def test_the_control_that_overlooks_other_memory_differs(policy, ranks, alone):
    found = ranks(2).run(forgetting, Bucket, "_move_back", WritingOther, policy)
    assert distance(found[0], alone[WritingOther]) > BROKEN


@pytest.mark.slow
@pytest.mark.parametrize("policy", needing(["deepspeed2", "deepspeed3"]))
def test_the_control_of_an_engine_that_keeps_no_writes_differs(policy, ranks, alone):
    found = ranks(2).run(doubly_forgetting, policy)
    assert distance(found[0], alone[WritingData]) > BROKEN


def doubly_forgetting(policy):
    with doubled():
        return forgetting(Engine, "keep_writes", WritingData, policy)


def late(policy, world=1, devices=None):
    try:
        train(WritingLate, policy=policy, world=world, steps=1, **({"devices": devices} if devices else {}))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("policy", often(OURS))
def test_what_is_written_before_its_backward_is_an_error_as_in_plain_torch(policy, ranks):
    assert "modified by an inplace operation" in late("single")
    for said in playing(ranks, policy, late):
        assert "modified by an inplace operation" in said


@pytest.mark.parametrize("policy", ["single", "ddp", "zero3"])
def test_a_block_that_recompute_would_let_write_twice_is_refused(policy, ranks):
    kwargs = {"policy": f"{policy}+recompute", "steps": 1}
    found = [refused(Writing, **kwargs)] if policy == "single" else ranks(2).run(refused, Writing, world=2, **kwargs)
    for said in found:
        assert "writes its weight of shape" in said
        assert "leave recompute out" in said


# ---- ranks that write different values ----


def compared(game, policy, world=1, devices=None):
    strategy = PhaseStrategy(policy, check=False, check_replicas=True)
    try:
        trainer(strategy, devices or world, 2, sync_batchnorm=True).fit(game(), parts(2, world))
    except UserError as error:
        return str(error)


def test_the_replica_check_names_what_ranks_wrote_differently(ranks):
    for said in ranks(2).run(compared, WritingAlone, "ddp", 2):
        assert "after phase 'discriminator' of step 0, weight '0.shift' of player 'discriminator' differs" in said
    assert ranks(2).run(compared, Writing, "ddp", 2) == [None, None]


class Statistics(Plain):
    """A buffer that learns from the rank's own samples."""

    def __init__(self):
        super().__init__()
        self.discriminator.register_buffer("mean", torch.zeros(6))

    def judge(self, batch):
        self.discriminator.mean.lerp_(batch["x"].mean(0), 0.1)
        return super().judge(batch)


@pytest.mark.promise("buffers that learn from the rank's samples")
@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_the_replica_check_compares_buffers(policy, ranks):
    for said in playing(ranks, policy, compared, Statistics):
        assert "after phase 'discriminator' of step 0, buffer 'mean' of player 'discriminator' differs" in said
        assert "gan.ranks" in said


# ---- between phases ----


class Clips(Callback):
    """Weight clipping after a step, and weights loaded at the start, as in many a training script."""

    def __init__(self, way="copy_", gathered=True):
        self.way, self.gathered = way, gathered

    def whole(self, trainer):
        return trainer.strategy.gathered(write=True) if self.gathered else nullcontext()

    def on_train_start(self, trainer, game):
        with self.whole(trainer):
            torch.manual_seed(5)
            game.generator.load_state_dict(
                {k: torch.randn(v.shape, dtype=v.dtype) for k, v in Plain().double().generator.state_dict().items()}
            )

    def on_train_batch_end(self, trainer, game, *_):
        with self.whole(trainer):
            for weight in game.discriminator.parameters():
                write(self.way, weight, weight.detach().clamp(-0.2, 0.2))


def clipped(policy, world=1, devices=None, **how):
    return train(
        Plain, policy=policy, world=world, callbacks=[Clips(**how)], **({"devices": devices} if devices else {})
    )


@pytest.fixture(scope="module")
def clipped_alone():
    found = clipped("single", gathered=False)
    assert distance(found, train(Plain, policy="single")) > BROKEN
    return found


@pytest.mark.promise("weights that a callback writes", "the training of one device, or a refusal by name")
@pytest.mark.parametrize("policy", often(needing(["single", *OURS, *COPIES, *ENGINES])))
def test_what_is_written_inside_gathered_is_kept(policy, ranks, clipped_alone):
    if policy == "single":
        assert distance(clipped("single"), clipped_alone) == 0
        return
    equals(playing(ranks, policy, clipped), clipped_alone)


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("policy", often(needing(["zero2", "zero3", "fsdp", "deepspeed2", "deepspeed3"])))
def test_it_is_kept_in_whatever_way_it_is_written(policy, way, ranks, clipped_alone):
    equals(playing(ranks, policy, clipped, way=way), clipped_alone)


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("policy", often(needing(["ddp", "zero1", "zero2", "zero2+offload", "deepspeed2"])))
def test_where_weights_are_whole_it_is_kept_without_gathered_too(policy, way, ranks, clipped_alone):
    equals(playing(ranks, policy, clipped, way=way, gathered=False), clipped_alone)


def clipped_forgetting(policy, where, name):
    with mock.patch.object(where, name, lambda *_: None):
        return clipped(policy, world=2)


@pytest.mark.promise("weights that a callback writes")
def test_the_control_of_writes_inside_gathered_differs(ranks, clipped_alone):
    found = ranks(2).run(clipped_forgetting, "zero3", Bucket, "keep_writes")
    assert distance(found[0], clipped_alone) > BROKEN


class Writes(Callback):
    """Does something with the game's weights after the first step."""

    def __init__(self, what):
        self.what = what

    def on_train_batch_end(self, trainer, game, *_):
        self.what(trainer.strategy, game)


def loads_outside(strategy, game):
    game.generator.load_state_dict({k: torch.zeros(v.shape) for k, v in Plain().generator.state_dict().items()})


def assigns_outside(strategy, game):
    for weight in game.generator.parameters():
        weight.data = torch.zeros(weight.shape, dtype=torch.float64)


def writes_unasked(strategy, game):
    with strategy.gathered():
        game.discriminator[0].bias.data.zero_()
        with torch.no_grad():
            game.generator[2].weight.zero_()


def writes_averages_unasked(strategy, game):
    with strategy.gathered(), strategy.averaged(), torch.no_grad():
        game.generator[2].weight.zero_()


def averages_differ(strategy, game):
    with strategy.gathered(write=True), strategy.averaged(), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)


def differs_before_averages(strategy, game):
    with strategy.gathered(write=True), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)
        with strategy.averaged():
            pass


def replaces(strategy, game):
    with strategy.gathered(write=True):
        game.generator[0].weight = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.float64))


def differs(strategy, game):
    with strategy.gathered(write=True), torch.no_grad():
        game.generator[2].bias.fill_(strategy.global_rank)


def said(what, policy, world=1):
    try:
        trainer(PhaseStrategy(policy, check=False), world, 2, callbacks=[Writes(what)]).fit(Plain(), parts(2, world))
    except (UserError, RuntimeError) as error:
        return str(error)


@pytest.mark.promise("weights that a callback writes")
@pytest.mark.parametrize(
    ("what", "policies", "message"),
    [
        (loads_outside, ["zero3", "fsdp"], r"write them inside gathered\(write=True\)"),
        (assigns_outside, ["zero3", "fsdp"], r"write them inside gathered\(write=True\)"),
        (
            writes_unasked,
            ["ddp", "zero2", "zero3", "fsdp"],
            r"weight '2.weight' of player 'generator' was written inside gat",
        ),
        (writes_averages_unasked, ["ddp", "zero3"], "was written inside gathered"),
        (averages_differ, ["ddp", "zero1", "zero3", "fsdp"], "'2.bias' .* was written with other values on another"),
        (differs_before_averages, ["ddp", "zero3"], "'2.bias' .* was written with other values on another"),
        (
            replaces,
            ["ddp", "zero3", "fsdp"],
            r"weight '0.weight' of player 'generator' was replaced by another parameter",
        ),
        (
            differs,
            ["ddp", "zero3", "fsdp"],
            r"weight '2.bias' of player 'generator' was written with other values on another",
        ),
    ],
)
def test_a_write_that_cannot_be_kept_is_refused(what, policies, message, ranks):
    for policy in policies:
        for found in ranks(2).run(said, what, policy, 2):
            assert found is not None
            assert re.search(message, found), found


# ---- together with averaged() ----


def copied(net):
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


class Nests(Callback):
    """Reads and writes weights and averages, each inside the other, after each step."""

    def on_train_batch_end(self, trainer, game, *_):
        gathered, averaged, net = trainer.strategy.gathered, trainer.strategy.averaged, game.generator
        with gathered():
            raw = copied(net)
            with game.averaged():
                smooth = copied(net)
            assert distance(copied(net), raw) == 0 < distance(raw, smooth)
        with averaged(), gathered(), game.averaged():
            assert distance(copied(net), smooth) == 0
        for outer, inner in ((lambda: gathered(write=True), averaged), (averaged, lambda: gathered(write=True))):
            with outer(), inner(), torch.no_grad():
                for weight in net.parameters():
                    weight.mul_(0.5)
        with gathered(write=True):
            write("copy_", game.discriminator[0].bias, torch.zeros(8, dtype=torch.float64))
            with averaged():
                assert distance(copied(net), {name: 0.25 * each for name, each in smooth.items()}) < EXACT
            assert distance(copied(net), raw) == 0
            write("copy_", game.discriminator[2].bias, torch.ones(1, dtype=torch.float64))


def nested(policy, world=1, devices=None):
    return train(Plain, policy=policy, world=world, callbacks=[Nests()], **({"devices": devices} if devices else {}))


@pytest.fixture(scope="module")
def nested_alone():
    found = nested("single")
    assert distance(found, train(Plain, policy="single")) > BROKEN
    return found


@pytest.mark.parametrize("policy", often(needing([*OURS, *COPIES, *ENGINES]), these=OURS))
def test_averaged_and_gathered_may_stand_in_each_other(policy, ranks, nested_alone):
    equals(playing(ranks, policy, nested), nested_alone)


# ---- saved and resumed ----


def journeyed(policy, world, save=None, resume=None):
    """Weights are clipped after each step, and then saved."""
    game, strategy = Writing(), PhaseStrategy(policy, check=False)
    clips = Clips("data.copy_")
    clips.on_train_start = lambda *_: None
    callbacks = [clips, *([Saves(save)] if save else [])]
    trainer(strategy, world, 6, callbacks=callbacks).fit(game, loader(policy, world), ckpt_path=resume)
    return snapshot(game, strategy)


@pytest.mark.parametrize("policy", ["zero3", "zero2+offload"])
def test_what_was_written_is_saved_and_resumes(policy, ranks, tmp_path):
    path = str(tmp_path / "half.ckpt")
    unbroken = ranks(2).run(journeyed, policy, 2, save=path)
    for one, other in zip(ranks(2).run(journeyed, policy, 2, resume=path), unbroken, strict=True):
        assert distance(one, other) == 0
    equals(ranks(2).run(journeyed, "ddp", 2, resume=path), journeyed("single", 1))
