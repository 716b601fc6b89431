"""biggan, r3gan and stylegan2 on a person's own pictures: the published configurations, and what is typed."""

import pytest
import torch

from gan import export
from gan.app.run.command_line import arguments, renamed
from gan.files.errors import UserError
from gan.runs import biggan, build
from gan.runs.r3gan import PRESETS as R3GANS
from gan.runs.run import Unchosen, made_to
from gan.runs.stylegan2 import PRESETS, preset
from tests.support import families, opening
from tests.unit.gan.runs.test_pictures import two_classes
from tests.unit.gan.runs.test_runs import settings_of, small


@pytest.fixture
def pictures(tmp_path):
    return two_classes(tmp_path / "data")


def test_configurations_of_biggan_are_those_of_the_published_scripts():
    game = small("biggan", size=32, width=None).game
    assert (game.judge_steps, game.rates, game.ema, game.ema_start) == (4, (2e-4, 2e-4), 0.9999, 1000)
    assert (game.generator.latent, game.generator.linear.out_features) == (128, 64 * 4 * 16)
    assert game.generator.linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert biggan.preset("cifar", (32, 32)).batch_size == 50
    large = biggan.preset("imagenet128", (128, 128))
    assert (large.batch_size, large.micro_batches, large.width, large.latent, large.shared) == (2048, 8, 96, 120, 128)
    assert (large.rate, large.judge_rate, large.attention, large.eps) == (1e-4, 4e-4, 64, 1e-6)
    assert biggan.preset("auto", (20, 32)) == biggan.preset("cifar", (32, 32))
    assert [biggan.preset("auto", (side, side)).attention for side in (64, 128, 256)] == [32, 64, 64]


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


NAMES = {"CIFAR10": "cifar10", "FFHQ-64": "ffhq64", "FFHQ-256": "ffhq256", "ImageNet-32": "imagenet32"}
NAMES |= {"ImageNet-64": "imagenet64"}


@pytest.mark.parametrize("name", NAMES)
def test_configurations_of_r3gan_are_the_published_ones(name):
    wanted, found = families.load("r3gan.pt")["presets"][name], R3GANS[NAMES[name]]
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


@pytest.mark.parametrize("config", ["auto, 1 device", "auto, 8 devices", *PRESETS])
def test_a_configuration_sets_what_the_published_one_sets(config):
    wanted = families.load("stylegan2.pt")["presets"][config]
    with made_to("train", ranks=8 if "8" in config else 1):
        found = preset(config.partition(",")[0], 256)
    assert vars(found) == dict(
        batch=wanted["batch_size"],
        rate=pytest.approx(wanted["G_opt_kwargs"]["lr"]),
        gamma=pytest.approx(wanted["loss_kwargs"]["r1_gamma"]),
        ema=wanted["ema_kimg"],
        group=wanted["D_kwargs"]["epilogue_kwargs"]["mbstd_group_size"],
        width=wanted["G_kwargs"]["synthesis_kwargs"]["channel_base"] / 32768,
        mapping=wanted["G_kwargs"]["mapping_kwargs"]["num_layers"],
        kimg=wanted["total_kimg"],
        ramp_up=wanted["ema_rampup"],
        path=wanted["loss_kwargs"].get("pl_weight", 2),
        mixing=wanted["loss_kwargs"].get("style_mixing_prob", 0.9),
        skip=wanted["D_kwargs"].get("architecture", "resnet") == "resnet",
    )


def test_what_is_typed_comes_before_the_configuration():
    game = small("stylegan2", config_="cifar", gamma=3.0, ema_kimg=2.0, augment="off", freeze_d=2).game
    assert (game.gamma, game.mixing, game.path, game.ada, game.rate) == (3, 0, 0, None, 0.0025)
    assert game.ema(10**9) == 0.5 ** (2 / 2000)
    assert game.frozen == ["b16.fromrgb", "b16.conv0"]


@pytest.mark.parametrize(
    ("typed", "half_life"),
    [({}, 20), ({"kimg": 8}, 400), ({"kimg": 8, "ema_kimg": 20}, 20_000), ({"max_steps": None}, 20_000)],
)
def test_the_average_of_a_short_training_is_at_most_a_twentieth_of_that_and_says_so(typed, half_life, capsys):
    game = small("stylegan2", config_="paper256", batch_size=4, **{"max_steps": None if typed else 100, **typed}).game
    assert game.ema(10**9) == pytest.approx(0.5 ** (4 / half_life), rel=1e-12)
    said = f"averaged weights: half-life {half_life / 1000:g} kimg, a twentieth of the training"
    assert (said in capsys.readouterr().err) == (half_life < 20_000)


@pytest.mark.parametrize("name", ["stylegan2", "r3gan", "biggan"])
def test_networks_of_larger_squares_than_the_pictures_are_said(name, capsys):
    for size, networks in (("32x32", None), ("20x18", "32x32"), ("36x32", "64x64"), ("60x60", "64x64")):
        chosen, less = small(name, size=size, batch_size=2).chosen, 32 if networks == "64x64" else 16
        said = f"the networks compute {networks} for pictures of {size}; with --size {less} they compute a quarter"
        there = networks is not None and (less == 32 or name != "biggan")  # whose smallest are 32x32
        assert chosen.get("networks") == (networks if there else None)
        assert (said in capsys.readouterr().err) == (there and size != "60x60")


@pytest.mark.parametrize(("name", "typed"), [("stylegan2", "kimg"), ("biggan", "kimg"), ("pix2pix", "falling_epochs")])
def test_of_two_lengths_it_is_said_which_counts(name, typed, capsys):
    small(name, max_steps=5)
    assert "counts" not in capsys.readouterr().err
    assert small(name, max_steps=5, **{typed: 2}).max_steps == 5
    assert f"--max-steps 5 counts, and --{typed.replace('_', '-')} 2 does not\n" in capsys.readouterr().err


@pytest.mark.parametrize(("ranks", "batch"), [(1, 50), (2, 50), (8, 56), (3, 51)])
def test_a_batch_that_nobody_typed_becomes_one_that_the_ranks_can_share(ranks, batch, capsys):
    with made_to("train", ranks=ranks):
        assert biggan.preset("auto", (32, 32)).batch_size == batch
        said = capsys.readouterr().err
        assert biggan.preset("auto", (32, 32), batch_size=50).batch_size == 50
    assert said == (
        "" if batch == 50 else f"batch {batch}: {ranks} ranks cannot share the default 50; --batch-size for another\n"
    )


def test_a_batch_of_any_run_that_nobody_typed_is_shared_and_a_typed_one_stays():
    with made_to("train", ranks=3):
        for typed, batch in ((Unchosen(16), 18), (16, 16)):
            assert build("wgan-gp-faces", batch_size=typed, faces=20, held_out=2).batch_size == batch


def test_ranks_of_stylegan2_have_an_even_number_of_samples():
    for ranks, batch in ((1, 16), (5, 70), (6, 72), (8, 64)):
        with made_to("plan", ranks=ranks):
            assert preset("auto", 256).batch == batch


def test_words_that_are_also_others_can_be_typed():
    typed = "--config paper256 --config=auto --config settings.yaml --from a.pkl --from=b.pkl --config f16-16384"
    named = "--config_ paper256 --config_=auto --config settings.yaml --from_ a.pkl --from_=b.pkl --config_ f16-16384"
    more, same = "--config=imagenet128-ch64 --config --debug", "--config_=imagenet128-ch64 --config --debug"
    assert renamed(arguments(f"{typed} {more}".split())) == f"{named} {same}".split()
