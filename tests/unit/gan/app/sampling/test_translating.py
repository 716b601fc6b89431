"""`gan.sample RUN --inputs`: every picture of a folder is translated, in its own size and under its name."""

import shutil

import pytest
import torch
from PIL import Image

from gan import sample
from gan.app.editing.editors import open as opened
from gan.app.run.reopen import open_run
from gan.app.sampling.translating import translated
from gan.app.training.card import facts
from gan.games.translation import Translation
from tests.support import opening
from tests.unit.gan.runs.test_pictures import put

SIZES = dict(size=16, width=2, judge_width=2, layers=2, batch_size=2, workers=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("translating")
    for number in range(8):
        put(root / "data" / "A" / f"{number}.png", (16, 16))
        put(root / "data" / "B" / f"{number}.png", (16, 16), "L")
    return opening.train(root / "runs", "pix2pix", data=root / "data", **SIZES)


@pytest.fixture
def photos(tmp_path):
    put(tmp_path / "photos" / "a.png", (21, 16))
    put(tmp_path / "photos" / "a.jpg", (5, 40), "L")
    put(tmp_path / "photos" / "deep" / "b.png", (16, 16), "RGBA")
    return tmp_path / "photos"


def test_each_picture_is_translated_in_its_own_size(run, photos, tmp_path, capsys):
    out = tmp_path / "painted"
    assert sample.main([str(run), "--inputs", str(photos), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"  {out}"
    found = {str(path.relative_to(out)): Image.open(path) for path in out.rglob("*.png")}
    assert {name: each.size for name, each in found.items()} == {
        "a.png.png": (21, 16), "a.jpg.png": (5, 40), "deep/b.png.png": (16, 16),
    }  # fmt: skip
    assert all(image.convert("L").convert("RGB").tobytes() == image.tobytes() for image in found.values())
    assert sample.main([str(run), "--inputs", str(photos), "--out", str(out)]) == 2
    assert "is there already and not empty" in capsys.readouterr().err
    assert sample.main([str(run), "--inputs", str(photos / "a.png"), "--out", str(tmp_path / "one.png")]) == 0
    assert Image.open(tmp_path / "one.png").tobytes() == found["a.png.png"].tobytes()


def test_transparent_parts_are_on_the_ground_that_the_run_was_trained_on(run, photos, tmp_path):
    found, shown = opened(str(run), "cpu"), {}
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(photos / "a.png")
    for colour in ("white", "black"):
        Image.new("RGB", (16, 16), colour).save(photos / f"{colour}.png")
        found.saved.settings["background"] = colour
        out = tmp_path / colour
        found.translate(str(photos / "a.png"), out / "clear")
        found.translate(str(photos / f"{colour}.png"), out / "plain")
        shown[colour] = [(out / "clear" / "a.png").read_bytes(), (out / "plain" / f"{colour}.png").read_bytes()]
    assert shown["white"][0] == shown["white"][1] != shown["black"][0] == shown["black"][1]


def test_a_run_on_parts_of_pictures_says_of_which_scale(run, photos, tmp_path, capsys):
    trained = opening.train(tmp_path / "runs", "pix2pix", data=run.parents[1] / "data", load_size=24, **SIZES)
    opened(str(trained), "cpu").translate(str(photos / "a.png"), tmp_path / "a.png")
    assert "each in its own size; the run was trained on pictures of 24 pixels on the" in capsys.readouterr().out
    assert Image.open(tmp_path / "a.png").size == (21, 16)
    opened(str(trained), "cpu").translate(str(photos / "a.png"), tmp_path / "b.png", largest=10)
    assert "10 pixels at most on the longer side; the run was trained on pictures of 24" in capsys.readouterr().out


def test_a_photo_is_translated_as_the_camera_was_held(run, tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (21, 16)).save(tmp_path / "turned.jpg", exif=turned)
    (tmp_path / "turned.jpg").rename(tmp_path / ".turned.jpg")
    (folder,) = opened(str(run), "cpu").translate(str(tmp_path / ".turned.jpg"))
    assert Image.open(folder / ".turned.png").size == (16, 21)


def test_what_is_broken_is_named_and_the_others_are_translated(run, photos, tmp_path, capsys):
    (photos / "c.png").write_bytes(b"no picture")
    assert sample.main([str(run), "--inputs", str(photos), "-o", str(tmp_path / "painted")]) == 2
    said = capsys.readouterr().err
    assert f"left out 1 of 4 pictures in {photos}; the others are in {tmp_path / 'painted'}:" in said
    assert "c.png" in said
    assert len(list((tmp_path / "painted").rglob("*.png"))) == 3
    assert sample.main([str(run), "--inputs", str(photos / "c.png"), "-o", str(tmp_path / "none")]) == 2
    assert "no picture in" in capsys.readouterr().err


def test_what_is_no_picture_is_said_and_what_will_be_replaced(run, photos, tmp_path, capsys):
    (photos / "d.heic").touch()
    (photos / "notes.txt").touch()
    shutil.make_archive(str(tmp_path / "zipped"), "zip", photos)
    for inputs in (photos, tmp_path / "zipped.zip"):
        assert sample.main([str(run), "--inputs", str(inputs), "-o", f"{inputs}-painted"]) == 0
        said = capsys.readouterr().out
        assert "1 .heic (save as JPEG or PNG first)" in said and "1 .txt" in said
        assert f"left out of {inputs}: 1 ." in said and "; pictures are .jpg .jpeg .png" in said
    typed = [str(run), "--inputs", str(photos / "a.png"), "-o", str(tmp_path / "one.png")]
    for there in (False, True):
        assert sample.main(typed) == 0
        assert (f"{tmp_path / 'one.png'} is there already, and will be replaced" in capsys.readouterr().out) == there
    for there in (False, True):
        assert sample.main([str(run)]) == 0
        assert ("show.png is there already, and will be replaced" in capsys.readouterr().out) == there


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["translate"], "say which pictures: --inputs"),
        (["--direction", "AtoB"], "--direction is for pictures that are translated; type --inputs, too"),
        (["--seeds", "0-3"], "leave --seeds out, or name a run that draws from noise, such as --run stylegan2"),
        (["--inputs", "nowhere"], "there is no folder nowhere; type --inputs and"),
        (["--inputs", ".", "--direction", "BtoA"], "has no direction BtoA; known: AtoB"),
    ],
)
def test_mistakes_are_answered(run, typed, said, capsys):
    assert sample.main([str(run), *typed]) == 2
    assert said in capsys.readouterr().err


def test_of_pairs_side_by_side_the_half_is_translated_that_was_trained_on(run, tmp_path, monkeypatch, capsys):
    found, whole = opened(str(run), "cpu"), Image.new("RGB", (32, 16), "red")
    whole.paste("blue", (16, 0, 32, 16))
    for name, picture in {"pair": whole, "one": whole.crop((0, 0, 30, 16))}.items():
        picture.save(tmp_path / f"{name}.png")
    monkeypatch.setattr(type(found.saved.run.data.train), "half", 1)
    monkeypatch.setattr(found.game.generator, "forward", lambda x: x)
    found.translate(str(tmp_path), tmp_path / "made")
    made, one = (Image.open(tmp_path / "made" / f"{name}.png") for name in ("pair", "one"))
    assert made.size == (16, 16) and made.convert("RGB").getcolors() == [(256, (0, 0, 255))] and one.size == (30, 16)
    assert "of a picture twice as wide as high, the right half is translated" in capsys.readouterr().out


def test_a_run_from_b_to_a_has_that_direction_and_its_card_says_so(run, photos, capsys):
    back = opening.train(run.parent, "pix2pix", data=run.parent.parent / "data", direction="BtoA", **SIZES)
    typed = [str(back), "--inputs", str(photos / "a.png")]
    assert sample.main([*typed, "-o", str(photos / "typed"), "--direction", "BtoA"]) == 0
    assert "direction BtoA" not in capsys.readouterr().out.splitlines()
    assert sample.main([*typed, "-o", str(photos / "not")]) == 0
    assert "direction BtoA" in capsys.readouterr().out.splitlines()
    assert sample.main([str(back), "--inputs", str(photos), "--direction", "AtoB"]) == 2
    assert "has no direction AtoB; known: BtoA" in capsys.readouterr().err
    saved = open_run(str(back))
    assert facts(saved.folder, saved.run, saved.step, saved.settings)["direction"] == "BtoA"


def test_dropout_gives_a_picture_the_same_translation_each_time():
    noisy = Translation(lambda pictures: pictures * torch.rand(4), 3)
    first = translated(noisy, torch.ones(1, 3, 4, 4))
    torch.rand(1)  # what others draw meanwhile
    assert torch.equal(translated(noisy, torch.ones(1, 3, 4, 4)), first)
