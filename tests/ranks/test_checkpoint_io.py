"""Checkpoints as Lightning's users make them: their own callbacks, hooks and loggers, with directories."""

import os
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from gan import Player
from gan.files.checkpoint import load
from gan.files.errors import UserError
from strategies import PhaseStrategy
from tests.scenes.optimizers import optimized
from tests.support.hard_games import Plain
from tests.support.parity import BROKEN, Whole, distance, equals, often, snapshot, trainer, vectors
from tests.support.saved import names, read_checkpoint, write_checkpoint


def fit(game, steps, strategy="single", world=1, resume=None, **kwargs):
    rank = dist.get_rank() if world > 1 else 0
    made = trainer(PhaseStrategy(strategy, check=False), world, steps, **kwargs)
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="3"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(game, Whole(steps, rank, world), ckpt_path=resume)
    return made


# ---- ModelCheckpoint ----


class Scored(Plain):
    SCORES = (5.0, 1.0, 4.0, 2.0, 3.0)

    def training_step(self, batch):
        self.log("score", torch.tensor(self.SCORES[self.step]))
        super().training_step(batch)


@pytest.mark.parametrize("last", [None, True, "link"])
def test_the_best_are_kept_and_the_last_whole_or_as_a_link(last, tmp_path):
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, monitor="score", save_top_k=2, save_last=last)
    made = fit(Scored(), 5, callbacks=[keep], enable_checkpointing=True)
    assert names(tmp_path) == ["last.ckpt"] * bool(last) + ["step=2.ckpt", "step=4.ckpt"]
    assert keep.best_model_path == str(tmp_path / "step=2.ckpt")
    assert read_checkpoint(keep.best_model_path)["global_step"] == 2
    if last is None:
        return
    assert (tmp_path / "last.ckpt").is_symlink() == (last == "link")  # to what was saved last, one of the best
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == (4 if last == "link" else 5)
    again = ModelCheckpoint(tmp_path, "{step}", save_last=last)
    resumed = fit(Scored(), 5, resume="last", callbacks=[again], enable_checkpointing=True)
    assert distance(*(snapshot(each.lightning_module, each.strategy) for each in (resumed, made))) == 0


class Apart(Plain):
    """Each rank has a score of its own, and so another best checkpoint."""

    def training_step(self, batch):
        self.log("score", 1.0 - 2 * dist.get_rank())
        super().training_step(batch)

    def validation_step(self, batch, _):
        pass


def best_of_each(folder):
    keep = ModelCheckpoint(folder, "{step}-{score:.0f}", every_n_train_steps=1, monitor="score")
    made = fit(Apart(), 2, "zero3", 2, callbacks=[keep], enable_checkpointing=True)
    best = Path(keep.best_model_path).name
    made.validate(made.lightning_module, Whole(1), ckpt_path="best", verbose=False)
    return best


def test_where_each_rank_has_another_best_one_the_first_ranks_is_loaded(ranks, tmp_path):
    found = ranks(2).run(best_of_each, str(tmp_path))
    assert found == ["step=1-score=1.ckpt", "step=1-score=-1.ckpt"]


# ---- what an author adds and changes ----


class Author(Plain):
    """Keeps something of his own, renames a network's keys, and shares one layer under two names."""

    def __init__(self, old_name=None):
        super().__init__()
        self.same = self.generator
        self.register_buffer("noted", torch.zeros(3))
        self.old_name, self.found = old_name, None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"tensor": torch.arange(4), "words": ["a", "b"]}

    def on_load_checkpoint(self, checkpoint):
        self.found = checkpoint["mine"]
        if self.old_name is not None:
            state = checkpoint["state_dict"]
            for key in [key for key in state if key.startswith(self.old_name)]:
                state[f"generator.{key.removeprefix(self.old_name)}"] = state.pop(key)


def test_what_an_author_adds_travels_and_what_is_renamed_is_found(tmp_path):
    made = fit(Author(), 2)
    made.save_checkpoint(tmp_path / "x.ckpt")
    tree = read_checkpoint(tmp_path / "x.ckpt")
    assert "generator.0.weight" in tree["state_dict"] and "same.0.weight" not in tree["state_dict"]  # once
    tree["state_dict"] = {key.replace("generator.", "painter."): value for key, value in tree["state_dict"].items()}
    write_checkpoint(tmp_path / "renamed.ckpt", tree)
    results = []
    for path, game in (("x.ckpt", Author()), ("renamed.ckpt", Author("painter."))):
        resumed = fit(game, 4, resume=str(tmp_path / path))
        assert torch.equal(game.found["tensor"], torch.arange(4)) and game.found["words"] == ["a", "b"]
        results.append(snapshot(game, resumed.strategy))
    assert distance(*results) == 0
    with pytest.raises(UserError, match=r"missing: generator.0.weight.*unexpected: painter.0.weight"):
        fit(Author(), 4, resume=str(tmp_path / "renamed.ckpt"))


class Halves(Plain):
    """Looks at saved weights, and goes on from a part of one."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        size = float(state["generator.0.weight"].norm() / state["generator.2.weight"].norm())
        state["generator.0.weight"] = torch.mul(state["generator.0.weight"], self.factor * size)
        state["generator.0.bias"] = state["generator.0.bias"].clone()


class Rated(Plain):
    """Its players learn by this rate, which falls for one of them."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def configure_players(self):
        yield Player("generator", self.generator, partial(Adam, lr=self.rate), partial(StepLR, step_size=3))
        yield Player("discriminator", self.discriminator, partial(Adam, lr=self.rate))


def resumed(path, game, policy, world):
    return snapshot(made := game(), fit(made, 4, policy, world, path).strategy)


@pytest.mark.parametrize("policy", often(["zero3", "fsdp"]))
@pytest.mark.parametrize(
    ("before", "after"),
    [(partial(Halves, 1.0), partial(Halves, 0.5)), (partial(Rated, 1e-2), partial(Rated, 1e-4))],
    ids=["tensors", "rates"],
)
def test_what_an_author_changes_in_between_counts_under_another_policy_too(before, after, policy, ranks, tmp_path):
    """How rates count: tests/unit/strategies/checkpoint/test_made.py."""
    path = str(tmp_path / "x.ckpt")
    fit(before(), 2).save_checkpoint(path)
    alone = resumed(path, after, "single", 1)
    equals(ranks(2).run(resumed, path, after, policy, 2), alone)
    assert distance(resumed(path, before, "single", 1), alone) > BROKEN


class Checked(Plain):
    def validation_step(self, batch, batch_idx):
        self.seen = {name: weight.detach().clone() for name, weight in self.discriminator.state_dict().items()}


def test_weights_alone_are_saved_and_validated(tmp_path):
    made, game = fit(Checked(), 2), Checked()
    made.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert "optimizer_states" not in load(tmp_path / "x.ckpt")
    data = DataLoader([vectors(0)], batch_size=None)
    engine = trainer(PhaseStrategy("zero3"), 1, 1)
    engine.validate(game, data, ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert distance(game.seen, made.lightning_module.discriminator.state_dict()) == 0


class Sized(Plain):
    """A game with hyper-parameters, as Lightning keeps them."""

    def __init__(self, width, depth=1):
        super().__init__()
        self.save_hyperparameters()
        self.generator = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 6)).double()
        self.discriminator.double()


def test_a_game_is_loaded_from_a_checkpoint_as_lightnings_users_do(tmp_path):
    made = fit(Sized(3), 2)
    made.save_checkpoint(tmp_path / "x.ckpt")
    found = Sized.load_from_checkpoint(tmp_path / "x.ckpt")
    assert (found.hparams.width, found.hparams.depth) == (3, 1)
    assert distance(found.state_dict(), made.lightning_module.state_dict()) == 0
    with pytest.raises(UserError, match=r"(?s)x.ckpt has other networks than Sized makes: .*size mismatch"):
        Sized.load_from_checkpoint(tmp_path / "x.ckpt", width=4)
    with pytest.raises(UserError, match="leave hparams_file out"):
        Sized.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file="x.yaml")


class AnySize(Sized):
    def __init__(self, **sizes):
        super().__init__(**sizes)


class Configured(Sized):
    def __init__(self, config):
        super().__init__(config["width"])
        self.save_hyperparameters(config)


@pytest.mark.parametrize("make", [Sized, AnySize, lambda **sizes: Configured(sizes)])
def test_hyper_parameters_that_its_constructor_does_not_take_are_left_out(make, tmp_path):
    game = make(width=3)
    game.hparams.update({"_instantiator": "lightning.pytorch.cli.instantiate_module"})  # as LightningCLI does
    fit(game, 1).save_checkpoint(tmp_path / "x.ckpt")
    assert type(game).load_from_checkpoint(tmp_path / "x.ckpt").generator[0].out_features == 3


def test_an_optimizer_with_other_groups_is_refused(tmp_path):
    apart = optimized(Plain, lambda weights: Adam([{"params": [weight]} for weight in weights]))
    fit(apart(), 2).save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(UserError, match="'generator': the checkpoint's optimizer has its weights in other groups"):
        fit(optimized(Plain, Adam)(), 4, resume=str(tmp_path / "x.ckpt"))


# ---- refusals ----


def test_another_way_to_write_checkpoints_is_refused(tmp_path):
    with pytest.raises(UserError, match="AsyncCheckpointIO cannot write what ranks hold in shares"):
        trainer(PhaseStrategy("single"), 1, 1, plugins=[AsyncCheckpointIO()])
    with pytest.raises(UserError, match="leave AsyncCheckpointIO out"):
        PhaseStrategy("single", checkpoint_io=AsyncCheckpointIO())


def test_storage_options_are_refused_rather_than_ignored(tmp_path):
    with pytest.raises(UserError, match="leave storage_options out"):
        fit(Plain(), 2).save_checkpoint(tmp_path / "x.ckpt", storage_options={"key": 1})
