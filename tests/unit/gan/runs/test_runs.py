"""Every run can be built small, trained a step and scored; settings and errors."""

import functools
import inspect
import json
import sys
import tempfile
import typing
from pathlib import Path
from unittest import mock

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning import Trainer

from datasets import Tones
from datasets.files.pictures import facts_of
from gan import fit, runs
from gan.app.run import options, reopen, settings_file
from gan.files.errors import UserError
from gan.games.spade import Spade
from gan.runs import OLD_NAMES, RUNS, Run, build, faces, pairs
from gan.runs.run import made_to, perceptual_loss
from gan.sound import Sound
from nets.sean import SeanGenerator, StyleEncoder
from strategies import PhaseStrategy
from tests.support import layouts, narrow_vgg, opening
from tests.support.parity import often
from tests.unit.gan.runs.test_pictures import put

COMMON = {"size", "batch_size", "max_steps", "seed", "workers"}
FACES = {"faces": 4, "held_out": 4}
PAIRS = {"hidden": 2, "width": 2, "upsamplings": 2, "workers": 0, "held_out": 1}
HALF, OFF = {"held_out": 0.5, "workers": 0}, {"perceptual": "off"}
SMALL = {
    **{f"{name}-faces": {"width": 4, **FACES} for name in ("r3gan", "wgan-gp", "stylegan", "dmd2", "vqgan")},
    "sean-faces": {"width": 2, "hidden": 2, "style": 4, **FACES},
    "spade-faces": {"width": 2, "hidden": 2, **FACES},
    "pix2pix-faces": {"width": 2, **FACES},
    "cyclegan-faces": {"width": 2, "blocks": 1, **FACES},
    "cut-faces": {"width": 2, **FACES},
    "pix2pix": {"width": 2, "judge_width": 2, "layers": 2, **HALF},
    "cyclegan": {"width": 2, "blocks": 1, "layers": 2, **HALF},
    "cut": {"width": 2, "blocks": 5, "layers": 2, **HALF},
    "biggan-faces": {"width": 2, "latent": 8, **FACES},
    "biggan": {"width": 2, **HALF},
    "stylegan2": {"width": 0.01, "mapping": 1, **HALF},
    "r3gan": {"width": 0.02, **HALF},
    "vqgan": {"width": 32, "blocks": 1, "judge_width": 4, "codes": 8, "config_": "f4", "size": 24, **OFF, **HALF},
    "dmd2-lora-faces": {"width": 4, "base_steps": 1, **FACES},
    "byol-faces": {"width": 4, "hidden": 4, "projection": 4, **FACES},
    **{name: {"style": 4, **PAIRS} for name in ("sean", *OLD_NAMES)},
    "sean-coco": {"style": 4, "edges": True, **PAIRS},
    "spade": PAIRS,
    "spade-folder": {"labels": 4, **PAIRS},
    "hifigan": {"width": 0.02, "segment": 1024, "seconds": 0.1, **HALF},
    "hifigan-tones": {"width": 8, "bands": 8, "segment": 1024, "seconds": 0.2, "clips": 4, "held_out": 4},
}
LABELS = {"celebamask": 19, "ade20k": 151, "cityscapes": 35, "coco": 183, "facades": 13, "folder": 4}
ON_FILES = list(OLD_NAMES)
BEGUN = ("stylegan2", "hifigan", "sean", "r3gan", "biggan", "vqgan", "pix2pix", "cyclegan", "cut")
FROM_NOISE = ("r3gan-faces", "wgan-gp-faces", "stylegan-faces", "dmd2-faces", "dmd2-lora-faces", "biggan-faces")
# Other fast tests train these, and other runs have their games.
ELSEWHERE = {
    *("sean-faces", "spade-faces", "pix2pix-faces", "r3gan-faces", "wgan-gp-faces", "stylegan-faces", "dmd2-faces"),
    *("hifigan-tones", "hifigan", "biggan", "stylegan2"),
}


def small(name: str, **settings) -> Run:
    return build(name, **settings_of(name) | settings)


def test_a_discriminator_that_would_join_after_the_end_is_said(capsys):
    for start, said in ((1, 1), (0, 0)):
        run = small("vqgan", start=start)
        assert "codes 8, width 32, blocks 1, judge-width 4" in run.words
        assert capsys.readouterr().err.count("would join in step 1, after the end of this run; type a smaller") == said


def settings_of(name: str) -> dict[str, typing.Any]:
    found = {"batch_size": 2, "max_steps": 1, **({} if name.startswith("hifigan") else {"size": 16}), **SMALL[name]}
    if name in (*ON_FILES, "sean", "spade"):
        return found | {"data": str(written(name.partition("-")[2] or "folder")), "perceptual": vgg()}
    if name not in BEGUN:
        return found
    two = name in ("pix2pix", "cyclegan", "cut")
    return found | {"data": str(sounds() if name == "hifigan" else kinds() if two else kinds() / "A")}


@functools.cache
def written(layout: str) -> Path:
    root = Path(tempfile.mkdtemp())
    getattr(layouts, layout)(root)
    return root


@functools.cache
def kinds() -> Path:
    """Pictures of two kinds; those of B are brighter."""
    root = Path(tempfile.mkdtemp())
    for number in range(16):
        for kind, least in (("A", 0), ("B", 100)):
            put(root / kind / f"{number}.png", (16, 16), colour=(least + 8 * number,) * 3)
    return root


@functools.cache
def sounds() -> Path:
    root = Path(tempfile.mkdtemp())
    for number in range(8):
        wave = Tones(1, 3000, 8000, first=number)[0]["wave"]
        (root / f"{number}.wav").write_bytes(Sound(wave, 22050).wav())
    return root


@functools.cache
def vgg() -> str:
    return narrow_vgg.save(Path(tempfile.mkdtemp()) / "vgg.pth")


@functools.cache
def offered(name: str) -> tuple[dict[str, typing.Any], str]:
    """Every setting that the command line offers for a run, with its default; and the help text."""
    parser = ArgumentParser()
    parser.add_function_arguments(RUNS[name], fail_untyped=True)
    return parser.get_defaults().as_dict(), " ".join(parser.format_help().split())


@pytest.mark.parametrize("name", often(RUNS, RUNS.keys() - ELSEWHERE))
def test_a_run_whose_networks_its_seed_decides_trains_all_players_and_logs_its_scores(name):
    run = small(name, seed=1)
    one, same, other = (each.game.state_dict() for each in (run, small(name, seed=1), small(name, seed=2)))
    tensors = [key for key, value in one.items() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(one[key], same[key]) for key in tensors)
    assert not all(torch.equal(one[key], other[key]) for key in tensors)
    steps = run.max_steps + max(phase.start for phase in run.game.configure_phases())  # each phase has one
    trainer = Trainer(
        strategy=PhaseStrategy("ddp"), accelerator="cpu", devices=1, max_steps=steps, limit_val_batches=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        val_check_interval=1, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(run.game, run.data)
    assert trainer.global_step == steps
    players, now = run.game.players, run.game.state_dict()
    frozen = {name for name, player in players.items() if player.frozen and not player.follows}
    moved = {key.partition(".")[0] for key in tensors if not torch.equal(now[key].double(), same[key].double())}
    assert moved >= players.keys() - frozen and not moved & frozen
    assert run.scores
    assert all(trainer.callback_metrics[score] > 0 for score in run.scores)
    assert all(run.scores.values())
    if name in FROM_NOISE:  # the size is that of the pictures
        assert run.game.numbered(torch.tensor([0, 1]), torch.zeros(1)).shape == (2, 3, 16, 16)
    if name.endswith("faces"):  # none that is held out is trained on
        parts = [getattr(part, "faces", getattr(part, "posters", part)) for part in (run.data.train, run.data.val)]
        train, val = ({part.face(index) for index in range(len(part))} for part in parts)
        assert not train & val


@pytest.mark.parametrize("name", RUNS)
def test_the_command_line_can_offer_every_setting(name):
    settings, said = offered(name)
    assert settings.keys() >= COMMON - ({"size"} if name.startswith("hifigan") else set())
    for function in (RUNS[name], pairs.Painting, pairs.Published, faces.PaintedFaces, faces.DrawnFaces):
        hints = typing.get_type_hints(function)
        described = "".join(each.__doc__ or "" for each in getattr(function, "__mro__", [function]))
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in settings:
                kinds = typing.get_args(hints[parameter.name]) or [hints[parameter.name]]
                kinds = [kind if isinstance(kind, type) else type(kind) for kind in kinds]  # a Literal has values
                assert all(issubclass(kind, (int, float, bool, str, type(None))) for kind in kinds)
                assert f"    {parameter.name}: " in described
    for setting in settings:
        assert f"--{setting}" in said


def test_held_out_sounds_are_not_trained_on_and_as_long_as_asked_for():
    data = small("hifigan-tones", seconds=0.3, hertz=16000).data
    assert not {data.train.clip(k) for k in range(4)} & {data.val.clip(k) for k in range(4)}
    assert data.train[0]["wave"].shape == (1024,)
    assert data.val[0]["wave"].shape == (4800,)
    assert data.train.rate == data.val.rate == 16000


PUBLISHED = dict(
    size=256, batch_size=32, epochs=100, max_steps=None, width=64, hidden=128, upsamplings=None, matching=10.0,
    generator_rate=1e-4, discriminator_rate=4e-4, perceptual="torchvision", perceptual_weight=10.0,
    perceptual_normalise=False, pixels=0.0, fake_once=False, recompute=True,
)  # fmt: skip


@pytest.mark.parametrize("name", ["sean", "spade"])
def test_the_defaults_are_the_published_settings(name):
    settings, _ = offered(name)
    assert {key: settings[key] for key in PUBLISHED} == PUBLISHED
    assert settings.get("style") == (512 if name == "sean" else None)


@pytest.mark.parametrize("name", ON_FILES)
def test_an_old_name_finds_the_data_set_with_its_labels_shape_and_edges(name, capsys):
    runs._say_new_name.cache_clear()
    run = small(name)
    said = capsys.readouterr().err
    assert said.startswith(f"{name} is {name.partition('-')[0]} now") and f"{run.game.labels} labels" in said
    assert run.data.flip == (not name.endswith("folder"))
    assert run.data.crop == (name != "sean-cityscapes")
    labels, (item, *_) = LABELS[name.partition("-")[2]], run.data.train_dataloader()
    assert run.game.labels == labels
    assert item["image"].shape == (2, 3, 16, 32 if "cityscapes" in name else 16)
    assert ("edges" in item) == run.game.edges == (name in ("sean-cityscapes", "sean-coco"))
    assert run.game.discriminator.discriminator_0.model0[0].in_channels == labels + run.game.edges + 3
    assert isinstance(run.game, Spade) and hasattr(run.game, "encoder") == name.startswith("sean")
    trained, held_out = ({part.paths(row)[0] for row in range(len(part))} for part in (run.data.train, run.data.val))
    assert not trained & held_out and sum(len(batch["image"]) for batch in run.data.val_dataloader()) == 1  # as typed


def test_the_networks_have_the_published_numbers_of_parameters():
    """At 19 labels 266.9 million in encoder and generator, 1.36 million in the discriminator. No memory is used."""
    with torch.device("meta"):
        small_one = dict(size=32, batch_size=1, held_out=1, labels=19, **OFF)
        game = build("sean-folder", data=str(written("folder")), **small_one).game
    parts = (game.encoder, game.generator, game.discriminator)
    counts = [sum(p.numel() for p in part.parameters()) / 1e6 for part in parts]
    assert counts[0] + counts[1] == pytest.approx(266.9, abs=0.1)
    assert counts[0] == pytest.approx(1.57, abs=0.01) and counts[2] == pytest.approx(1.36, abs=0.01)
    with torch.device("meta"):
        plain = StyleEncoder(), SeanGenerator()
    assert [sum(p.numel() for p in part.parameters()) / 1e6 for part in plain] == counts[:2]


@pytest.mark.parametrize(("steps", "wanted"), [(None, 7 * 2), (5, 5)])
def test_epochs_count_steps_unless_those_are_given(steps, wanted):
    run = small("sean-folder", batch_size=1, epochs=7, max_steps=steps)
    assert (run.max_steps, run.game.steps) == (wanted, wanted)


def test_only_a_training_needs_the_weights_of_vgg():
    for purpose, found in (("train", "vgg.pth"), ("dry", "vgg.pth"), ("resume", "vgg.pth"), ("look", None)):
        with made_to(purpose):
            assert perceptual_loss("vgg.pth", torch.nn.Identity, lambda known: known) == found
            assert perceptual_loss("off", torch.nn.Identity, dict) is None
    for purpose, typed in (("plan", "vgg.pth"), ("dry", "torchvision")):
        with made_to(purpose):
            assert perceptual_loss(typed, lambda: torch.nn.Linear(1, 1), dict).keys() == {"weight", "bias"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sean-facades", dict(labels=3), "its own labels, and no choice of labels"),
        ("sean-ade20k", dict(edges=True), "its own labels, and no choice of edges"),
        ("sean-faces", dict(size=60), "a size of 60x60 cannot be halved 3 times; type --size 64, or fewer"),
        ("vqgan-faces", dict(size=30), "a size of 30x30 cannot be halved 2 times; type --size 32, or fewer"),
        ("sean-cityscapes", dict(size=400), "a size of 800x400 cannot be halved 5 times; type --size 384, or fewer"),
        ("sean-coco", dict(size=544), "a size of 544x544 cannot be halved 6 times; type --size 512, or fewer"),
        ("hifigan-tones", dict(segment=2000), "segment=2000 is not a multiple of 64 from 256 up; try segment=2048"),
        ("dmd2-lora-faces", dict(sigma_min=2.0, sigma_max=1.0), "dmd2-lora-faces: sigma_min=.* is not below sigma_max"),
        *((name, dict(size=48), r"^size=48 is not 4 doubled; try size=32") for name in FROM_NOISE[:-1]),
        ("biggan", dict(config_="cifar", size=64), "'cifar' is for 32 pixels, and pictures have 64x64; type --co"),
        ("biggan", dict(config_="stylegan"), "--config stylegan is not known; type one of auto, cifar, imagenet128"),
        ("biggan", dict(from_="nowhere"), "nowhere cannot be read as published weights"),
        ("r3gan", dict(config_="cifar10", size=64), "'cifar10' is for 32 pixels, .* have 64; type --config auto"),
        ("r3gan", dict(config_="ffhq"), "type one of auto, cifar10"),
        ("stylegan2", dict(config_="paper64"), "--config paper64 is not known; type one of auto, stylegan2, .*, cifar"),
        ("stylegan2", dict(augment="gbc"), "augment 'gbc' is not known; type --augment blit, geom, .* or off"),
        ("stylegan2", dict(config_="cifar", freeze_d=9), "has 5 layers; type --freeze-d 0 to 5, often 4"),
        ("hifigan", dict(config_="V4"), "--config V4 is not known; type one of V1, V2, V3, or a config.json of Hi"),
        ("hifigan", dict(data="nowhere"), "nowhere is no folder; give a folder of wav"),
        ("hifigan", dict(from_="nowhere"), "nowhere cannot be read as published weights"),
        ("cut", dict(config_="cat"), "--config cat is not known; type cut or fastcut"),
        ("cut", dict(blocks=4), "type --blocks 5 or more"),
        ("sean-folder", dict(batch_size=9), "2 training samples do not fill a batch of 9; try --batch-size 2"),
        ("sean-folder", dict(held_out=3), "3 pictures in '.*', 3 to hold out; type a --held-out of 1 to 2"),
        ("sean-folder", dict(perceptual="nowhere.pth"), "there is no file 'nowhere.pth' of VGG-19's weights"),
    ],
)
def test_what_is_wrong_is_refused_before_networks_are_made(name, settings, message, monkeypatch):
    made = mock.Mock(side_effect=AssertionError("a network was made"))
    for place in ("pairs.SeanGenerator", "faces.SeanGenerator", "hifigan.HifiGenerator", "faces.VqAutoencoder"):
        module, kind = place.split(".")
        monkeypatch.setattr(sys.modules[f"gan.runs.{module}"], kind, made)  # gan.runs.hifigan is the function
    if name in SMALL:
        sizes = {"upsamplings": None} if name in ON_FILES and "size" in settings else {}
        settings = settings_of(name) | sizes | settings
    with pytest.raises(UserError, match=message):
        build(name, **settings)


SEAN = dict(size=16, upsamplings=2, width=4, hidden=4, style=4, batch_size=2, workers=0, perceptual="off", labels=4)


def test_a_share_of_a_folder_is_held_out_and_said_and_runs_of_before_keep_their_split(tmp_path, capsys):
    """Settings of before have null, which meant the last 16 by name."""
    layouts.pairs(tmp_path, *range(10, 50))
    (tmp_path / "old.yaml").write_text("run: sean\nheld_out: null\n")
    (tmp_path / "new.yaml").write_text(settings_file.dump(options.parse(["sean"])[0], "sean"))
    held_out = {}
    for age in ("old", "new"):
        chosen = options.load(tmp_path / f"{age}.yaml").held_out
        data = build("sean", data=str(tmp_path), held_out=chosen, **SEAN).data
        held_out[age] = {data.val.paths(row)[0].stem for row in range(len(data.val))}
        said = f"{len(data.train)} to train on and {len(data.val)} held out, 4 labels; resized to 16x16\n"
        assert said in capsys.readouterr().err
    assert held_out["old"] == {str(number) for number in range(34, 50)}
    assert len(held_out["new"]) == 8 and not held_out["new"] <= held_out["old"]


def test_a_folder_may_be_cropped_or_padded_and_a_published_set_may_not(tmp_path, capsys):
    root = layouts.pairs(tmp_path / "own", *range(8))
    layouts.put(root / "images" / "wide.png", layouts.colours(16, 32))
    layouts.put(root / "labels" / "wide.png", layouts.labels(16, 32))
    for typed, labels, said in [
        ("stretch", "4 labels;", "stretched to 16x16 (--fit crop takes the middle, pad adds what is missing)"),
        ("crop", "4 labels;", "scaled and cropped to 16x16"),
        ("pad", "5 labels", "(0, 1, 2, 3, padding); scaled and padded to 16x16"),
    ]:
        run = build("sean", data=str(root), fit=typed, **SEAN)
        assert run.game.labels == int(labels[0])
        line = capsys.readouterr().err
        assert "images with label maps (2 sizes from 8x8 to 32x16, 8 of 8x8), " in line
        assert f" {labels} {said}\n" in line
    (tmp_path / "base").mkdir()
    with pytest.raises(UserError, match="pictures of CMP facades are stretched, as published; leave --fit out"):
        build("sean", data=str(tmp_path), fit="pad", **SEAN)


def test_networks_that_no_memory_holds_are_refused_in_one_line(monkeypatch):
    for width in (10**15, 10**25):
        with pytest.raises(UserError, match=r"^run 'r3gan-faces' is too large for this machine, with these settings$"):
            build("r3gan-faces", width=width, size=16, faces=4)
    monkeypatch.setitem(RUNS, "mine", mock.Mock(side_effect=RuntimeError("size mismatch")))
    with pytest.raises(RuntimeError, match="size mismatch"):  # a mistake in a run of one's own stays what it is
        build("mine")


@pytest.mark.parametrize("name", often(BEGUN, BEGUN[:1]))  # a SEAN is one of those of test_export.py
def test_the_file_that_a_run_begins_with_is_needed_no_more(name, tmp_path):
    """Also what the file says and no weight does: StyleGAN2's limit of activations, HiFi-GAN's configuration."""
    theirs, gone = tmp_path / "theirs", tmp_path / "gone"
    theirs.mkdir()
    typed = settings_of(name) | ({"size": 32, "upsamplings": 5} if name == "sean" else {})
    game = build(name, **typed | {"seed": 1} | ({"config_": "V3"} if name == "hifigan" else {})).game
    if name == "stylegan2":
        game.generator.get_submodule(limited := "synthesis.b4.conv1").clamp = 0.5
    for file in game.published():
        file.write(theirs / file.name)
    if name in ("stylegan2", "r3gan"):
        typed = {key: value for key, value in typed.items() if key not in ("width", "mapping")}
    from_ = theirs / file.name if file.name.endswith(".pkl") else theirs
    run = opening.train(tmp_path / "runs", name, **typed, save_every=1, check=False, from_=from_)
    assert f"\nbegun from\n  {from_}\n" in (run / "game.txt").read_text("utf-8")

    def pictures() -> dict[str, typing.Any]:
        opened = reopen.open_run(str(run)).run
        assert name != "stylegan2" or opened.game.generator.get_submodule(limited).clamp == 0.5
        columns = reopen.shown_columns(opened.game, reopen.first_samples(reopen.first_batches(opened)[0], 2))
        return {title: column.samples if isinstance(column, Sound) else column for title, column in columns.items()}

    before = pictures()
    theirs.rename(gone)
    torch.testing.assert_close(pictures(), before, rtol=0, atol=0)
    assert fit.main(["--resume", str(run), "--max-steps", "2", "--check", "false"]) == 0
    after = pictures()
    (run / "networks.json").unlink(missing_ok=True)  # as runs were before
    gone.rename(theirs)
    torch.testing.assert_close(pictures(), after, rtol=0, atol=0)


@pytest.mark.parametrize("name", BEGUN)
def test_where_the_data_are_gone_the_networks_are_made_by_what_the_folder_says(name):
    typed = settings_of(name) | ({"size": 32, "upsamplings": 5, "max_steps": 1} if name == "sean" else {})
    made = build(name, **typed)
    shape = json.loads(json.dumps({"train": facts_of(made.data.train), "val": facts_of(made.data.val)}))
    typed["data"] = "/nowhere/mine"
    with made_to("look", None, shape):
        run = build(name, **typed)
    sizes, lengths = [], []
    for each in (run, made):
        sizes.append({name: getattr(value, "shape", value) for name, value in each.game.state_dict().items()})
        lengths.append((len(each.data.train), len(each.data.val)))
    assert sizes[0] == sizes[1] and lengths[0] == lengths[1]
    with pytest.raises(UserError, match=r"/nowhere/mine.*type --data and the"):
        run.data.val[0]
    with pytest.raises(UserError, match="/nowhere/mine"), made_to("look"):  # as runs were before
        build(name, **typed)
