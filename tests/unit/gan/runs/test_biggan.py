"""`biggan --data PATH`: the published configurations, classes, and published weights."""

import pytest
import torch
from PIL import Image

from gan import export
from gan.files.errors import UserError
from gan.runs import build
from gan.runs.biggan import preset
from tests.support import opening

TINY = dict(width=2, batch_size=2, held_out=0.25, workers=0, max_steps=1, size=32)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for name, colour in (("reds", (255, 0, 0)), ("blues", (0, 0, 255))):
        (folder / name).mkdir()
        for number in range(8):
            Image.new("RGB", (32, 32), colour).save(folder / name / f"{number}.png")
    return str(folder)


def test_configurations_are_those_of_the_published_scripts(pictures):
    cifar = build("biggan", data=pictures, **TINY | {"width": None, "batch_size": None})
    game = cifar.game
    assert (cifar.data.batch_size, game.judge_steps, game.rates, game.ema, game.ema_start) == (
        *(50, 4, (2e-4, 2e-4)),
        *(0.9999, 1000),
    )
    assert (game.generator.latent, game.generator.linear.out_features) == (128, 64 * 4 * 16)
    assert game.generator.linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    large = preset("imagenet128", (128, 128))
    assert (large.batch_size, large.micro_batches, large.width, large.latent, large.shared) == (2048, 8, 96, 120, 128)
    assert (large.rate, large.judge_rate, large.attention, large.eps) == (1e-4, 4e-4, 64, 1e-6)
    assert preset("auto", (20, 32)) == preset("cifar", (32, 32))
    assert [preset("auto", (side, side)).attention for side in (64, 128, 256)] == [32, 64, 64]


@pytest.mark.parametrize("classes", [None, False])
def test_sub_folders_are_classes_and_without_them_there_is_one(pictures, classes):
    game = build("biggan", data=pictures, classes=classes, **TINY).game
    assert game.generator.classes == (2 if classes is None else 0)
    batch = {"image": torch.zeros(64, 3, 32, 32), "class": torch.zeros(64, dtype=torch.long)}
    fakes, labels = game.drawn(batch)
    assert fakes.shape == (64, 3, 32, 32)
    if classes is None:
        assert labels.sum(0).min() > 10, "fakes have classes of their own, each about as often"
    else:
        assert labels is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(config_="cifar", size=64), r"config 'cifar' is for 32 pixels, and pictures have \(64, 64\); type --conf"),
        (dict(config_="stylegan"), "--config stylegan is not known; type one of auto, cifar, imagenet128"),
        (dict(from_="nowhere"), "nowhere cannot be read as published weights"),
    ],
)
def test_what_does_not_fit_is_refused(pictures, change, message):
    with pytest.raises(UserError, match=message):
        build("biggan", data=pictures, **TINY | change)


def test_published_files_are_written_and_read(pictures, tmp_path):
    trained = opening.train(tmp_path, "biggan", data=pictures, **TINY | {"ema_start": 0})
    assert export.main([str(trained), "--to", str(tmp_path / "out"), "--published"]) == 0
    files = {name: torch.load(tmp_path / "out" / f"{name}.pth", weights_only=True) for name in ("G", "G_ema", "D")}
    for path in (tmp_path / "out", tmp_path / "out" / "G_ema.pth"):
        game = build("biggan", data=pictures, from_=str(path), seed=5, **TINY).game
        assert all(torch.equal(value, files["G_ema"][key]) for key, value in game.generator.state_dict().items())
        same = [torch.equal(value, files["D"][key]) for key, value in game.discriminator.state_dict().items()]
        assert all(same) == (path.suffix != ".pth")
    assert "blocks.0.0.bn1.stored_mean" in files["G"] and "embed.sv0" in files["D"]
    with pytest.raises(
        UserError, match=r"has networks of another size: .* type the networks' settings as they were"
    ) as error:
        build("biggan", data=pictures, from_=str(tmp_path / "out"), **TINY | {"width": 4})
    assert "on data of as many classes" in str(error.value)
    state = {f"module.{key}": value + 1 for key, value in files["G"].items()}
    torch.save(state, tmp_path / "G_copy0.pth")
    game = build("biggan", data=pictures, from_=str(tmp_path / "G_copy0.pth"), **TINY).game
    assert torch.equal(game.generator.linear.weight, files["G"]["linear.weight"] + 1)
