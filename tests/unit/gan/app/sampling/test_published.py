"""Published files without a run: which network they hold is read off the weights, and `gan.sample` uses it."""

import re
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

import gan
from gan import sample
from gan.files.errors import UserError
from gan.sound import Sound
from nets.hifigan import HifiGenerator, Judges, PeriodJudges, ScaleJudges
from nets.mel import Mel
from nets.published.files import PublishedFile, latest_nets
from nets.published.hifigan import files
from nets.resnet import ResnetGenerator, UNet
from nets.vqgan import VqAutoencoder
from tests.unit.gan.runs.test_pictures import put

NETWORKS = {
    "resnet": ResnetGenerator(3, 1, 4, 2),
    "resnet of batch norms": ResnetGenerator(1, 3, 2, 1, norm="batch"),
    "resnet with dropout": ResnetGenerator(3, 3, 2, 3, dropout=True),
    "resnet of batch norms with dropout": ResnetGenerator(3, 3, 2, 1, norm="batch", dropout=True),
    "cut": ResnetGenerator(3, 3, 2, 1, smooth=True),
    "unet": UNet(3, 1, 2, 3),
    "unet of instance norms": UNet(1, 3, 2, 7, norm="instance"),
}


@pytest.fixture(autouse=True)
def photos(here):
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


def test_each_picture_of_a_folder_is_translated(tmp_path, capsys):
    latest_nets({"G": NETWORKS["cut"]})[0].write(tmp_path / "latest_net_G.pth")
    assert sample.main(["latest_net_G.pth", "--inputs", "photos", "--out", "painted", "--largest", "12"]) == 0
    assert capsys.readouterr().out.splitlines() == ["latest_net_G.pth", "direction as trained", "  painted"]
    assert sorted(path.name for path in (tmp_path / "painted").iterdir()) == ["0.png", "1.png"]
    opened = gan.open("latest_net_G.pth", "cpu")
    (out,) = opened.translate("photos")
    assert repr(opened) == "<Shown of latest_net_G.pth>"
    with pytest.raises(UserError, match="inputs= takes a path or a picture of Pillow, and not Tensor"):
        opened.translate(torch.zeros(3, 8, 8))
    with Image.open(tmp_path / "photos" / "0.png") as picture:
        (made,) = opened.translate(picture)
    with Image.open(out / "0.png") as written:
        assert made.tobytes() == written.tobytes()
    assert str(out) == "latest_net_G-translated-photos"


def codebook(attention=()):
    torch.manual_seed(0)  # two codes may be as near
    net = VqAutoencoder(3, 32, (1, 2), 1, attention, 6, 5, 11).eval()
    PublishedFile("last.ckpt", {"": net}, within="state_dict").write(Path("last.ckpt"))
    return net


@pytest.mark.parametrize("attention", [(), (1,)])
def test_vqgans_codes_come_and_go(attention, tmp_path):
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
    for content, said in (
        (None, "there are no maps of codes in"),
        (numpy.array([[0, 11]]), "it has numbers from 0 to 11, and the codes are 0 to 10"),
        (numpy.array([[-1, 0]]), "it has numbers from -1 to 0"),
        (numpy.array([0, 1]), "it is int64 [2] and not whole numbers [height, width]"),
        (numpy.array([[0.5]]), "it is float64 [1, 1] and not whole numbers"),
        (numpy.array([[{}]], object), "a.npy"),
    ):
        if content is not None:
            numpy.save(tmp_path / "a.npy", content)
        with pytest.raises(UserError, match=re.escape(said)):
            gan.open("last.ckpt", "cpu").translate(".", "out", direction="pictures")
    with pytest.raises(UserError, match="codes are not pictures of Pillow; give inputs= a path"):
        gan.open("last.ckpt", "cpu").translate(Image.new("RGB", (8, 8)), direction="codes")
    with pytest.raises(UserError, match="maps of codes have no size to change; leave largest= out"):
        gan.open("last.ckpt", "cpu").translate(".", "out", direction="pictures", largest=8)


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


@pytest.mark.parametrize(
    "words, message",
    [
        (["--seeds", "0-3"], "--seeds does nothing"),
        (["show"], "there is no 'show'; type translate"),
        ([], "say which pictures: --inputs"),
        (["--inputs", "photos", "--direction", "BtoA"], "has no direction BtoA; known: as trained"),
    ],
)
def test_what_a_file_cannot_do_is_said(words, message, tmp_path, capsys):
    latest_nets({"G": NETWORKS["unet"]})[0].write(tmp_path / "G.pth")
    assert sample.main(["G.pth", *words]) == 2
    assert message in capsys.readouterr().err


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
