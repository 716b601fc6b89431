"""What a checkpoint must not hold is refused when it is saved, by its key; what an older one holds is named."""

import os
import pickle
import re
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from gan.files.checkpoint import load
from gan.files.checkpoint_files import VALUES
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.checkpoint.saving import WholeCheckpointIO
from strategies.checkpoint.writing import save, unloadable
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer
from tests.support.saved import number_of, numbered, seal


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
    assert re.search(message, str(unloadable(values)))
    path = tmp_path / "one.ckpt"
    save(path, numbered(1))
    with pytest.raises(UserError, match=f"cannot write checkpoint .*{message}"):
        save(path, values)
    assert number_of(path) == 1  # the one before stays
    assert [each.name for each in tmp_path.iterdir()] == ["one.ckpt"]


def test_plain_values_are_saved(tmp_path):
    values = {"a": [1, 2.0, "3", None, True, {4}, (5,), b"6"], 7: torch.ones(2), "d": torch.float64, "o": OrderedDict()}
    save(tmp_path / "plain.ckpt", values)
    assert load(tmp_path / "plain.ckpt")["a"] == values["a"]


def test_an_older_checkpoint_names_the_types_that_it_holds(tmp_path):
    path = tmp_path / "old.ckpt"
    save(path, {"a": 1})
    torch.save({"format": 1, "values": {"a": partial(int, 3), "b": Mine()}, "tensors": {}}, path / VALUES)
    seal(path)
    message = (
        r"holds .*functools.partial, .*test_loadable.Mine, which loading would run as code; .*type "
        r"torch.serialization.add_safe_globals\(\[.*partial, Mine\]\)"
    )
    with pytest.raises(UserError, match=message):
        load(path)


def test_a_class_that_the_program_allows_is_saved_and_loaded(tmp_path):
    with torch.serialization.safe_globals([Mine]):
        save(tmp_path / "x.ckpt", {"a": Mine()})
        assert type(load(tmp_path / "x.ckpt")["a"]) is Mine
    with pytest.raises(UserError, match=r"it holds .*test_loadable.Mine, .*add_safe_globals\(\[Mine\]\)"):
        load(tmp_path / "x.ckpt")


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


REFUSED, NOT_RUN = r"never runs code; leave weights_only=False out", "which loading would run as code"


@pytest.mark.parametrize(
    ("loading", "message"),
    [
        (lambda path: load(path, False), REFUSED),
        (lambda path: WholeCheckpointIO().load_checkpoint(path, weights_only=False), REFUSED),
        (lambda path: Plain.load_from_checkpoint(path, weights_only=False), REFUSED),
        # Lightning does not hand the word on to a strategy that loads after its set-up, as ours does.
        (
            lambda path: trainer(PhaseStrategy("single"), 1, 1).fit(
                Plain(), parts(1), ckpt_path=path, weights_only=False
            ),
            f"{REFUSED}|{NOT_RUN}",
        ),
    ],
)
def test_code_is_not_run_if_somebody_asks_for_it_either(loading, message, tmp_path):
    path = tmp_path / "x.ckpt"
    save(path, {"a": 1})
    torch.save({"format": 2, "values": {"a": Malice(str(tmp_path / "ran"))}, "tensors": {}}, path / VALUES)
    seal(path)
    with pytest.raises(UserError, match=message):
        loading(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"garbage", b"PK\x03\x04 garbage", pickle.dumps({"a": 1}), b""])
def test_no_error_advises_to_run_code(content, tmp_path):
    path = tmp_path / "x.ckpt"
    save(path, {"a": 1})
    (path / VALUES).write_bytes(content)
    seal(path)
    with pytest.raises(UserError, match=r"values.pt is damaged: it holds no values") as raised:
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
