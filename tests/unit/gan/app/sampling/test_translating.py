"""`gan.sample --inputs`: a run, or a published file known by its weights, translates each picture, sound or code."""

import re
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

import gan
from gan import sample
from gan.app.editing.editors import open as opened
from gan.app.fitting.card import facts
from gan.app.run.reopen import open_run
from gan.app.sampling.translating import translated
from gan.files.errors import UserError
from gan.games.translation import Translation
from gan.sound import Sound
from nets.hifigan import HifiGenerator, Judges, PeriodJudges, ScaleJudges
from nets.mel import Mel
from nets.published.files import PublishedFile, latest_nets
from nets.published.hifigan import files
from nets.resnet import ResnetGenerator, UNet
from nets.vqgan import VqAutoencoder
from tests.support import opening
from tests.unit.gan.runs.test_pictures import put

pytestmark = pytest.mark.usefixtures("here")
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


def test_a_picture_is_of_the_ground_and_of_the_scale_that_the_run_was_trained_on(run, photos, tmp_path, capsys):
    found, shown = opened(str(run), "cpu"), []
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(photos / "clear.png")
    for colour in ("white", "black"):
        Image.new("RGB", (16, 16), colour).save(photos / f"{colour}.png")
        found.saved.settings.update(background=colour, load_size=24)
        for name in ("clear.png", f"{colour}.png"):
            (made,) = found.translate(str(photos / name), tmp_path / f"{colour}-{name}")
            shown.append(made.read_bytes())
    assert shown[0] == shown[1] != shown[2] == shown[3]
    assert "each in its own size; the run was trained on pictures of 24 pixels on the" in capsys.readouterr().out
    found.translate(str(photos / "a.png"), tmp_path / "b.png", largest=10)
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
    zipped = shutil.make_archive(str(tmp_path / "zipped"), "zip", photos)
    for inputs in (photos, zipped):
        assert sample.main([str(run), "--inputs", str(inputs), "-o", f"{inputs}-painted"]) == 0
        said = capsys.readouterr().out
        assert "1 .heic (save as JPEG or PNG first)" in said and "1 .txt" in said
        assert f"left out of {inputs}: 1 ." in said and "; pictures are .jpg .jpeg .png" in said
    for typed, name in ((["--inputs", str(photos / "a.png"), "-o", "one.png"], "one.png"), ([], "show.png")):
        for there in (False, True):
            assert sample.main([str(run), *typed]) == 0
            assert (f"{name} is there already, and will be replaced" in capsys.readouterr().out) == there
    shown, drawn = (Image.open(run / "samples" / f"{name}.png") for name in ("show", "step-000002"))
    assert shown.tobytes() == drawn.tobytes(), "the grid that training draws"


@pytest.mark.parametrize(
    ("what", "typed", "said"),
    [
        ("run", "translate", "say which pictures: --inputs"),
        ("run", "--direction AtoB", "--direction is for pictures that are translated; type --inputs, too"),
        ("run", "--seeds 0-3", "leave --seeds out, or name a run that draws from noise, such as --run stylegan2"),
        ("run", "--inputs nowhere", "there is no folder nowhere; type --inputs and"),
        ("run", "--inputs . --direction BtoA", "has no direction BtoA; known: AtoB"),
        ("G.pth", "--seeds 0-3", "--seeds does nothing"),
        ("G.pth", "show", "there is no 'show'; type translate"),
        ("G.pth", "", "say which pictures: --inputs"),
    ],
)
def test_mistakes_are_answered(run, what, typed, said, capsys):
    latest_nets({"G": NETWORKS["unet"]})[0].write(Path("G.pth"))
    assert sample.main([str(run) if what == "run" else what, *typed.split()]) == 2
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
    found.saved.settings["side_by_side"] = True
    found.translate(str(tmp_path / "one.png"), tmp_path / "half.png")
    assert Image.open(tmp_path / "half.png").size == (15, 16)
    assert "of each picture, the right half is translated" in capsys.readouterr().out


def test_a_run_from_b_to_a_has_that_direction_and_its_card_says_so(run, photos, capsys):
    back = opening.train(run.parent, "pix2pix", data=run.parent.parent / "data", direction="BtoA", **SIZES)
    typed = [str(back), "--inputs", str(photos / "a.png")]
    for more, said in ((["--direction", "BtoA"], False), ([], True)):
        assert sample.main([*typed, "-o", str(photos / f"said-{said}"), *more]) == 0
        assert ("direction BtoA" in capsys.readouterr().out.splitlines()) == said
    saved = open_run(str(back))
    assert facts(saved.folder, saved.run, saved.step, saved.settings)["direction"] == "BtoA"


def test_dropout_gives_a_picture_the_same_translation_each_time():
    noisy = Translation(lambda pictures: pictures * torch.rand(4), 3)
    first = translated(noisy, torch.ones(1, 3, 4, 4))
    torch.rand(1)  # what others draw meanwhile
    assert torch.equal(translated(noisy, torch.ones(1, 3, 4, 4)), first)


NETWORKS = {
    "resnet": ResnetGenerator(3, 1, 4, 2),
    "resnet of batch norms": ResnetGenerator(1, 3, 2, 1, norm="batch"),
    "resnet with dropout": ResnetGenerator(3, 3, 2, 3, dropout=True),
    "resnet of batch norms with dropout": ResnetGenerator(3, 3, 2, 1, norm="batch", dropout=True),
    "cut": ResnetGenerator(3, 3, 2, 1, smooth=True),
    "unet": UNet(3, 1, 2, 3),
    "unet of instance norms": UNet(1, 3, 2, 7, norm="instance"),
}


@pytest.fixture
def two_photos(here):
    for number in range(2):
        put(here / "photos" / f"{number}.png", (24, 16), "RGB")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_generator_is_known_by_its_weights(name, tmp_path):
    net = NETWORKS[name].eval()
    (file,) = latest_nets({"G": net})
    file.write(tmp_path / "any.pth")
    opened = gan.open("any.pth", "cpu")
    assert repr(opened.game.net) == repr(net)
    (way,) = opened.game.translations().values()
    picture = torch.rand(1, net.inside, 128, 128)
    with torch.no_grad():
        torch.manual_seed(0)
        wanted = net(picture)
        torch.manual_seed(0)
        assert torch.equal(way.paint(picture), wanted)


def test_each_picture_of_a_folder_is_translated(two_photos, tmp_path, capsys):
    latest_nets({"G": NETWORKS["cut"]})[0].write(tmp_path / "latest_net_G.pth")
    assert sample.main(["latest_net_G.pth", "--inputs", "photos", "--out", "painted", "--largest", "12"]) == 0
    assert capsys.readouterr().out.splitlines() == ["latest_net_G.pth", "direction as trained", "  painted"]
    assert sorted(path.name for path in (tmp_path / "painted").iterdir()) == ["0.png", "1.png"]
    opened = gan.open("latest_net_G.pth", "cpu")
    (out,) = opened.translate("photos")
    (made,) = opened.translate(Image.open("photos/0.png"))
    assert str(out) == "latest_net_G-translated-photos" and made.tobytes() == Image.open(out / "0.png").tobytes()
    with pytest.raises(UserError, match="inputs= takes a path or a picture of Pillow, and not Tensor"):
        opened.translate(torch.zeros(3, 8, 8))


def codebook(attention=()):
    torch.manual_seed(0)  # two codes may be as near
    net = VqAutoencoder(3, 32, (1, 2), 1, attention, 6, 5, 11).eval()
    PublishedFile("last.ckpt", {"": net}, within="state_dict").write(Path("last.ckpt"))
    return net


@pytest.mark.parametrize("attention", [(), (1,)])
def test_vqgans_codes_come_and_go(attention, two_photos, tmp_path):
    net = codebook(attention)
    assert repr(gan.open("last.ckpt", "cpu").game.net) == repr(net)
    ways = ("photos", "codes", "codes"), ("codes", "pictures", "again"), ("photos", "painted again", "at once")
    for given, way, out in ways:
        assert sample.main(["last.ckpt", "--inputs", given, "--direction", way, "--out", out]) == 0
    codes = numpy.load(tmp_path / "codes" / "0.npy")
    assert codes.shape == (8, 12) and codes.dtype == numpy.int64 and codes.max() < 11
    for name in ("0.png", "1.png"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()


def test_what_are_no_codes_is_named(tmp_path):
    codebook()
    opened = gan.open("last.ckpt", "cpu")
    for content, said in (
        (None, "there are no maps of codes in"),
        (numpy.array([[-1, 11]]), "it has numbers from -1 to 11, and the codes are 0 to 10"),
        (numpy.array([0, 1]), "it is int64 [2] and not whole numbers [height, width]"),
        (numpy.array([[0.5]]), "it is float64 [1, 1] and not whole numbers"),
        (numpy.array([[{}]], object), "a.npy"),
    ):
        if content is not None:
            numpy.save(tmp_path / "a.npy", content)
        with pytest.raises(UserError, match=re.escape(said)):
            opened.translate(".", "out", direction="pictures")
    with pytest.raises(UserError, match="codes are not pictures of Pillow; give inputs= a path"):
        opened.translate(Image.new("RGB", (8, 8)), direction="codes")
    with pytest.raises(UserError, match="maps of codes have no size to change; leave largest= out"):
        opened.translate(".", "out", direction="pictures", largest=8)


def test_hifigan_is_heard(tmp_path):
    mel = Mel(8000, 8, 64, 16)
    generator = HifiGenerator(8, 16, (4, 4), (8, 8), (3,), ((1, 3),))
    judges = Judges(ScaleJudges(2, (4, 8), (4,), groups=4), PeriodJudges((2,), (4,)))
    for file in files(generator, judges, mel, 2e-4, 0.999, {}):
        file.write(tmp_path / file.name)
    numpy.save(tmp_path / "heard.npy", numpy.zeros((8, 20), numpy.float32))
    assert sample.main(["g_00000000", "--inputs", "heard.npy", "--out", "made"]) == 0
    wanted = Sound(generator(torch.zeros(1, 8, 20)).detach()[0], 8000).wav()
    assert (tmp_path / "made" / "heard.wav").read_bytes() == wanted
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json must lie beside it"):
        gan.open("g_00000000")


def test_other_networks_are_refused_by_what_differs(tmp_path):
    torch.save({"model.1.weight": torch.zeros(2, 3, 7, 7)}, tmp_path / "G.pth")
    with pytest.raises(UserError, match=r"G.pth has not the weights of a generator of pix2pix"):
        gan.open("G.pth")
    (file,) = latest_nets({"G": NETWORKS["resnet"]})
    state = NETWORKS["resnet"].state_dict() | {"model.30.extra": torch.zeros(2)}
    torch.save(state, tmp_path / file.name)
    with pytest.raises(UserError, match=r"but of other networks than are made here: model.30.extra is only there"):
        gan.open(file.name)
    with pytest.raises(UserError, match=r"nothing can be edited of .*, which translates"):
        file.write(tmp_path / file.name)
        gan.open(file.name).edit({})
