"""Each action, by the pixels and files it makes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from gan import noise
from gan.app.run.reopen import open_run
from gan.app.sampling import grids
from gan.app.sampling.painter import Painter, Styles
from gan.app.sampling.paintings import Paintings, _head
from gan.app.sampling.shown import Shown
from gan.files.errors import UserError
from gan.sample import act as do
from gan.sample import main, parse
from tests.support import opening

HAIR, HAT = 13, 14
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
    return one.tobytes() == other.tobytes()


def as_saved(picture):
    return grids.picture(picture)


def changed(one, other):
    """How much each pixel of two pictures differs, [H, W]."""
    return np.abs(np.asarray(one, np.int32) - np.asarray(other, np.int32)).sum(2)


def test_reconstruct_is_what_the_game_makes_of_each_picture(act, opened):
    grid, folder = act("reconstruct", "--count", 3, "--singles")
    made = singles(folder)
    assert sorted(made) == ["picture_0", "picture_1", "picture_2"]
    painter = Painter(opened)
    for number in range(3):
        picture = painter.picture(str(number))
        game = opened.run.game
        with noise.at(noise.Place(("sample", 0), 0, 1, 1)):
            expected = game.repaint(picture.image[None], game.mask(picture.label[None]))[0]
        assert same(made[f"picture_{number}"], as_saved(expected))
    with Image.open(grid) as sheet:
        assert sheet.height == grids.TITLE + grids.MARGIN + 3 * CELL
        assert 3 * CELL < sheet.width <= 4 * CELL + 2 * grids.MARGIN


def test_transfer_paints_each_picture_in_each_style(act, opened):
    grid, folder = act("transfer", "--from", 2, 3, "--to", 0, 2, "--missing", "zero", "--singles")
    assert grid.name == "transfer-from-2-3-to-0-2.png"
    made, painter = singles(folder), Painter(opened)
    assert set(made) == {"0-in-2", "0-in-3", "2-in-2", "2-in-3"}
    expected = painter.paint(painter.picture("0"), painter.styles(painter.picture("3")))
    assert same(made["0-in-3"], as_saved(expected))
    with Image.open(grid) as sheet:
        assert sheet.height == grids.TITLE + grids.MARGIN + 3 * CELL
    grid, folder = act("reconstruct", "--picture", 2, "train:5", "--singles")
    assert grid.name == "reconstruct-2-train_5.png" and set(singles(folder)) == {"picture_2", "train_5"}
    assert same(made["2-in-2"], singles(folder)["picture_2"])  # onto itself it is the reconstruction


def test_transfer_of_a_region_moves_its_code_alone(act, opened):
    grid, folder = act("transfer", "--from", 2, "--to", 0, "--region", "hair", "--singles")
    assert grid.name == "transfer-from-2-to-0-region-hair.png"  # with a number it is no picture of --to
    painter = Painter(opened)
    target = painter.picture("0")
    own, other = painter.styles(target), painter.styles(painter.picture("2"))
    codes = own.codes.clone()
    codes[HAIR] = other.codes[HAIR]
    mixed = Styles(codes, own.present, own.label_names, "")
    made = singles(folder)["0-in-2"]
    assert same(made, as_saved(painter.paint(target, mixed)))
    assert not same(made, as_saved(painter.paint(target, own)))


def test_interpolation_ends_at_the_two(act):
    _, folder = act("interpolate", "--between", 2, 3, "--on", 0, "--frames", 5, "--missing", "own", "--singles")
    frames = singles(folder)
    assert sorted(frames) == [f"0-{number:03d}" for number in range(5)]
    for number, end in ((0, 2), (4, 3)):
        _, folder = act("transfer", "--from", end, "--to", 0, "--missing", "own", "--singles")
        assert same(frames[f"0-{number:03d}"], singles(folder)[f"0-in-{end}"])


PAINTED = ["labels", "picture"]


@pytest.mark.parametrize(
    ("words", "columns", "rows"),
    [
        ("reconstruct --picture 1 train:2", ["labels", "picture", "output"], ["picture 1", "train 2"]),
        ("transfer --from 2 mean --to 0", [*PAINTED, "styles of picture 2", "styles of mean"], ["", "picture 0"]),
        ("transfer --from 2 --to 0 --region hair 1", [*PAINTED, "hair, skin of picture 2"], ["", "picture 0"]),
        (
            "interpolate --frames 3",
            ["styles of picture 0", "0 %", "50 %", "100 %", "styles of picture 1"],
            ["picture 0"],
        ),
        ("interpolate --between mean 1 --on 2 --frames 2", ["0 %", "100 %", "styles of picture 1"], ["picture 2"]),
    ],
)  # fmt: skip
def test_columns_and_rows_have_titles(words, columns, rows, act, monkeypatch):
    drawn, grid = [], grids.grid
    monkeypatch.setattr(grids, "grid", lambda *given: drawn.append(given) or grid(*given))
    act(*words.split())
    ((cells, lines, titles),) = drawn
    assert (list(cells), list(titles), lines) == (columns, rows, len(rows))


def test_a_region_without_a_name_is_called_a_region(opened):
    painter, source = Painter(opened), SimpleNamespace(title="3")
    painter.label_names = [str(number) for number in range(len(painter.label_names))]
    assert _head(painter, [2], source) == "region 2 of picture 3"
    assert _head(painter, None, SimpleNamespace(title="me")) == "styles of me"


def test_repainting_changes_what_was_edited_and_paints_new_regions_in_the_mean(act, opened, tmp_path, capsys):
    (label,) = act("save-labels", "--picture", 0, "-o", tmp_path / "mine.png")
    assert "repaint takes it so, and --inputs with --largest 32" in capsys.readouterr().out
    painter = Painter(opened)
    picture = painter.picture("0")
    assert 3 not in picture.regions
    with Image.open(label) as image:
        assert image.size == (512, 512)
        image.paste(3, (0, 0, 512, 128))  # a band of eye_g above
        image.save(label)
    _, folder = act("repaint", "--picture", 0, "--label", label, "--singles")
    with Image.open(label) as image:
        again = Paintings(opened).repaint(0, image).singles["repainted"]
    edited = painter.picture(str(label))
    assert (edited.label[:8] == 3).all() and torch.equal(edited.label[8:], picture.label[8:])
    styles = painter.styles(picture).taking(painter.mean(), [3])
    made = singles(folder)["repainted"]
    assert same(made, as_saved(painter.paint(edited, styles))) and same(made, as_saved(again))
    difference = changed(made, as_saved(painter.paint(picture, painter.styles(picture))))
    assert difference[:8].mean() > 3 * difference[24:].mean()


def test_mean_styles_are_kept_saved_and_painted(act, opened, capsys):
    (saved,) = act("save-styles", "--picture", "mean", "--mean-of", 4)
    assert "the mean of 4 training pictures of " in capsys.readouterr().out and saved.name == "styles-mean.pt"
    painter = Painter(opened)
    mean = Styles.load(next((opened.folder.path / "styles").glob("mean-of-4-*.pt")))
    assert torch.equal(mean.codes, painter.mean(4).codes) and torch.equal(mean.codes, Styles.load(saved).codes)
    _, folder = act("transfer", "--from", "mean", "--to", 1, "--mean-of", 4, "--singles")
    assert same(singles(folder)["1-in-mean"], as_saved(painter.paint(painter.picture("1"), mean)))


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
        assert changed(found, as_saved(made[0].detach())).max() < 9  # as much as noise of an untrained network does
        (same,) = Shown(opened).translate(Image.open(tmp_path / "map.png"))
        assert same.tobytes() == found.tobytes()
    assert main([str(run), "--inputs", str(tmp_path / "map.png"), "--direction", "AtoB"]) == 2
    assert "label maps have no direction; leave --direction out" in capsys.readouterr().err
    assert main([str(run), "save-labels"]) == 2
    assert f"The editor saves label maps: python -m gan.edit {run}" in capsys.readouterr().err
    for name in ("maps.zip", "bad.png"):
        (tmp_path / name).write_bytes(b"")
    for inputs, said in (
        ("nowhere", "there is no folder nowhere; type --inputs"),
        ("maps.zip", "there are no label maps in "),
        ("bad.png", "no label map in "),
    ):
        path = tmp_path / inputs if "." in inputs else inputs
        assert main([str(run), "--inputs", str(path), "--out", str(tmp_path / "new" / "made")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "new").exists()
    with pytest.raises(UserError, match=r"a picture of Pillow gives a sheet; leave x.png out, and call save\(\)"):
        Shown(opened).translate(Image.open(tmp_path / "map.png"), "x.png")


def test_other_games_show_the_grid_that_training_draws(tmp_path):
    small = dict(size=16, width=4, blocks=1, pool=4, faces=4, held_out=4)
    run = opening.train(tmp_path / "runs", "cyclegan-faces", max_steps=1, **small)
    assert main([str(run), "show", "--singles"]) == 0
    with Image.open(run / "samples" / "step-000001.png") as drawn, Image.open(run / "samples" / "show.png") as ours:
        assert same(ours, drawn)
        assert ours.width == grids.MARGIN + 8 * CELL
    assert len(list((run / "samples" / "show").glob("*.png"))) == 16
