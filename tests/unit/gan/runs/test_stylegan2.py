"""StyleGAN2 on pictures of a person's own, in the published configurations."""

import pytest
import torch

from gan.app.run.options import arguments
from gan.files.errors import UserError
from gan.runs import build
from gan.runs.stylegan2 import PRESETS, preset
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.stylegan import StyleDiscriminator, StyleGenerator
from tests.support import families
from tests.unit.gan.runs.test_pictures import two_classes

CONFIGS = ["auto, 1 device", *PRESETS]
TINY = dict(width=0.005, mapping=1, batch_size=4, max_steps=1, workers=0, held_out=0.25)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_sets_what_the_published_one_sets(config):
    wanted = families.load("stylegan2.pt")["presets"][config]
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


@pytest.fixture
def classes(tmp_path):
    return two_classes(tmp_path)


def test_class_folders_of_any_shape_are_trained_on(classes):
    run = build("stylegan2", data=classes, size="16x12", **TINY)
    batch = next(iter(run.data.train_dataloader()))
    game = run.game
    assert game.generator.classes == 2
    assert batch["image"].shape == (4, 3, 12, 16)
    losses = [loss for play in (game.fool, game.even, game.judge, game.flatten) for loss in play(batch).values()]
    assert torch.stack(losses).isfinite().all()
    assert game.show(batch)["output"].shape == (4, 3, 12, 16)


def test_what_is_typed_comes_before_the_configuration(classes):
    rules = dict(TINY, gamma=3.0, ema_kimg=2.0, augment="off", freeze_d=2)
    game = build("stylegan2", data=classes, size=16, config_="cifar", **rules).game
    assert (game.gamma, game.mixing, game.path, game.ada, game.rate) == (3, 0, 0, None, 0.0025)
    assert game.ema(10**9) == 0.5 ** (4 / 2000)
    assert game.frozen == ["b16.fromrgb", "b16.conv0"]
    with pytest.raises(UserError, match="has 5 layers that can be frozen; type --freeze-d 5"):
        build("stylegan2", data=classes, size=16, config_="cifar", **rules | {"freeze_d": 9})


@pytest.mark.parametrize(
    ("typed", "half_life"),
    [({}, 20), ({"kimg": 8}, 400), ({"kimg": 8, "ema_kimg": 20}, 20_000), ({"max_steps": None}, 20_000)],
)
def test_the_average_of_a_short_training_is_at_most_a_twentieth_of_that(typed, half_life, classes):
    rules = {**TINY, "max_steps": None if typed else 100, **typed}
    game = build("stylegan2", data=classes, size=16, config_="paper256", **rules).game
    assert game.ema(10**9) == pytest.approx(0.5 ** (4 / half_life), rel=1e-12)


def test_a_published_file_is_trained_on(classes, tmp_path):
    torch.manual_seed(0)
    wide = dict(base=64, most=4)
    nets = {"G": StyleGenerator(16, latent=4, style=4, mapping=2, **wide), "D": StyleDiscriminator(16, group=2, **wide)}
    path = tmp_path.parent / f"{tmp_path.name}.pkl"
    write(path, {name: published(net) for name, net in nets.items()})
    rules = {name: value for name, value in TINY.items() if name not in ("width", "mapping")}
    rules |= dict(data=classes, from_=str(path), size="16x12", classes=False)
    game = build("stylegan2", **rules).game
    for net, begun in zip((game.generator, game.discriminator), nets.values(), strict=True):
        assert net.training
        assert all(torch.equal(value, begun.state_dict()[name]) for name, value in net.state_dict().items())
    batch = {"image": torch.zeros(4, 3, 12, 16)}
    assert game.fool(batch)["adversarial"].isfinite()
    assert game.ada.images == 100_000
    for wrong, words in (
        ({"width": 1.0}, "networks of its own; leave --width and --mapping out"),
        ({"size": 32}, "draws 16 x 16, and pictures have .*; type --size 16"),
        ({"channels": 1}, "draws 3 channels, and pictures have 1; type --channels 3"),
        ({"classes": True}, "knows 0 classes, and pictures have 2; type --classes false"),
    ):
        with pytest.raises(UserError, match=words):
            build("stylegan2", **rules | wrong)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"config_": "paper64"}, "--config paper64 is not known; type one of auto, stylegan2, .*, cifar"),
        ({"augment": "gbc"}, "augment 'gbc' is not known; type --augment blit, geom, .* or off"),
    ],
)
def test_what_is_unknown_is_answered_with_what_is_known(typed, words, classes):
    with pytest.raises(UserError, match=words):
        build("stylegan2", data=classes, size=16, **TINY, **typed)


def test_words_that_are_also_others_can_be_typed():
    typed = "--config paper256 --config=auto --config settings.yaml --from a.pkl --from=b.pkl --config f16-16384"
    named = "--config_ paper256 --config_=auto --config settings.yaml --from_ a.pkl --from_=b.pkl --config_ f16-16384"
    more, same = "--config=imagenet128-ch64 --config --debug", "--config_=imagenet128-ch64 --config --debug"
    assert arguments(f"{typed} {more}".split()) == f"{named} {same}".split()
