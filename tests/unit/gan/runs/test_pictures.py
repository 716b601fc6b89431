"""Pictures of a person's own: what a path holds is found out, and becomes batches."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from gan.files.errors import UserError
from gan.games.from_noise import FromNoise
from gan.runs import build
from gan.runs.pictures import OnPictures
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.r3 import R3Discriminator, R3Generator
from nets.stylegan import StyleDiscriminator, StyleGenerator

TINY = dict(batch_size=4, max_steps=4, workers=0, held_out=0.25)


def put(path, size=(12, 8), mode="RGB", colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size, colour or (len(path.name) * 9 % 256, 50, 100))
    picture.convert(mode).save(path)
    return path


def two_classes(root):
    """A folder with two folders of small pictures, wider than high."""
    for number in range(16):
        put(root / "ab"[number % 2] / f"{number}.png", (16, 12), colour=(16 * number,) * 3)
    return str(root)


def found(path, **settings):
    return OnPictures(data=str(path), workers=0, **settings).find()


def test_a_folder_of_pictures_becomes_batches(tmp_path, capsys):
    for number in range(12):
        put(tmp_path / "deep" / f"{number}.jpg")
    data = found(tmp_path)
    assert (data.size, data.channels, data.classes) == ((8, 12), 3, 0)
    assert len(data.train) == 9 and len(data.val) == 3
    batch = next(iter(data.data(4).train_dataloader()))
    assert set(batch) == {"image"} and batch["image"].shape == (4, 3, 8, 12)
    assert batch["image"].dtype == torch.float32 and -1 <= batch["image"].min() < batch["image"].max() <= 1
    said = "12 pictures in a folder (12x8; RGB 12); no classes; scaled and cropped to 12x8 (all are), RGB"
    assert said in capsys.readouterr().err


def test_sub_folders_that_hold_all_pictures_are_classes(here, capsys):
    for number in range(8):
        put(here / ("cat", "dog")[number % 2] / f"{number}.png")
    data = found(here)
    assert data.class_names == ("cat", "dog")
    for part in (data.train, data.val):
        assert all(part[row]["class"] == ("cat", "dog").index(part.name(row)[:3]) for row in range(len(part)))
    assert "2 classes (cat, dog; --classes false for none)" in capsys.readouterr().err
    assert found(here, classes=False).classes == 0
    assert found(".").class_names == ("cat", "dog")
    put(here / "beside.png")
    assert found(here).classes == 0
    with pytest.raises(UserError, match="pictures lie beside those"):
        found(here, classes=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("labels", [[2, 0, 1, 1], [[0.5, 1], [1, 0], [0, 0], [2, 2]], None])
def test_stylegans_data_sets_have_their_labels(tmp_path, packed, labels):
    names, path = [f"00000/img{number:08}.png" for number in range(4)], tmp_path / "set"
    for name in names:
        put(path / name)
    given = labels and [*zip(names, labels, strict=True)][::-1]
    (path / "dataset.json").write_text(json.dumps({"labels": given}))
    data = found(shutil.make_archive(path, "zip", path) if packed else path, held_out=0.0)
    assert data.classes == (0 if labels is None else 3 if labels[0] == 2 else 2)
    for row in range(4) if labels else ():
        assert np.array_equal(data.train[row]["class"], np.float32(labels[row]))


def test_a_picture_that_was_trained_on_is_never_held_out_later(tmp_path):
    for number in range(40):
        put(tmp_path / f"{number}.png", (4, 4))
    before = found(tmp_path)
    trained = {before.train.name(row) for row in range(len(before.train))}
    for number in range(40, 80):
        put(tmp_path / f"{number}.png", (4, 4))
    after = found(tmp_path)
    assert trained < {after.train.name(row) for row in range(len(after.train))}
    assert 0 < len(after.val) < 20


def test_files_that_are_not_read_are_counted_and_pictures_among_them_get_advice(tmp_path, capsys):
    put(tmp_path / "a.png")
    for name, said in (("notes.txt", "not read: 1 .txt; dec"), ("b.HEIC", "1 .heic (save as JPEG or PNG first)")):
        (tmp_path / name).write_bytes(b"-")
        found(tmp_path, held_out=0.0)
        assert said in capsys.readouterr().err


def test_what_cannot_be_meant_is_refused(tmp_path):
    put(tmp_path / "a.png")
    with pytest.raises(UserError, match="2 channels are not known"):
        found(tmp_path, channels=2)
    with pytest.raises(UserError, match="there is no colour 'purplish'"):
        found(tmp_path, background="purplish")


# ---- runs from noise ----


@pytest.mark.parametrize(
    ("name", "settings"),
    [("stylegan2", dict(width=0.005, mapping=1)), ("r3gan", dict(width=0.02, augment=0.5)), ("biggan", dict(width=2))],
)
def test_class_folders_of_any_shape_are_trained_on(name, settings, tmp_path):
    run = build(name, data=two_classes(tmp_path), size="16x12", **settings, **TINY)
    batch, game = next(iter(run.data.train_dataloader())), run.game
    assert name != "r3gan" or game.augment is not None
    assert f"width {settings['width']}" in run.words
    assert game.generator.classes == 2 and batch["image"].shape == (4, 3, 12, 16)
    assert all(loss.isfinite() for phase in game.configure_phases() for loss in phase.loss(batch).values())
    shown = game.eval().show(batch)
    assert list(shown) == [f"{'ab'[k % 2]}: seeds {k}, …" for k in range(8)]
    by_turns = game.numbered(torch.arange(32), batch["image"])  # as gan.sample draws seeds
    torch.testing.assert_close(torch.stack([*shown.values()], 1).flatten(0, 1), by_turns)


def test_a_network_that_does_not_say_how_long_its_noise_is_is_named():
    game = FromNoise()
    game.generator = torch.nn.Linear(2, 2)
    for draw in (game.show, lambda batch: game.draw(batch["image"])):
        with pytest.raises(UserError, match="Linear has no 'latent'; set it to the length of the noise it takes"):
            draw({"image": torch.zeros(1, 3, 4, 4)})


NARROW, WIDTHS = dict(base=64, most=4), (16, 8, 8)
NETS = {
    "stylegan2": lambda: (
        StyleGenerator(16, latent=4, style=4, mapping=2, **NARROW),
        StyleDiscriminator(16, group=2, **NARROW),
    ),
    "r3gan": lambda: (R3Generator(7, WIDTHS), R3Discriminator(WIDTHS)),
}


@pytest.mark.parametrize(("name", "left_out"), [("stylegan2", "--width and --mapping"), ("r3gan", "--width")])
def test_a_published_file_is_trained_on(name, left_out, tmp_path, capsys):
    nets = dict(zip("GD", NETS[name](), strict=True))
    write(tmp_path / "nets.pkl", {which: published(net) for which, net in nets.items()})
    rules = dict(TINY, data=two_classes(tmp_path / "data"), from_=str(tmp_path / "nets.pkl"), classes=False)
    run = build(name, size="16x12", **rules)
    game = run.game
    assert f"\nweights: G and D of {tmp_path / 'nets.pkl'}\n" in capsys.readouterr().err
    assert name != "stylegan2" or ", freeze-d 0, " in run.words
    for net, begun in zip((game.generator, game.discriminator), nets.values(), strict=True):
        assert net.training
        torch.testing.assert_close(net.state_dict(), begun.state_dict(), rtol=0, atol=0)
    assert sum(game.fool({"image": torch.zeros(4, 3, 12, 16)}).values()).isfinite()
    assert name != "stylegan2" or game.ada.images == 100_000
    for wrong, words in (
        ({"width": 0.5}, f"networks of its own; leave {left_out} out"),
        ({"size": 32}, "draws 16x16, and pictures have 32x32; type --size 16"),
        ({"channels": 1}, "draws 3 channels, and pictures have 1; type --channels 3"),
        ({"classes": True}, "knows 0 classes, and pictures have 2; type --classes false"),
    ):
        with pytest.raises(UserError, match=words):
            build(name, **{"size": "16x12", **rules, **wrong})
