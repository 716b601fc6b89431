"""Every run can be built small, trained a step and scored; settings and errors."""

import functools
import inspect
import tempfile
import typing
from pathlib import Path

import pytest
import torch
from lightning import Trainer
from torch.utils.data import Subset

from datasets import Faces
from gan.errors import UserError
from gan.runs import RUNS, Run, build
from strategies import PhaseStrategy

COMMON = ("size", "batch_size", "max_steps", "seed", "workers")
SMALL = {
    "sean-faces": {"width": 2, "hidden": 2, "style": 4, "faces": 4},
    "sean-folder": {"width": 2, "hidden": 2, "style": 4, "upsamplings": 2, "workers": 0},
    "pix2pix-faces": {"width": 2, "faces": 4},
    "cyclegan-faces": {"width": 2, "blocks": 1, "faces": 4},
    "r3gan-faces": {"width": 4, "faces": 4},
}


def small(name: str, **settings) -> Run:
    where = {"data": str(folder())} if name == "sean-folder" else {}
    return build(name, size=16, batch_size=2, held_out=4, **{"max_steps": 1} | SMALL[name] | where | settings)


@functools.cache
def folder() -> Path:
    """Eight pairs of pictures as a person would have them."""
    root, faces = Path(tempfile.mkdtemp()), Faces(8, size=20)
    for part, draw in (("images", faces.draw), ("labels", faces.label)):
        (root / part).mkdir()
        for number in range(8):
            draw(number).save(root / part / f"{number}.png")
    return root


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_and_logs_its_score(name):
    run = small(name)
    trainer = Trainer(
        strategy=PhaseStrategy("ddp"), accelerator="cpu", devices=1, max_steps=run.max_steps, limit_val_batches=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        val_check_interval=1,
    )  # fmt: skip
    trainer.fit(run.game, run.data)
    assert trainer.global_step == 1
    assert trainer.callback_metrics[run.score] > 0
    assert run.headline


@pytest.mark.parametrize("name", RUNS)
def test_the_seed_decides_on_the_networks(name):
    one, same, other = (small(name, seed=seed).game.state_dict() for seed in (1, 1, 2))
    tensors = [key for key, value in one.items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(one[key], same[key]) for key in tensors)
    assert not all(torch.equal(one[key], other[key]) for key in tensors)


@pytest.mark.parametrize("name", RUNS)
def test_the_command_line_can_offer_every_setting(name):
    signature, hints = inspect.signature(RUNS[name]), typing.get_type_hints(RUNS[name])
    assert tuple(signature.parameters)[: len(COMMON)] == COMMON
    described = inspect.getdoc(RUNS[name]).split("Args:")[1]
    for parameter in signature.parameters.values():
        assert parameter.default is not inspect.Parameter.empty
        assert issubclass(hints[parameter.name], (int, float, bool, str))
        assert f"\n    {parameter.name}: " in described


@pytest.mark.parametrize("name", RUNS)
def test_held_out_faces_are_not_trained_on(name):
    run = small(name)

    def faces(dataset) -> set[int]:
        if isinstance(dataset, Subset):
            return set(dataset.indices)
        inner = getattr(dataset, "faces", getattr(dataset, "posters", dataset))
        return {inner.face(index) for index in range(len(inner))}

    assert not faces(run.data.train) & faces(run.data.val)


def test_an_unknown_run_is_answered_with_the_known_ones():
    with pytest.raises(UserError, match="unknown run 'sean'; known: sean-faces, sean-folder, pix2pix-faces"):
        build("sean")


def test_a_size_that_r3gan_cannot_reach_is_answered_with_one_that_it_can():
    with pytest.raises(UserError, match="size=48 is not 4 doubled; try size=32"):
        build("r3gan-faces", size=48)
