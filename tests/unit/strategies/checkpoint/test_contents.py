"""A training goes on only from a checkpoint that has all that it needs, of the right kinds."""

import pytest
import torch
from torch import nn

from gan.files.errors import UserError
from strategies import PhaseStrategy
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer
from tests.support.saved import read_checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "x.ckpt"
    made = trainer(PhaseStrategy("single"), 1, 1)
    made.fit(Plain(), parts(1))
    made.save_checkpoint(path)
    return path


def resumed(path):
    trainer(PhaseStrategy("single"), 1, 2).fit(Plain(), parts(2), ckpt_path=path)


def without(*key):
    def change(tree):
        for name in key[:-1]:
            tree = tree[name]
        del tree[key[-1]]

    return change


def changed(*key, to):
    def change(tree):
        for name in key[:-1]:
            tree = tree[name]
        tree[key[-1]] = to

    return change


FIT, OPTIMIZER = ("loops", "fit_loop"), ("optimizer_states", 0)
COUNT = "epoch_loop.manual_optimization.optim_step_progress"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("loops"), "it has no 'loops'"),
        (without(*FIT), "it has no 'loops/fit_loop'"),
        (without(*FIT, COUNT), f"it has no 'loops/fit_loop/{COUNT}'"),
        (without(*FIT, COUNT, "total", "ready"), f"it has no 'loops/fit_loop/{COUNT}/total/ready'"),
        (changed(*FIT, COUNT, "total", "ready", to="1"), f"'loops/fit_loop/{COUNT}/total/ready' is not a number"),
        (changed(*FIT, "epoch_loop.val_loop.batch_progress", to=3), "val_loop.batch_progress' is not a dict"),
        (
            changed(*FIT, "state_dict", to={"combined_loader": [3]}),
            "combined_loader/0' is not of kind dict or NoneType",
        ),
        (without("random_states"), "it has no 'random_states'"),
        (changed("random_states", to=[3]), "'random_states/0' is not of kind dict"),
        (changed("random_states", 0, "torch", to=torch.zeros(3)), "of rank 0's random states is none"),
        (without("random_states", 0, "python"), "of rank 0's random states is none"),
        (without("seed"), "it has no 'seed'"),
        (without("global_step"), "it has no 'global_step'"),
        (without("callbacks"), "it has no 'callbacks'"),
        (without("lr_schedulers"), "it has no 'lr_schedulers'"),
        (changed("lr_schedulers", 0, to=3), "'lr_schedulers/0' is not a dict"),
        (changed("lr_schedulers", 0, "last_epoch", to="x"), "'lr_schedulers/0/last_epoch' is not a number"),
        (changed("optimizer_states", to=[]), "the checkpoint has 0 optimizers, and this run 2"),
        (changed(*OPTIMIZER, to=3), "'optimizer_states/0' is not of kind dict"),
        (without(*OPTIMIZER, "state"), "it has no 'optimizer_states/0/state'"),
        (changed(*OPTIMIZER, "state", "0.bias", to=3), "'optimizer_states/0/state/0.bias' is not of kind dict"),
        (changed(*OPTIMIZER, "state", "0.bias", "exp_avg", to=torch.zeros(3)), r"has shape \(3,\), and \(8,\) is need"),
        (without(*OPTIMIZER, "param_groups"), "it has no 'optimizer_states/0/param_groups'"),
        (changed(*OPTIMIZER, "param_groups", to=[3]), "'optimizer_states/0/param_groups/0' is not of kind dict"),
        (without(*OPTIMIZER, "param_groups", 0, "params"), "it has no 'optimizer_states/0/param_groups/0/params'"),
        (without("players", "generator", "ema"), "it has no 'players/generator/ema'"),
        (without("players", "generator", "ema", "0.bias"), "the checkpoint has no average of '0.bias'"),
        (changed("players", "generator", "ema", "0.bias", to=3), "'players/generator/ema/0.bias' is not of kind"),
        (changed("players", "generator", "ema", "0.bias", to=torch.zeros(2)), r"has shape \(2,\), and \(8,\) is need"),
        (changed("players", "generator", to=3), "'players/generator' is not of kind dict"),
        (changed("players", to={}), "the checkpoint is of Plain with players unknown"),
        (changed("state_dict", "generator.0.bias", to=3), "expected torch.Tensor|is no tensor there"),
        (without("state_dict", "generator.0.bias"), "missing: generator.0.bias"),
        (without("optimizer_states"), "it has weights only, with which no training goes on"),
    ],
)
def test_what_is_missing_or_of_another_kind_is_named(change, message, saved, tmp_path):
    tree = read_checkpoint(saved)
    change(tree)
    path = tmp_path / "changed.ckpt"
    if "optimizer_states" in tree:
        write_checkpoint(path, tree)
    else:
        made = trainer(PhaseStrategy("single"), 1, 1)
        made.fit(Plain(), parts(1))
        made.save_checkpoint(path, weights_only=True)
    with pytest.raises(UserError, match=message) as raised:
        resumed(path)
    if "state_dict" not in message and "torch.Tensor" not in message:
        assert "\n" not in str(raised.value)


def test_what_was_not_changed_goes_on(saved, tmp_path):
    write_checkpoint(tmp_path / "same.ckpt", read_checkpoint(saved))
    resumed(tmp_path / "same.ckpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("state_dict", "generator.0.bias"), "missing: generator.0.bias"),
        (changed("hyper_parameters", to=3), "'hyper_parameters' is not of kind dict"),
        (changed("left_out", to={"generator.0.bias": 3}), "'left_out/generator.0.bias' is not of kind tuple"),
        (changed("files", to={"generator": 3}), "'files/generator' is not of kind dict"),
    ],
)
def test_so_it_is_where_a_game_is_loaded(change, message, saved, tmp_path):
    tree = read_checkpoint(saved)
    change(tree)
    write_checkpoint(tmp_path / "changed.ckpt", tree)
    with pytest.raises(UserError, match=message):
        Plain.load_from_checkpoint(tmp_path / "changed.ckpt")
    assert isinstance(Plain.load_from_checkpoint(saved).generator, nn.Module)
