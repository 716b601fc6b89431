"""`biggan --data PATH`: the published configurations, classes, and published weights."""

import pytest
import torch

from gan import export
from gan.files.errors import UserError
from gan.runs.biggan import preset
from tests.support import opening
from tests.unit.gan.runs.test_pictures import two_classes
from tests.unit.gan.runs.test_runs import settings_of, small


@pytest.fixture
def pictures(tmp_path):
    return two_classes(tmp_path / "data")


def test_configurations_are_those_of_the_published_scripts():
    game = small("biggan", size=32, width=None).game
    assert (game.judge_steps, game.rates, game.ema, game.ema_start) == (4, (2e-4, 2e-4), 0.9999, 1000)
    assert (game.generator.latent, game.generator.linear.out_features) == (128, 64 * 4 * 16)
    assert game.generator.linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert preset("cifar", (32, 32)).batch_size == 50
    large = preset("imagenet128", (128, 128))
    assert (large.batch_size, large.micro_batches, large.width, large.latent, large.shared) == (2048, 8, 96, 120, 128)
    assert (large.rate, large.judge_rate, large.attention, large.eps) == (1e-4, 4e-4, 64, 1e-6)
    assert preset("auto", (20, 32)) == preset("cifar", (32, 32))
    assert [preset("auto", (side, side)).attention for side in (64, 128, 256)] == [32, 64, 64]


def test_published_files_are_written_and_read(pictures, tmp_path):
    trained = opening.train(tmp_path, "biggan", **settings_of("biggan") | {"data": pictures, "ema_start": 0})
    assert export.main([str(trained), "--to", str(tmp_path / "out"), "--published"]) == 0
    files = {name: torch.load(tmp_path / "out" / f"{name}.pth", weights_only=True) for name in ("G", "G_ema", "D")}
    for path in (tmp_path / "out", tmp_path / "out" / "G_ema.pth"):
        game = small("biggan", data=pictures, from_=str(path), seed=5).game
        assert all(torch.equal(value, files["G_ema"][key]) for key, value in game.generator.state_dict().items())
        same = [torch.equal(value, files["D"][key]) for key, value in game.discriminator.state_dict().items()]
        assert all(same) == (path.suffix != ".pth")
    assert "blocks.0.0.bn1.stored_mean" in files["G"] and "embed.sv0" in files["D"]
    words = "has networks of another size: .* type the networks' settings,(?s:.*)on data of as many classes"
    with pytest.raises(UserError, match=words):
        small("biggan", data=pictures, from_=str(tmp_path / "out"), width=4)
    torch.save({f"module.{key}": value + 1 for key, value in files["G"].items()}, tmp_path / "G_copy0.pth")
    game = small("biggan", data=pictures, from_=str(tmp_path / "G_copy0.pth")).game
    assert torch.equal(game.generator.linear.weight, files["G"]["linear.weight"] + 1)
