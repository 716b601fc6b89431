"""The run on pictures: its configurations are the published ones."""

import pytest

from gan.runs.r3gan import PRESETS
from tests.support import families
from tests.unit.gan.runs.test_runs import small

NAMES = {"CIFAR10": "cifar10", "FFHQ-64": "ffhq64", "FFHQ-256": "ffhq256", "ImageNet-32": "imagenet32"}
NAMES |= {"ImageNet-64": "imagenet64"}


@pytest.mark.parametrize("name", NAMES)
def test_configurations_are_the_published_ones(name):
    wanted, found = families.load("r3gan.pt")["presets"][name], PRESETS[NAMES[name]]
    networks, schedule = wanted["G_kwargs"], lambda key: tuple(wanted[f"{key}_scheduler"].values())
    assert list(found.widths) == networks["WidthPerStage"]
    assert [2 * width // found.wide for width in found.widths] == networks["CardinalityPerStage"]
    assert found.low == len(networks["FP16Stages"])
    ends = {"gamma": (found.gamma, found.gamma / 10), "aug": (0, found.p), "ema": (0, 1000 * found.ema)}
    for key, values in ends.items():
        assert schedule(key) == pytest.approx((*values, 1000 * found.kimg))
    assert set(networks["BlocksPerStage"]) == {2} and networks["NoiseDimension"] == 64


def test_schedules_end_with_the_pictures_that_are_typed():
    run = small("r3gan", max_steps=None, kimg=0.2, rate=1e-3)
    last = run.max_steps // 2
    assert last == 100 and run.game.at(run.game.rate, last) == pytest.approx(1e-3 / 4)
    assert run.game.at(run.game.gamma, last) == pytest.approx(run.game.gamma[1])
    published = small("r3gan").game
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
def test_an_average_is_as_long_a_part_of_a_short_training_as_of_the_published_one(typed, half_life):
    assert small("r3gan", **typed).game.ema == (0, half_life)
