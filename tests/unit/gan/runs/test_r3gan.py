"""The run on pictures: its configurations are the published ones, and it begins with published weights."""

import pytest
import torch

from gan.files.errors import UserError
from gan.runs import build
from gan.runs.r3gan import PRESETS, preset
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.r3 import R3Discriminator, R3Generator
from tests.support import families
from tests.unit.gan.runs.test_pictures import two_classes

TINY = dict(batch_size=4, width=0.02, workers=0, held_out=0.25, max_steps=4)
NAMES = {"CIFAR10": "cifar10", "FFHQ-64": "ffhq64", "FFHQ-256": "ffhq256"} | {
    f"ImageNet-{side}": f"imagenet{side}" for side in (32, 64)
}


@pytest.mark.parametrize("name", NAMES)
def test_configurations_are_the_published_ones(name):
    wanted, found = families.load("r3gan.pt")["presets"][name], PRESETS[NAMES[name]]
    networks, schedule = wanted["G_kwargs"], lambda key: tuple(wanted[f"{key}_scheduler"].values())
    assert list(found.widths) == networks["WidthPerStage"]
    assert [2 * width // found.wide for width in found.widths] == networks["CardinalityPerStage"]
    assert found.low == len(networks["FP16Stages"])
    for values, key in (
        ((found.gamma, found.gamma / 10), "gamma"),
        ((0, found.p), "aug"),
        ((0, 1000 * found.ema), "ema"),
    ):
        assert schedule(key) == pytest.approx((*values, 1000 * found.kimg))
    assert set(networks["BlocksPerStage"]) == {2} and networks["NoiseDimension"] == 64


def test_other_sizes_are_between_the_published_ones():
    for name in ("ffhq64", "ffhq256"):
        side = int(name.removeprefix("ffhq"))
        found, wanted = preset("auto", (side, side - 1)), PRESETS[name]
        assert found.widths == wanted.widths and found.gamma == pytest.approx(wanted.gamma, rel=0.03)
        assert (found.low, found.batch, found.kimg) == (wanted.low, wanted.batch, wanted.kimg)
    with pytest.raises(UserError, match="type --config auto"):
        preset("cifar10", (64, 64))
    with pytest.raises(UserError, match="one of auto, cifar10"):
        preset("ffhq", (64, 64))


@pytest.fixture
def pictures(tmp_path):
    return two_classes(tmp_path / "data")


def test_class_folders_of_any_shape_are_trained_on(pictures):
    run = build("r3gan", data=pictures, size="16x12", augment=0.5, **TINY)
    batch, game = next(iter(run.data.train_dataloader())), run.game
    assert game.generator.classes == 2 and game.augment is not None and batch["image"].shape == (4, 3, 12, 16)
    losses = [loss for play in (game.judge, game.fool) for loss in play(batch).values()]
    assert torch.stack(losses).isfinite().all()
    assert game.show(batch)["output"].shape == (4, 3, 12, 16)


def test_a_run_begins_with_published_weights(pictures, tmp_path):
    torch.manual_seed(5)
    nets = R3Generator(7, (16, 8, 8), classes=2), R3Discriminator((16, 8, 8), classes=2)
    write(tmp_path / "nets.pkl", dict(zip("GD", map(published, nets), strict=True)))
    typed = dict(TINY, data=pictures, from_=str(tmp_path / "nets.pkl"))
    del typed["width"]
    game = build("r3gan", size="16x12", **typed).game
    for net, wanted in zip((game.generator, game.discriminator), nets, strict=True):
        assert all(torch.equal(value, wanted.state_dict()[name]) for name, value in net.state_dict().items())
    assert game.generator(torch.zeros(1, 7), torch.eye(2)[:1]).shape == (1, 3, 12, 16)
    for words, change in (
        ("--size 16", {"size": 8}),
        ("--channels 3", {"channels": 1}),
        ("classes", {"classes": False}),
    ):
        with pytest.raises(UserError, match=words):
            build("r3gan", **{"size": "16x12", **typed, **change})


def test_schedules_end_with_the_pictures_that_are_typed(pictures):
    typed = {name: value for name, value in TINY.items() if name != "max_steps"}
    run = build("r3gan", data=pictures, size=16, kimg=0.4, rate=1e-3, **typed)
    last = run.max_steps // 2
    assert last == 100 and run.game.at(run.game.rate, last) == pytest.approx(1e-3 / 4)
    assert run.game.at(run.game.gamma, last) == pytest.approx(run.game.gamma[1])
    published = build("r3gan", data=pictures, size=16, **TINY).game
    assert published.rate == (2e-4, 5e-5) and published.images == 2e7


@pytest.mark.parametrize(
    ("typed", "half_life"),
    [
        ({}, 500_000),
        ({"kimg": 20_000}, 500_000),
        ({"kimg": 40_000}, 500_000),
        ({"kimg": 8}, 200),
        ({"kimg": 8, "config_": "cifar10"}, 2000),
        ({"kimg": 8, "ema_kimg": 500}, 500_000),
    ],
)
def test_an_average_is_as_long_a_part_of_a_short_training_as_of_the_published_one(typed, half_life, pictures):
    assert build("r3gan", data=pictures, size=16, **TINY, **typed).game.ema == (0, half_life)
