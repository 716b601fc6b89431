"""Each action, by the pixels and files it makes."""

import numpy as np
import pytest
import torch
from PIL import Image

from gan import noise
from gan.app.run.reopen import open_run
from gan.app.sampling import grids
from gan.app.sampling.painter import Painter
from gan.app.sampling.paintings import Paintings
from gan.app.sampling.shown import Shown
from gan.files.errors import UserError
from gan.sample import act as do
from gan.sample import main, parse
from tests.support import opening

CELL = 128 + grids.MARGIN


@pytest.fixture(scope="module")
def opened(shared_copy):
    return open_run(str(shared_copy))


@pytest.fixture
def act(opened):
    """Run an action by the words that are typed after the run; gives its files."""

    def act(*words):
        argv = [str(opened.folder.path), *map(str, words)]
        return do(Paintings(opened), parse(argv), argv)

    return act


def singles(folder):
    """The single pictures in a folder, as bytes by name."""
    return {path.stem: Image.open(path).convert("RGB") for path in folder.glob("*.png")}


def same(one, other):
    """Whether two pictures are the same, of Pillow or as a network makes them."""
    return bytes_of(one) == bytes_of(other)


def bytes_of(picture):
    return (picture if isinstance(picture, Image.Image) else grids.picture(picture)).tobytes()


def changed(one, other):
    """How much each pixel of two pictures differs, [H, W]."""
    return np.abs(np.asarray(one, np.int32) - np.asarray(other, np.int32)).sum(2)


def test_reconstruct_is_what_the_game_makes_of_each_picture(act, opened):
    grid, folder = act("reconstruct", "--count", 3, "--singles")
    made, painter, game = singles(folder), Painter(opened), opened.run.game
    assert sorted(made) == ["picture_0", "picture_1", "picture_2"]
    for number in range(3):
        picture = painter.picture(str(number))
        with noise.at(noise.Place(("sample", 0), 0, 1, 1)):
            expected = game.repaint(picture.image[None], game.mask(picture.label[None]))[0]
        assert same(made[f"picture_{number}"], expected)
    with Image.open(grid) as sheet:
        assert sheet.height == grids.TITLE + grids.MARGIN + 3 * CELL
        assert 3 * CELL < sheet.width <= 4 * CELL + 2 * grids.MARGIN


def test_repainting_changes_what_was_edited_and_paints_new_regions_in_the_mean(act, opened, tmp_path, capsys):
    (label,) = act("save-labels", "--picture", 0, "-o", tmp_path / "mine.png")
    assert "repaint takes it so, and --inputs with --largest 32" in capsys.readouterr().out
    painter = Painter(opened)
    picture = painter.picture("0")
    with Image.open(label) as image:
        assert 3 not in picture.regions and image.size == (512, 512)
        image.paste(3, (0, 0, 512, 128))  # a band of eye_g above
        image.save(label)
    _, folder = act("repaint", "--picture", 0, "--label", label, "--singles")
    again = Paintings(opened).repaint(0, Image.open(label)).singles["repainted"]
    edited = painter.picture(str(label))
    assert (edited.label[:8] == 3).all() and torch.equal(edited.label[8:], picture.label[8:])
    made, own = singles(folder)["repainted"], painter.styles(picture)
    wanted = painter.paint(edited, own.taking(painter.mean(), [3]))
    assert same(made, wanted) and same(again, wanted)
    difference = changed(made, grids.picture(painter.paint(picture, own)))
    assert difference[:8].mean() > 3 * difference[24:].mean()


def test_saved_styles_paint_the_same_picture_bit_for_bit(act, tmp_path, capsys):
    (path,) = act("save-styles", "--picture", 2, "-o", tmp_path / "two.pt")
    assert "hair" in capsys.readouterr().out
    _, direct = act("transfer", "--from", 2, "--to", 0, "--singles")
    _, loaded = act("transfer", "--from", path, "--to", 0, "--singles")
    assert same(singles(loaded)["0-in-two"], singles(direct)["0-in-2"])
    (path,) = act("save-styles", "--picture", 2)
    assert path.name == "styles-2.pt"
    _, folder = act("interpolate", "--between", path, 1, "--on", 0, "--frames", 2, "--singles")
    assert same(singles(folder)["0-000"], singles(direct)["0-in-2"])
    _, folder = act("repaint", "--picture", path, "--label", act("save-labels")[0], "--singles")  # its own map
    assert same(singles(folder)["repainted"], singles(direct)["0-in-2"])


def test_a_folder_of_label_maps_is_painted_in_styles_each_in_its_own_size(act, opened, tmp_path, capsys):
    painter, maps = Painter(opened), tmp_path / "maps"
    label = painter.picture("1").label
    (maps / "deep").mkdir(parents=True)
    Image.fromarray(label.byte().numpy()).save(maps / "one.png")  # numbers
    wide = Image.fromarray(grids.palette(painter.val.num_labels)[label].numpy()).resize((77, 40), 0)  # and colours
    wide.save(maps / "deep" / "two.png")
    Image.new("L", (9, 9), 200).save(maps / "wrong.png")
    Image.new("L", (9, 9), 200).save(maps / "no-map.jpg")
    out = tmp_path / "made"
    with pytest.raises(
        UserError, match=r"(?s)left out 1 of 3 label maps in .*wrong.png has the label 200; with 19 labels"
    ):
        act("translate", "--inputs", maps, "--from", 2, "-o", out)
    said = capsys.readouterr().out
    assert "each in the size of its label map; the run was trained on 32x32, see --largest" in said
    assert f"left out of {maps}: 1 .jpg; label maps are .png here" in said
    assert {str(path.relative_to(out)) for path in out.rglob("*.*")} == {"one.png", "deep/two.png"}
    _, folder = act("transfer", "--from", 2, "--to", 1, "--singles")
    with Image.open(out / "one.png") as one, Image.open(out / "deep" / "two.png") as two:
        assert same(one, singles(folder)["1-in-2"]) and two.size == (77, 40)
    (one,) = act("translate", "--inputs", maps / "deep" / "two.png", "--largest", 32, "-o", tmp_path / "small.png")
    assert Image.open(one).size == (32, 17), "in the mean styles"


def test_spade_paints_label_maps(tmp_path, capsys):
    run = opening.train(tmp_path / "runs", "spade-faces", faces=8, held_out=4, size=32, width=4, hidden=8)
    opened = open_run(str(run))
    label = opened.run.data.val[0]["label"]
    Image.fromarray(label.numpy().astype(np.uint8)).save(tmp_path / "map.png")
    assert main([str(run), "--inputs", str(tmp_path / "map.png"), "--out", str(tmp_path / "made.png")]) == 0
    made = opened.run.game.generator(opened.run.game.mask(label[None].long()))
    with Image.open(tmp_path / "made.png") as found:
        assert changed(found, grids.picture(made[0].detach())).max() < 9  # as noise of an untrained network does
        (again,) = Shown(opened).translate(Image.open(tmp_path / "map.png"))
        assert same(again, found)
    with pytest.raises(UserError, match=r"a picture of Pillow gives a sheet; leave x.png out, and call save\(\)"):
        Shown(opened).translate(Image.open(tmp_path / "map.png"), "x.png")
    for name in ("maps.zip", "bad.png"):
        (tmp_path / name).write_bytes(b"")
    capsys.readouterr()
    for typed, said in (
        (["save-labels"], f"The editor saves label maps: python -m gan.edit {run}"),
        (["draw"], "neither draws from noise nor has styles, so there is no 'draw'; type show, translate"),
        (["transfer"], "neither draws from noise nor has styles, so there is no 'transfer'; type show, translate"),
        (["--inputs", "map.png", "--direction", "AtoB"], "label maps have no direction; leave --direction out"),
        (["--inputs", "nowhere"], "there is no folder nowhere; type --inputs"),
        (["--inputs", str(tmp_path / "maps.zip"), "-o", str(tmp_path / "new" / "made")], "there are no label maps in "),
        (["--inputs", str(tmp_path / "bad.png"), "-o", str(tmp_path / "new" / "made")], "no label map in "),
    ):
        assert main([str(run), *typed]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "new").exists()
