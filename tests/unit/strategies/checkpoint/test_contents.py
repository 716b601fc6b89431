"""What a checkpoint must have, and how it is loaded."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from gan.files.checkpoint import load
from gan.files.errors import UserError
from gan.files.values import VALUES
from strategies import PhaseStrategy
from strategies.checkpoint.writing import check_loadable, save
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer
from tests.support.saved import Malice, names, number_of, numbered, read_checkpoint, write_checkpoint


def fit(game, steps=1, path=None, callbacks=(), checkpoints=False, **words):
    made = trainer(PhaseStrategy("single"), 1, steps, callbacks=[*callbacks], enable_checkpointing=checkpoints)
    made.fit(game, parts(steps), ckpt_path=path, **words)
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "x.ckpt"
    made = fit(Plain())
    made.save_checkpoint(path)
    made.save_checkpoint(path.with_name("weights.ckpt"), weights_only=True)
    return path


def resumed(path):
    fit(Plain(), 2, path)


GONE = object()


def changed(*key, to=GONE):
    def change(tree):
        for name in key[:-1]:
            tree = tree[name]
        tree[key[-1]] = to
        if to is GONE:
            del tree[key[-1]]

    return change


AVERAGE, MOMENTS = ("players", "generator", "ema", "0.bias"), ("optimizer_states", 0, "state", "0.bias", "exp_avg")
WEIGHT, OF_8 = ("state_dict", "generator.0.bias"), r", and \(8,\) is need"


@pytest.mark.parametrize(
    ("change", "message", "goes_on"),
    [
        (changed("optimizer_states", to=[]), "the checkpoint has 0 optimizers, and this run 2", resumed),
        (changed(*MOMENTS, to=torch.zeros(3)), rf"has shape \(3,\){OF_8}", resumed),
        (changed(*AVERAGE), "the checkpoint has no average of '0.bias'", resumed),
        (changed(*AVERAGE, to=torch.zeros(2)), rf"has shape \(2,\){OF_8}", resumed),
        (changed("players", to={}), "the checkpoint is of Plain with players unknown", resumed),
        (changed(*WEIGHT, to=3), "expected torch.Tensor|is no tensor there", resumed),
        (changed(*WEIGHT), "missing: generator.0.bias", resumed),
        (changed(*WEIGHT), "missing: generator.0.bias", Plain.load_from_checkpoint),
    ],
)
def test_what_does_not_fit_is_named(change, message, goes_on, saved, tmp_path):
    tree = read_checkpoint(saved)
    change(tree)
    write_checkpoint(tmp_path / "changed.ckpt", tree)
    with pytest.raises(UserError, match=message) as raised:
        goes_on(tmp_path / "changed.ckpt")
    if goes_on is resumed and "torch.Tensor" not in message:
        assert "\n" not in str(raised.value)


def test_no_training_goes_on_from_weights_only(saved):
    with pytest.raises(UserError, match=r"weights.ckpt has weights only, with which no training goes on"):
        resumed(saved.with_name("weights.ckpt"))


# ---- loadable ----


class Mine:
    pass


def here():
    pass


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"b": [0, {"c": Path("x")}]}, r"'b/1/c' is a pathlib\.(_local\.)?\w+Path, which could not be loaded again"),
        ({"a": OrderedDict(b=(1, Mine()))}, r"'a/b/1' is a .*test_contents\.Mine"),
        ({"a": {"f": lambda: 1}}, r"'a/f' is a function"),
        ({"hyper_parameters": {"norm": nn.ReLU}}, r"'hyper_parameters/norm' is a type.*ignore=\['norm'\]"),
        ({"callbacks": {"Mine": {"x": here}}}, r"'callbacks/Mine/x' is a function.*the callback's state_dict\(\)"),
        ({"state_dict": {"n._extra_state": Mine()}}, r"'state_dict/n._extra_state' is .*get_extra_state\(\)"),
    ],
)
def test_it_names_the_key_and_the_type(values, message, tmp_path):
    with pytest.raises(UserError, match=message):
        check_loadable(values)
    path = tmp_path / "one.ckpt"
    save(path, numbered(1))
    with pytest.raises(UserError, match=f"cannot write checkpoint .*{message}"):
        save(path, values)
    assert number_of(path) == 1 and names(tmp_path) == ["one.ckpt"]  # the one before stays
    with pytest.raises(UserError, match=r"cannot write checkpoint .*x.ckpt: the values cannot be written as JSON"):
        save(tmp_path / "x.ckpt", {"a": 10**5000})


REFUSED, NO_VALUES = r"never runs code; leave weights_only=False out", "values.json is damaged: it is not what was"


@pytest.mark.promise("code in a checkpoint, or in a file of styles")
@pytest.mark.parametrize(
    ("loading", "message"),
    [
        (lambda path: load(path, False), REFUSED),
        (lambda path: Plain.load_from_checkpoint(path, weights_only=False), REFUSED),
        # Lightning does not hand the word on to a strategy that loads after its set-up, as ours does.
        (lambda path: fit(Plain(), path=path, weights_only=False), f"{REFUSED}|{NO_VALUES}"),
    ],
)
def test_code_is_not_run_if_somebody_asks_for_it_either(loading, message, tmp_path):
    path = tmp_path / "x.ckpt"
    save(path, {"a": 1})
    torch.save({"a": Malice(tmp_path / "ran")}, path / VALUES)
    with pytest.raises(UserError, match=message):
        loading(path)
    assert not (tmp_path / "ran").exists()


class Built(Plain):
    def __init__(self, activation, folder=None):
        super().__init__()
        self.save_hyperparameters()


def test_hyper_parameters_are_refused_before_training_where_checkpoints_are_asked_for(tmp_path):
    with pytest.raises(UserError, match=r"'hyper_parameters/activation' is a torch"):
        fit(Built(nn.ReLU()), callbacks=[ModelCheckpoint(tmp_path)], checkpoints=True)
    fit(Built(nn.ReLU()))
