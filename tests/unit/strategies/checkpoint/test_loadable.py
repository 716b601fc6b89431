"""What a checkpoint must not hold is refused when it is saved, by its key; what is no checkpoint runs no code."""

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from gan.files.checkpoint import load
from gan.files.errors import UserError
from gan.files.values import VALUES
from strategies import PhaseStrategy
from strategies.checkpoint.writing import check_loadable, save
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer
from tests.support.saved import number_of, numbered, seal_text


class Mine:
    pass


def here():
    pass


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": 1, "b": [0, {"c": Path("x")}]}, r"'b/1/c' is a pathlib\.\w+Path, which could not be loaded again"),
        ({"a": OrderedDict(b=(1, Mine()))}, r"'a/b/1' is a .*test_loadable\.Mine"),
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
    assert number_of(path) == 1  # the one before stays
    assert [each.name for each in tmp_path.iterdir()] == ["one.ckpt"]


def test_a_number_that_is_too_large_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot write checkpoint .*x.ckpt: the values cannot be written as JSON"):
        save(tmp_path / "x.ckpt", {"a": 10**5000})
    assert not list(tmp_path.iterdir())


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


REFUSED, NO_VALUES = r"never runs code; leave weights_only=False out", "values.json is damaged: it is not what was"


@pytest.mark.parametrize(
    ("loading", "message"),
    [
        (lambda path: load(path, False), REFUSED),
        (lambda path: Plain.load_from_checkpoint(path, weights_only=False), REFUSED),
        # Lightning does not hand the word on to a strategy that loads after its set-up, as ours does.
        (
            lambda path: trainer(PhaseStrategy("single"), 1, 1).fit(
                Plain(), parts(1), ckpt_path=path, weights_only=False
            ),
            f"{REFUSED}|{NO_VALUES}",
        ),
    ],
)
def test_code_is_not_run_if_somebody_asks_for_it_either(loading, message, tmp_path):
    path = tmp_path / "x.ckpt"
    save(path, {"a": 1})
    torch.save({"a": Malice(str(tmp_path / "ran"))}, path / VALUES)
    with pytest.raises(UserError, match=message):
        loading(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"garbage", b"PK\x03\x04 garbage", pickle.dumps({"a": 1}), b""])
def test_no_error_advises_to_run_code(content, tmp_path):
    path = tmp_path / "x.ckpt"
    save(path, {"a": 1})
    seal_text(path, b"{" + content)
    with pytest.raises(UserError, match=r"values.json is damaged: it holds no values") as raised:
        load(path)
    assert "weights_only" not in str(raised.value) and "\n" not in str(raised.value)


class Built(Plain):
    def __init__(self, activation, folder=None):
        super().__init__()
        self.save_hyperparameters()


class Keeps(Callback):
    def state_dict(self):
        return {"found": here}


def test_hyper_parameters_are_refused_before_training_where_checkpoints_are_asked_for(tmp_path):
    keep = ModelCheckpoint(tmp_path)
    with pytest.raises(UserError, match=r"'hyper_parameters/activation' is a torch"):
        trainer(PhaseStrategy("single"), 1, 1, callbacks=[keep], enable_checkpointing=True).fit(
            Built(nn.ReLU()), parts(1)
        )
    trainer(PhaseStrategy("single"), 1, 1).fit(Built(nn.ReLU()), parts(1))


@pytest.mark.parametrize(
    ("game", "callbacks", "message"),
    [
        (lambda: Built(nn.ReLU()), [], r"'hyper_parameters/activation' is a torch\.nn\.modules\.activation\.ReLU"),
        (lambda: Built(1, Path("x")), [], r"'hyper_parameters/folder' is a pathlib.*ignore=\['folder'\]"),
        (Plain, [Keeps()], r"'callbacks/Keeps/found' is a function"),
    ],
)
def test_a_training_is_told_when_it_saves(game, callbacks, message, tmp_path):
    made = trainer(PhaseStrategy("single"), 1, 1, callbacks=callbacks)
    made.fit(game(), parts(1))
    with pytest.raises(UserError, match=message):
        made.save_checkpoint(tmp_path / "a.ckpt")
