"""PhaseStrategy as a Lightning strategy: its users' own Trainer, callbacks, checkpoints and limits."""

import csv
import gc
import os
import time
import warnings
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed import device_mesh

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.world import Groups
from tests.ranks.test_check import Codebook
from tests.scenes.writing import Writing, WritingAlone
from tests.support.hard_games import BatchNorms, Every, Plain
from tests.support.parity import distance, often, parts, single, snapshot, train, trainer, vectors, warned, words_of
from tests.support.saved import read_checkpoint


def fit(game, steps=4, strategy=None, batches=vectors, **kwargs):
    strategy = strategy or PhaseStrategy("single")
    made = trainer(strategy, 1, steps, **kwargs)
    made.fit(game, parts(steps, batches=batches))
    return made


def drawn_after_a_training(policy, world):
    """By torch's generator: as where the members of an ensemble are made and trained one after the other."""
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"):  # by which Lightning seeds ranks again
        torch.manual_seed(11)
        made = trainer(PhaseStrategy(policy, check=False), world, 2)
        made.fit(Plain(), parts(2, world))
        return torch.rand(3)


def test_a_training_leaves_torchs_generator_where_one_device_does(ranks):
    assert torch.equal(ranks(2).run(drawn_after_a_training, "ddp", 2)[0], drawn_after_a_training("single", 1))


# ---- what counts as a step ----


def test_checkpoints_and_logs_count_steps(tmp_path):
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    logger = CSVLogger(tmp_path, name="", version="log")
    callbacks = [keep, LearningRateMonitor("step")]
    fit(Plain(), 6, callbacks=callbacks, logger=logger, log_every_n_steps=3, enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    header, *rows = (tmp_path / "log" / "metrics.csv").read_text().splitlines()
    assert {"discriminator/fake", "discriminator/real", "generator/loss", "lr-generator"} <= set(header.split(","))
    steps = {row.split(",")[header.split(",").index("step")] for row in rows}
    assert steps == {"2", "5"}


class Validated(Plain):
    def validation_step(self, batch, _):
        self.shown = [weight.detach().clone() for weight in self.generator.parameters()]
        self.times = getattr(self, "times", 0) + 1


def test_validation_draws_nothing_from_training():
    class Drawing(Plain):
        def configure_phases(self):
            yield from (replace(phase, draws="torch") for phase in super().configure_phases())

        def validation_step(self, batch, batch_idx):
            torch.randn(3)

        def fake(self, real):
            return self.generator(torch.randn(len(real), 4, dtype=real.dtype))

    results = []
    for limit in (0, 1):
        torch.manual_seed(1)
        game = Drawing()
        torch.manual_seed(2)
        made = trainer(
            PhaseStrategy("single"), 1, 6, limit_val_batches=limit, val_check_interval=2, num_sanity_val_steps=0
        )
        made.fit(game, parts(6), parts(2))
        results.append(snapshot(game, made.strategy))
    assert distance(*results) == 0


def test_a_checkpoint_loads_as_plain_data_and_names_its_game(tmp_path):
    fit(Plain(), 2).save_checkpoint(tmp_path / "plain.ckpt")
    checkpoint = read_checkpoint(tmp_path / "plain.ckpt")
    assert checkpoint["game"] == "Plain"
    assert list(checkpoint["players"]) == ["generator", "discriminator"]
    assert set(checkpoint["players"]["generator"]["ema"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with pytest.raises(UserError, match=r"is of Plain with players generator, discriminator; this game is BatchNorms"):
        trainer(PhaseStrategy("single"), 1, 3).fit(BatchNorms(), parts(3), ckpt_path=str(tmp_path / "plain.ckpt"))


# ---- precision ----


def test_bf16_mixed_computes_losses_in_bf16_and_keeps_weights_in_float32():
    kinds = []

    class Typed(Plain):
        def judge(self, batch):
            kinds.append(self.discriminator(batch["x"]).dtype)
            return super().judge(batch)

    game = Typed()
    fit(game, 2, batches=single, precision="bf16-mixed")
    assert set(kinds) == {torch.bfloat16}
    assert {p.dtype for p in game.parameters()} == {torch.float32}


def test_16_mixed_keeps_a_loss_scale_per_player_and_saves_it(tmp_path):
    class Overflowing(Plain):
        def fool(self, batch):
            # A gradient that float16 cannot hold until the scale has fallen to 2**13.
            scale = self.trainer.strategy.policies["generator"].loss_scale.scale
            return super().fool(batch) * (float("inf") if scale > 2.0**13 else 1.0)

    game, strategy = Overflowing(), PhaseStrategy("single")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=200)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    with warnings.catch_warnings(record=True):
        made = fit(game, 6, strategy, single, precision=None, plugins=[plugin])
    scales = {name: policy.loss_scale.scale for name, policy in strategy.policies.items()}
    assert scales["generator"] == 2.0**13 < scales["discriminator"]
    assert strategy.policies["generator"].skipped == 2
    made.save_checkpoint(tmp_path / "scaled.ckpt")
    saved = read_checkpoint(tmp_path / "scaled.ckpt")["players"]["generator"]
    assert saved["loss_scale"] == {"scale": 2.0**13, "growth_interval": 200, "good": 4}
    assert saved["skipped"] == 2


def test_a_loss_scale_changes_no_gradient(monkeypatch):
    """In float64, scaling is exact: with and without, training is the same."""
    import strategies.training.players

    results = []
    for scaled in (False, True):
        monkeypatch.setattr(strategies.training.players, "_needs_loss_scale", lambda plugin, scaled=scaled: scaled)
        game, strategy = Plain(), PhaseStrategy("single")
        fit(game, 5, strategy)
        assert (strategy.policies["generator"].loss_scale is not None) == scaled
        results.append(snapshot(game, strategy))
    assert distance(*results) < 1e-12


# ---- replicas ----


def compared(game, policy, world):
    made = trainer(PhaseStrategy(policy, check=False, check_replicas=True), world, 2)
    return words_of(made.fit, game(), parts(2, world))


@pytest.mark.promise("buffers that learn from the rank's samples")
@pytest.mark.parametrize(
    ("game", "policy", "what"),
    [
        (WritingAlone, "ddp", "phase 'discriminator' of step 0, weight '0.shift' of player 'discriminator' differs"),
        (Writing, "ddp", None),
        (Codebook, "ddp", "phase 'play' of step 0, buffer 'seen' of player 'net' differs"),
    ],
)
def test_the_replica_check_names_what_ranks_wrote_differently(game, policy, what, ranks):
    for said in ranks(2).run(compared, game, policy, 2):
        assert said is None if what is None else f"after {what}" in said and "gan.ranks" in said


# ---- refusals ----


def test_a_gan_module_under_another_strategy_says_what_to_type():
    with pytest.raises(
        UserError, match=r"cannot train under SingleDeviceStrategy; type Trainer\(strategy=PhaseStrategy"
    ):
        Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False).fit(Plain(), parts(1))


def test_another_module_under_our_strategy_is_refused():
    with pytest.raises(UserError, match=r"trains a gan.GanModule, got BoringModel"):
        trainer(PhaseStrategy("single"), 1, 1).fit(BoringModel(), parts(1))


def test_a_strategy_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"says nothing of discriminator; add '\*=ddp'"):
        fit(Plain(), 1, PhaseStrategy({"generator": "ddp"}))
    with pytest.raises(UserError, match=r"policy 'single' of player 'generator'"):
        trainer(PhaseStrategy("generator=single,*=ddp"), 2, 1)


def writes_a_label(self, losses):
    label = torch.ones(1, dtype=torch.float64)
    real = label * losses["real"]
    return {"real": real, "fake": label.fill_(0) * losses["fake"]}


class BadLoss(Plain):
    wrong = None

    def judge(self, batch):
        return self.wrong(super().judge(batch))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda self, losses: losses["fake"].detach(), "phase 'discriminator': its loss depends on no weight"),
        (lambda self, losses: losses["fake"].detach().backward(), "in this phase only the weights of discriminator"),
        (
            lambda self, losses: losses["fake"].backward() or losses,
            "phase 'discriminator': backward goes a second time through its loss; let the loss not call backward()",
        ),
        (writes_a_label, "phase 'discriminator': what its loss was computed from is written before its backward"),
        (lambda self, losses: None, "must return a scalar or named scalars, got NoneType"),
        (lambda self, losses: {}, "must return a scalar or named scalars"),
        (lambda self, losses: {"loss": losses["fake"], "score": losses["real"]}, "so from 'score' as well as 'loss'"),
        (lambda self, losses: {"many": losses["fake"] * torch.ones(2)}, "its loss 'many' is not a scalar"),
    ],
)
def test_a_loss_of_the_wrong_kind_is_refused(wrong, message):
    game = type("Game", (BadLoss,), {"wrong": wrong})()
    with pytest.raises(UserError, match=message):
        fit(game, 1)


def test_a_player_that_no_phase_teaches_is_named_and_one_phase_may_be_returned():
    class Half(Plain):
        def configure_phases(self):
            return next(iter(super().configure_phases()))

    with pytest.warns(match="player 'generator' has an optimizer, and no phase teaches it"):
        fit(Half(), 1)


# ---- process groups ----


def others_when_a_group_is_made(number, make):
    """How many ranks have connected a group when this one goes on, where the last rank connects late."""
    store, made = dist.distributed_c10d._get_default_store(), dist.new_group

    def late(*args, **kwargs):
        group = made(*args, **kwargs)
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.3)
        store.add(f"connected {number}", 1)
        return group

    with mock.patch.multiple("torch.distributed", new_group=late), mock.patch.object(device_mesh, "new_group", late):
        make(Groups())
    return store.add(f"connected {number}", 0)


ROWS = partial(Groups.mesh, kind="cpu", shape=(2, 1), names=("copies", "shards"))


@pytest.mark.parametrize("make", [Groups.own, ROWS], ids=["own", "mesh"])
def test_no_rank_goes_on_before_all_have_a_group(make, ranks):
    """A rank that refuses a game next would close its connections, and others could not make theirs."""
    heard = ranks(2).run(others_when_a_group_is_made, time.monotonic(), make)
    assert heard[0] == heard[1] > 0


# ---- what a training leaves behind ----


def threads_left(policy, world):
    """How many threads of process groups a second training adds to those that the first one left."""
    gc.disable()
    try:
        counts = []
        for _ in range(2):
            train(Plain, policy=policy, world=world, steps=1)
            counts.append(len(os.listdir("/proc/self/task")))
    finally:
        gc.enable()
    return counts[1] - counts[0]


@pytest.mark.parametrize(
    ("policy", "world"),
    often(
        {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "zero3+hybrid:2": 4, "fsdp": 2, "fsdp+hybrid:2": 4}.items(),
        ["zero3", "fsdp"],
    ),
)
def test_the_process_groups_of_a_training_end_with_it(policy, world, ranks):
    """Each has threads, which wait for ranks that have left, and take turns at it without end."""
    assert ranks(world).run(threads_left, policy, world) == [0] * world


class Remembers(Plain):
    def __init__(self):
        super().__init__()
        self.true = []

    def on_train_batch_end(self, *_):
        self.true.append(self.trainer.strategy.steps.logged.losses["generator/loss"].item())


def test_what_a_callback_monitors_is_of_its_own_step(tmp_path):
    """Others are logged in the steps of loggers only, because that takes milliseconds."""
    best = ModelCheckpoint(tmp_path, monitor="generator/loss", every_n_train_steps=1, save_top_k=1)
    game = Remembers()
    fit(game, 4, callbacks=[best], enable_checkpointing=True)
    assert best.best_model_score.item() == pytest.approx(min(game.true))


class Stops(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 3


class Leaves(Remembers):
    """Leaves the rest of each epoch out, in Lightning's way."""

    def on_train_batch_start(self, batch, index):
        return -1 if index == 1 else None


STOPS = {"steps": 8, "callbacks": [Stops()]}


@pytest.mark.parametrize(
    ("game", "how"), [(Remembers, {}), (Remembers, {"limit_train_batches": 3}), (Remembers, STOPS), (Leaves, {})]
)
def test_the_last_losses_are_logged_where_training_ends(game, how, tmp_path):
    logger = CSVLogger(tmp_path, name="", version="log")
    made = trainer(PhaseStrategy("single"), 1, **{"steps": 3, "logger": logger, "log_every_n_steps": 9, **how})
    made.fit(game := game(), parts(8))
    assert made.callback_metrics["generator/loss"].item() == pytest.approx(game.true[2])
    if "callbacks" not in how:
        with open(tmp_path / "log" / "metrics.csv") as file:
            (row,) = csv.DictReader(file)
        assert row["step"] == "2" and float(row["generator/loss"]) == pytest.approx(game.true[2])


def test_the_end_of_a_training_without_loggers_warns_of_none():
    made = trainer(PhaseStrategy("single"), 1, 3)
    warnings.filterwarnings("error", message="You called `self.log")
    made.fit(Plain(), parts(8))


class LogsMore(Plain):
    def on_train_epoch_end(self):
        self.log("a number of its own", torch.tensor(1.0))


def advised():
    made = trainer(PhaseStrategy("ddp"), 2, 8, callbacks=[Stops()])
    with warned("sync_dist") as said:
        made.fit(LogsMore(), parts(8, 2))
    return said


def test_what_is_a_mean_over_ranks_is_not_advised_to_be_one(ranks):
    (said,), nothing = ranks(2).run(advised)  # the first rank alone warns
    assert "a number of its own" in said and not nothing


@pytest.mark.parametrize(("often", "wanted"), [(1, "100100"), (2, "110")])
def test_a_row_has_a_loss_if_its_phase_was_played_since_the_row_before(often, wanted, tmp_path):
    """A lazy phase may be played only in steps of which loggers get nothing: its last loss is in their next row."""
    fit(Every(), 6, logger=CSVLogger(tmp_path, name="", version="log"), log_every_n_steps=often)
    with open(tmp_path / "log" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert all(row["discriminator/real"] for row in rows)
    for name in ("generator/loss", "generator/generator_grad_norm"):
        assert "".join("01"[bool(row[name])] for row in rows) == wanted


# ---- ends of trainings ----


class Fails(Plain):
    fails = True

    def fool(self, batch):
        if self.fails and self.step == 3:
            raise ValueError("by chance")
        return super().fool(batch)


def test_a_callback_that_saves_at_an_error_does_not_hide_the_error(tmp_path):
    """And leaves the last checkpoint, and a game that can be trained again."""
    game = Fails()
    saving = ModelCheckpoint(tmp_path, "{step}", save_last=True, save_on_exception=True, every_n_train_steps=2)
    saving.CHECKPOINT_NAME_LAST = "last-{step}"
    settings = {"callbacks": [saving], "enable_checkpointing": True}
    with pytest.raises(ValueError, match="by chance"), pytest.warns(UserWarning, match="is not saved, because the tr"):
        trainer(PhaseStrategy("single"), 1, 4, **settings).fit(game, parts(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last-step=2.ckpt", "step=2.ckpt"]
    game.fails = False
    trainer(PhaseStrategy("single"), 1, 2).fit(game, parts(2))


def again(policy, path):
    first, done = trainer(PhaseStrategy(policy), 2, 2), Plain()
    first.fit(done, parts(2, 2))
    first.save_checkpoint(path)
    game = Plain()
    trainer(PhaseStrategy(policy), 2, 2).fit(game, parts(2, 2), ckpt_path=path)
    return [tensor.detach().clone() for each in (done, game) for tensor in each.parameters()]


@pytest.mark.parametrize("policy", often(["zero3", "generator=pipeline,*=ddp"]))
def test_a_run_that_is_resumed_at_its_end_gives_its_weights_back(policy, ranks, tmp_path):
    for found in ranks(2).run(again, policy, str(tmp_path / "done.ckpt")):
        half = len(found) // 2
        assert all(map(torch.equal, found[:half], found[half:]))


def test_a_validation_after_the_training_shows_the_averages_until_weights_are_written():
    game, made = Validated(), trainer(PhaseStrategy("single"), 1, 3)
    made.fit(game, parts(3, 1), parts(1, 1))
    inside = game.shown
    made.validate(game, parts(1, 1), verbose=False)
    assert all(map(torch.equal, inside, game.shown))
    assert not all(map(torch.equal, inside, game.generator.parameters()))
    game.load_state_dict(Validated().state_dict())
    with pytest.warns(UserWarning, match="player 'generator' is shown with its weights as they are now"):
        made.validate(game, parts(1, 1), verbose=False)
    assert all(map(torch.equal, game.shown, game.generator.parameters()))
