"""Player(weights=PATH): each rank reads what it keeps, and a frozen player's weights stay in their file."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

from gan.files.errors import UserError
from gan.files.tensors import Piece
from gan.pretrained import WeightFiles
from strategies import PhaseStrategy
from tests.support import duel, opening
from tests.support.hard_games import Plain
from tests.support.meta_games import OnMeta, weights_of, write_file, write_index
from tests.support.parity import BROKEN, EXACT, Whole, distance, equals, often, on, trainer, words_of
from tests.support.saved import read_checkpoint

HALF, STEPS = 2, 4
NETWORKS = ("generator", "judge", "teacher")


class Filed(OnMeta):
    """Players begin from these files."""

    def __init__(self, device: str = "meta", **files: str) -> None:
        self.device_of_networks = device
        super().__init__()
        self.files = files

    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, weights=self.files.get(player.name))


class Loaded(OnMeta):
    """What one device does by hand: its constructor makes the networks, and loads the same values."""

    device_of_networks = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.double()
        for name in NETWORKS:
            getattr(self, name).load_state_dict(weights_of(getattr(self, name)), strict=name != "judge")


fit = partial(duel.fit, steps=STEPS, sync_batchnorm=True)


told = partial(words_of, fit)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    """A file for the generator, a folder with an index for the judge, an index for the teacher."""
    game, folder = OnMeta(), tmp_path_factory.mktemp("weights")
    generator, judge, teacher = (weights_of(getattr(game, name)) for name in NETWORKS)
    return {
        "generator": str(write_file(folder / "generator.safetensors", generator)),
        "judge": str(write_index(folder / "judge", judge, 3)),
        "teacher": str(write_index(folder / "teacher", teacher) / "model.safetensors.index.json"),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return fit(Loaded, "single", 1)


FIVE = ("zero3", "fsdp", "ddp", "zero1", "zero2")
WORLDS = [("single", 1, "cpu"), ("zero3", 2, "cpu"), *((policy, world, "meta") for policy in FIVE for world in (2, 4))]


@pytest.mark.parametrize(
    ("policy", "world", "device"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each != ("zero3", 2, "meta"))) for each in WORLDS],
)
def test_every_policy_trains_from_the_files_as_one_device_does(policy, world, device, ranks, paths, alone):
    """Also where the constructor makes the networks."""
    game, check = partial(Filed, device=device, **paths), (policy, device) == ("zero3", "cpu")
    equals(on(ranks, world)(fit, game, policy, world, check=check), alone)


class Normed(Plain):
    """Its generator has torch's older norms, as published vocoders have: they make weights of other weights."""

    def __init__(self, device: str, file: str | None = None) -> None:
        super().__init__()
        self.file = file
        with torch.device(device), warnings.catch_warnings(action="ignore"):
            first, last = weight_norm(nn.Linear(4, 8).double()), spectral_norm(nn.Linear(8, 6).double())
        self.generator = nn.Sequential(first, nn.Tanh(), last)

    def configure_players(self):
        generator, judge = super().configure_players()
        return replace(generator, weights=self.file), judge


@pytest.mark.parametrize(
    ("policy", "world"), often([("single", 1), ("zero3", 2), ("generator=pipeline,*=ddp", 2)], ["zero3"])
)
def test_weights_that_older_norms_make_of_others_need_none(policy, world, ranks, tmp_path):
    file = str(write_file(tmp_path / "normed.safetensors", weights_of(Normed("cpu").generator)))
    wanted = fit(partial(Normed, "cpu", file), "single", 1)
    game, run, half = partial(Normed, "meta", file), on(ranks, world), str(tmp_path / "half.ckpt")
    equals(run(fit, game, policy, world, save=half, at=HALF), wanted)
    equals(run(fit, game, policy, world, resume=half), wanted)


def bytes_read(policy: str, world: int, paths: dict[str, str]) -> int:
    """The bytes of weights that this rank reads, without those of digests."""
    found, contents = [], Piece._contents

    def counted(*args: Any) -> Iterator[memoryview]:
        for content in contents(*args):
            found.append(len(content))
            yield content

    with mock.patch.object(Piece, "_contents", counted):
        fit(partial(Filed, generator=paths["generator"], teacher=paths["teacher"]), policy, world, steps=1)
    return sum(found)


@pytest.mark.parametrize("policy", often(["zero3", "fsdp"]))
def test_each_rank_reads_only_what_it_keeps(policy, ranks, paths):
    game = OnMeta()
    all_of_it = sum(
        8 * weight.numel() for name in ("generator", "teacher") for weight in getattr(game, name).parameters()
    )
    found = ranks(2).run(bytes_read, policy, 2, paths)
    assert sum(found) == all_of_it
    assert max(found) < 0.6 * all_of_it
    assert ranks(2).run(bytes_read, "ddp", 2, paths) == [all_of_it, all_of_it]


# ---- checkpoints ----


@pytest.mark.parametrize(("policy", "world"), often([("single", 1), ("zero3", 2), ("fsdp", 2)], ["zero3"]))
def test_a_frozen_players_weights_are_left_out_and_it_resumes(policy, world, ranks, paths, alone, tmp_path):
    half, game = str(tmp_path / "half.ckpt"), partial(Filed, **paths)
    run = on(ranks, world)
    run(fit, game, policy, world, steps=HALF, save=half)
    saved = read_checkpoint(half)
    names = [name for name, _ in game().named_parameters() if name.startswith("teacher.")]
    assert not saved["state_dict"].keys() & set(names)
    assert "generator.0.weight" in saved["state_dict"]
    noted = saved["files"]
    assert noted.keys() == {"teacher"}
    assert noted["teacher"]["path"] == paths["teacher"] and noted["teacher"]["names"] == names
    equals(run(fit, game, policy, world, resume=half), alone)
    assert distance(fit(game, "single", 1, resume=half), alone) < EXACT


@pytest.fixture
def half(paths, tmp_path) -> tuple[str, dict[str, str]]:
    """A checkpoint, and the files of its players, which may be changed."""
    game, own = OnMeta(), dict(paths)
    own["teacher"] = str(write_file(tmp_path / "teacher.safetensors", weights_of(game.teacher)))
    own["generator"] = str(write_file(tmp_path / "generator.safetensors", weights_of(game.generator)))
    path = str(tmp_path / "half.ckpt")
    fit(partial(Filed, **own), "single", 1, steps=HALF, save=path)
    return path, own


def test_a_changed_file_is_refused_at_resume(half, ranks, alone):
    path, own = half
    write_file(own["teacher"], weights_of(OnMeta().teacher, seed=6))
    game = partial(Filed, **own)
    for words in (told(game, "single", 1, resume=path), *ranks(2).run(told, game, "zero3", 2, resume=path)):
        assert f"{own['teacher']} has other content now (sha256 " in words
        assert "checkpoints leave the weights of player 'teacher' out" in words
    lax = type("Filed", (Filed,), {"strict_loading": False})
    assert distance(fit(partial(lax, **own), "single", 1, resume=path), alone) > BROKEN
    with pytest.raises(UserError, match="has other content now"):
        Filed.load_from_checkpoint(path, **own)


def test_a_file_may_move_and_a_learners_file_may_go(half, alone, tmp_path):
    path, own = half
    moved = tmp_path / "moved"
    moved.mkdir()
    own["teacher"] = str(write_file(moved / "other.safetensors", weights_of(OnMeta().teacher)))
    own["generator"] = str(moved / "gone.safetensors")
    assert distance(fit(partial(Filed, **own), "single", 1, resume=path), alone) < EXACT


def learned(policy: str, world: int, paths: dict[str, str], path: str) -> tuple[float, float]:
    """How far the weights move while a trained game is tested, and while a loaded one begins to train."""
    rank = dist.get_rank() if world > 1 else 0
    game = Filed(device="cpu", **paths)
    game.test_step = lambda batch, *_: None
    made = trainer(PhaseStrategy(policy, check=False), world, HALF, sync_batchnorm=True)
    made.fit(game, Whole(HALF, rank, world))
    before = {name: value.clone() for name, value in game.state_dict().items()}
    made.test(game, Whole(1, rank, world), verbose=False)
    moved = distance(before, game.state_dict())

    class Begins(Callback):
        def on_train_start(self, *_: Any) -> None:
            with strategy.gathered():
                self.weights = {name: value.clone() for name, value in loaded.state_dict().items()}

    loaded, begins = Filed.load_from_checkpoint(path, device="cpu", **paths), Begins()
    strategy = PhaseStrategy(policy, check=False)
    before = {name: value.clone() for name, value in loaded.state_dict().items() if not name.startswith("slow.")}
    trainer(strategy, world, 1, callbacks=[begins], sync_batchnorm=True).fit(loaded, Whole(1, rank, world))
    return moved, distance(before, {name: begins.weights[name] for name in before})  # a follower begins as a copy


@pytest.mark.parametrize(("policy", "world"), often([("single", 1), ("zero3", 2)], ["zero3"]))
def test_what_a_learner_has_learned_is_not_read_again(policy, world, half, ranks):
    path, own = half
    for moved, begun in on(ranks, world)(learned, policy, world, own, path):
        assert moved == 0
        assert begun < 1e-6  # the loaded ones were in float32


def test_a_game_that_does_not_name_the_file_any_more_is_refused(half):
    path, own = half
    teacher = own.pop("teacher")
    words = told(partial(Filed, **own), "single", 1, resume=path)
    assert words.endswith(f"type Player('teacher', ..., weights='{teacher}')")


def test_a_checkpoint_that_has_the_weights_is_refused(paths, tmp_path):
    path, others = str(tmp_path / "half.ckpt"), {name: paths[name] for name in ("generator", "judge")}
    fit(partial(Filed, **others), "single", 1, steps=HALF, save=path)
    words = told(partial(Filed, **paths), "single", 1, resume=path)
    assert words == "the checkpoint was saved without weights= for 'teacher'; resume as it was trained"


def test_a_game_is_loaded_with_the_weights_of_its_file(half):
    path, own = half
    game, saved = Filed.load_from_checkpoint(path, **own), read_checkpoint(path)
    for name, value in weights_of(OnMeta().teacher).items():
        assert torch.equal(game.teacher.state_dict()[name], value.float())
    assert torch.equal(game.generator[0].weight, saved["state_dict"]["generator.0.weight"].float())
    teacher = next(each for each in opening.exported(game, Path(path), "raw") if each.player == "teacher")
    assert torch.equal(teacher.state["0.weight"], game.teacher[0].weight)


# ---- what is refused on all ranks together ----


def lacks_it(path: str) -> str | None:
    """One rank does not have the file, as on another host."""
    here = path if dist.get_rank() == 0 else path + ".not_here.safetensors"
    return told(partial(Filed, teacher=here), "zero3", 2)


def has_another(path: str) -> str | None:
    digest = lambda self: f"{dist.get_rank()}"  # noqa: E731
    first = mock.patch.object(PhaseStrategy, "local_rank", 0)
    with mock.patch.object(WeightFiles, "digest", digest), first:
        return told(partial(Filed, teacher=path), "zero3", 2)


def test_what_one_host_lacks_is_an_error_on_all(ranks, paths):
    words = ranks(2).run(lacks_it, paths["teacher"])
    assert all(
        "player 'teacher': cannot read weights from" in each and "there is no such file" in each for each in words
    )
    words = ranks(2).run(has_another, paths["teacher"])
    assert all("is not the same file on all hosts" in each for each in words)


def test_two_files_for_one_tensor_are_refused(paths, tmp_path):
    class Twice(Filed):
        def configure_players(self):
            *others, teacher = super().configure_players()
            yield from (*others, teacher, replace(teacher, name="critic", weights=str(other)))

    other = write_file(tmp_path / "other.safetensors", weights_of(OnMeta().teacher))
    words = told(partial(Twice, teacher=paths["teacher"]), "single", 1)
    assert "player 'critic' reads '0.weight' from" in words and "leave weights out for one of them" in words
