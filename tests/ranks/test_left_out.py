"""Player(saved=False): weights that checkpoints leave out, because the game's constructor makes them."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gan.app.run.reopen import open_run
from gan.files.checkpoint import load
from gan.files.errors import UserError
from gan.games.dmd2 import Dmd2
from tests.support import opening
from tests.support.duel import fit
from tests.support.parity import BROKEN, EXACT, distance, on, words_of
from tests.support.saved import read_checkpoint
from tests.support.sharing_games import Adapters, SharedBase

HALF = 5


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return fit(SharedBase, "single", 1)


class Unsaved(Adapters):
    """The base is left out of checkpoints. The adapters, which are in the teacher's network too, are not."""

    def configure_players(self):
        student, fake, teacher = super().configure_players()
        yield from (student, fake, replace(teacher, saved=False))


class UnsavedShared(SharedBase):
    """The same where the first player that has the base is another one."""

    def configure_players(self):
        student, fake, teacher = super().configure_players()
        yield from (student, fake, replace(teacher, saved=False))


class Other(UnsavedShared):
    """The constructor makes another base."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.teacher[2].bias[0] += 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "whole", "policy", "world"),
    [
        (Unsaved, Adapters, "zero3", 2),
        (UnsavedShared, SharedBase, "zero3", 2),
        (UnsavedShared, SharedBase, "single", 1),
    ],
)
def test_what_is_left_out_is_not_in_the_files_and_resumes_bit_for_bit(game, whole, policy, world, ranks, tmp_path):
    half, run = tmp_path / "half.ckpt", on(ranks, world)
    run(fit, game, policy, world, HALF, str(half))
    saved = read_checkpoint(half)
    names = {name for name, weight in game().named_parameters() if "down" not in name and "up" not in name}
    assert saved["left_out"].keys() == names and not names & saved["state_dict"].keys()
    tensors = {key: value for path in half.glob("*.safetensors") for key, value in load_file(path).items()}
    stored = sum(value.numel() for key, value in read_checkpoint(half)["state_dict"].items())
    assert any(key.startswith("state_dict/") for key in tensors)
    assert stored == sum(weight.numel() for name, weight in game().named_parameters() if name not in names)
    assert not any(name in key for key in tensors for name in names)
    resumed = run(fit, game, policy, world, resume=str(half))
    assert distance(resumed[0], run(fit, whole, policy, world)[0]) == 0
    assert distance(fit(game, "single", 1, resume=str(half)), fit(whole, "single", 1)) < EXACT


def other():
    """It has the same name as the game whose checkpoint it gets."""
    return named("UnsavedShared", Other)()


def lax():
    game = other()
    game.strict_loading = False
    return game


def test_other_weights_than_those_left_out_are_refused(ranks, alone, tmp_path):
    half = str(tmp_path / "half.ckpt")
    fit(UnsavedShared, "single", 1, steps=HALF, save=half)
    told = words_of(fit, other, "single", 1, resume=half), *ranks(2).run(words_of, fit, other, "zero3", 2, resume=half)
    assert all("checkpoints leave 'teacher.2.bias' out" in each for each in told)
    assert BROKEN < distance(fit(lax, "single", 1, steps=HALF + 1, resume=half), alone) < math.inf


def test_a_checkpoint_that_has_them_is_refused(tmp_path):
    half = str(tmp_path / "half.ckpt")
    fit(named("SharedBase", SharedBase), "single", 1, steps=HALF, save=half)
    told = words_of(fit, named("SharedBase", UnsavedShared), "single", 1, resume=half)
    assert re.fullmatch(r"the checkpoint was saved without saved=False for '\S+'; .*", told)


class LeavesOut(SharedBase):
    """As games of Lightning do with a frozen network, here in a plain dict."""

    strict_loading = False

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "teacher" not in name}


class LeavesTooMuchOut(LeavesOut):
    strict_loading = True

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "fake" not in name}


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_the_authors_may_be_a_plain_dict(strict, tmp_path):
    half, game = str(tmp_path / "half.ckpt"), type("Game", (LeavesOut,), {"strict_loading": strict})
    fit(game, "single", 1, steps=HALF, save=half)
    assert not any("teacher" in name for name in read_checkpoint(half)["state_dict"])
    assert distance(fit(game, "single", 1, resume=half), fit(game, "single", 1)) == 0
    assert game.load_from_checkpoint(half) and opening.exported(game(), Path(half), "raw")


def test_but_not_what_learns(tmp_path):
    half = str(tmp_path / "half.ckpt")
    fit(LeavesTooMuchOut, "single", 1, steps=HALF, save=half)
    assert "missing: fake." in words_of(fit, LeavesTooMuchOut, "single", 1, resume=half)


def named(name, game):
    return type(name, (game,), {})


def test_a_game_is_loaded_with_the_weights_that_its_constructor_makes(tmp_path):
    path = str(tmp_path / "some.ckpt")
    fit(UnsavedShared, "single", 1, steps=4, save=path)
    loaded, fresh = UnsavedShared.load_from_checkpoint(path), UnsavedShared().double()
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight.double(), fresh.get_parameter(name)) == ("teacher" in name or "layer" in name)
    with pytest.raises(UserError, match=r"checkpoints leave 'teacher\.2\.bias' out, for its player has saved=False"):
        Other.load_from_checkpoint(path)
    assert Other.load_from_checkpoint(path, strict=False)


def test_it_is_exported_as_the_constructor_makes_it(tmp_path):
    path = str(tmp_path / "some.ckpt")
    fit(Unsaved, "single", 1, steps=2, save=path)
    base = Unsaved().double().base
    student, _, teacher = opening.exported(Unsaved(), Path(path), "raw")
    assert torch.equal(teacher.state["scale"], base.scale)
    assert not torch.equal(teacher.state["first.up_student"], base.first.up_student)
    assert torch.equal(student.state["1"], teacher.state["first.up_student"])


def test_commands_open_a_run_whose_teacher_is_not_saved(tmp_path, monkeypatch):
    configured = Dmd2.configure_players
    monkeypatch.setattr(
        Dmd2, "configure_players", lambda self: (replace(p, saved=not p.frozen) for p in configured(self))
    )
    folder = opening.train(tmp_path, "dmd2-faces", size=16, width=4, faces=8, held_out=4)
    opened = open_run(str(folder))
    assert "teacher.pictures" in load(opened.checkpoint)["left_out"]
    assert opened.run.game.teacher.pictures.abs().sum() > 0
    with pytest.raises(UserError, match=r"checkpoints leave 'teacher.pictures' out"):
        open_run(str(folder), seed=1)
