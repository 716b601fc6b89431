"""What a run made, as tables."""

import shutil

import pytest
import torch
from PIL import Image

from gan.app.page import run_tables, style_tables
from gan.app.page.table import Table
from gan.app.painting import grids
from gan.app.painting.painter import Painter
from gan.app.painting.reopen import open_run
from gan.app.training import metrics
from gan.sound import Sound
from tests.support import layouts, opening
from tests.support.tables import picture_of, row


@pytest.fixture(scope="module")
def run(sean_run):
    return open_run(str(sean_run))


def words(table) -> dict[str, str]:
    return {row.title: row.cells[0].words for row in table.rows}


def test_facts_say_what_the_run_is(run):
    known = words(run_tables.facts(run))
    assert known["run"].startswith("001-sean-faces: SEAN on drawn faces")
    assert known["trained"] == "2 of 2 steps, 4 pictures a step"
    assert known["pictures"] == "16 to train on, 4 held out, 32 x 32 pixels"
    encoder = sum(weight.numel() for weight in run.run.game.encoder.parameters())
    assert f"encoder {encoder:,}" in known["parameters"]
    assert known["opened"] == "step-000002.ckpt"


def test_scores_are_the_first_and_the_last(run, sean_run):
    rows = metrics.read(sean_run / "metrics.csv").values()
    told = run_tables.scores(run)
    for (name, what), line in zip(run.run.scores.items(), told, strict=True):
        values = [values[name] for values in rows if name in values]
        assert line == f"{what}: {values[0]:.3g} at first, {values[-1]:.3g} now"
        assert line in words(run_tables.facts(run))["scores"]


def test_settings_are_those_of_the_file(run):
    known = words(run_tables.settings(run))
    assert known["run"] == "sean-faces" and known["held_out"] == "4" and known["save_every"] == "2"


def test_a_chart_a_phase(run):
    charts = run_tables.curves(run)
    assert list(charts.drawings) == ["discriminator", "generator", "held-out scores", "gradient norms"]
    assert all("</svg>" in drawing for drawing in charts.drawings.values())


def test_a_run_that_has_logged_and_drawn_nothing_is_said(sean_run, tmp_path):
    bare = tmp_path / "001-sean-faces"
    shutil.copytree(sean_run, bare, ignore=shutil.ignore_patterns("samples", "metrics.csv"))
    run = open_run(str(bare))
    assert run_tables.over_time(run).note == "This run has drawn no grids yet."
    assert run_tables.curves(run).note == "This run has logged nothing yet."
    assert run_tables.scores(run) == [] and words(run_tables.facts(run))["scores"] == "none yet"


def test_grids_over_time_are_those_that_training_drew(run):
    table = run_tables.over_time(run)
    assert table.moments == ["step 0", "step 1", "step 2"]
    assert list(table.columns) == [f"picture {number}" for number in range(4)]
    shown = run.run.game.show(run_tables.held_out(run, 8))
    assert [row.title for row in table.rows] == list(shown)
    for number in range(4):
        for title in ("shape", "style", "truth", "its truth"):
            (still,) = row(table, title)[number].pictures
            assert still.tobytes() == picture_of(shown[title][number])
    for title in ("output", "one region"):
        assert all(len(cell.pictures) == 3 for cell in row(table, title))


def test_a_long_run_shows_some_of_its_steps(sean_run, tmp_path):
    long = tmp_path / "001-sean-faces"
    shutil.copytree(sean_run, long)
    for step in range(3, 2000, 7):
        shutil.copy(long / "samples" / "step-000002.png", long / "samples" / f"step-{step:06d}.png")
    shutil.copy(long / "samples" / "step-000002.png", long / "samples" / "step-1000000.png")
    moments = run_tables.over_time(open_run(str(long)), most=5).moments
    assert len(moments) == 5 and moments[0] == "step 0" and moments[-1] == "step 1,000,000"


def test_grids_of_another_shape_are_shown_whole(sean_run, tmp_path):
    other = tmp_path / "001-sean-faces"
    shutil.copytree(sean_run, other)
    sheet = Image.new("RGB", (333, 222), "red")
    for path in other.glob("samples/step-*.png"):
        sheet.save(path)
    (only,) = run_tables.over_time(open_run(str(other))).rows
    assert [picture.tobytes() for picture in only.cells[0].pictures] == [sheet.tobytes()] * 3


@pytest.mark.parametrize("size", [(16, 16), (32, 48), (130, 200)])
def test_cutting_undoes_a_grid(size):
    width, height = size
    images = torch.rand(2, 3, 3, height, width) * 2 - 1
    sheet = grids.grid({"one": images[0], "two": images[1]})
    cut = run_tables._cut(sheet, 2, size)
    for column, batch in zip(cut, images, strict=True):
        assert [cell.tobytes() for cell in column] == [picture_of(sample) for sample in batch]
    assert run_tables._cut(sheet, 3, size) == []


def test_masks_lie_beside_pictures_and_what_is_painted_of_them(run):
    table, batch, painter = run_tables.masks(run, 3), run_tables.held_out(run, 3), Painter(run)
    for number in range(3):
        (mask,) = row(table, "mask")[number].pictures
        (anew,) = row(table, "painted anew")[number].pictures
        picture = painter.picture(str(number))
        assert mask.tobytes() == picture_of(batch["label"][number])
        assert anew.tobytes() == picture_of(painter.paint(picture, painter.styles(picture)))


def test_the_legend_has_the_colours_of_the_masks(run):
    (mask,) = row(run_tables.masks(run, 1), "mask")[0].pictures
    seen = {colour: count for count, colour in mask.getcolors()}
    legend = run_tables.legend(run, 1).rows
    assert {row.swatch for row in legend} == set(seen)
    assert all(row.cells[0].words == f"{seen[row.swatch] / 32**2:.1%}" for row in legend)


def test_a_copy_of_a_training_picture_is_found(sean_run):
    run = open_run(str(sean_run))
    table = run_tables.nearest(run, count=3)
    assert "nothing points to copies" in table.note and "16 of 16" in table.note
    assert [row.title for row in table.rows] == ["made", "nearest 1", "nearest 2", "nearest 3"]

    # A game that has memorised three training pictures.
    learned = torch.stack([run.run.data.train[index]["image"] for index in (5, 2, 11)]) / 127.5 - 1
    run.run.game.show = lambda batch: {"shape": batch["label"], "output": learned}
    table = run_tables.nearest(run, count=3)
    assert [cell.words for cell in row(table, "nearest 1")] == ["no. 5: 0.0%", "no. 2: 0.0%", "no. 11: 0.0%"]
    assert "look whether it is a copy" in table.note
    assert row(table, "nearest 1")[2].pictures[0].tobytes() == row(table, "made")[2].pictures[0].tobytes()


def test_nearest_looks_at_some_of_many(run):
    assert "among 5 of 16" in run_tables.nearest(run, among=5).note
    assert len(run_tables.nearest(run, among=2).rows) == 3


def test_nearest_passes_over_maps_that_the_game_made(run, monkeypatch):
    """VQGAN shows a map of its codes."""
    show = run.run.game.show
    wanted = run_tables.nearest(run)
    monkeypatch.setattr(run.run.game, "show", lambda batch: {"codes": batch["label"].clone(), **show(batch)})
    assert run_tables.nearest(run).note == wanted.note


def test_nearest_says_where_no_pictures_are_made(run, monkeypatch):
    """Of a game that shows sounds only, or nothing."""
    for shows in ({"heard": Sound(torch.zeros(1, 8000), 8000)}, {}):
        monkeypatch.setattr(run.run.game, "show", lambda batch, shows=shows: shows)
        assert run_tables.nearest(run) == Table(note=run_tables.NO_PICTURES)


def test_looking_changes_no_random_state(run):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run_tables.over_time(run), run_tables.masks(run), run_tables.nearest(run)
    style_tables.exchange(run, 0, [1], most=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_edges_of_instances_are_shown_beside_masks(tmp_path):
    layouts.cityscapes(tmp_path / "data")
    settings = {"data": tmp_path / "data", "size": 32, "upsamplings": 2, "workers": 0, "perceptual": "off"}
    widths = {"width": 4, "hidden": 8, "style": 8, "batch-size": 2}
    run = open_run(str(opening.train(tmp_path / "runs", "sean-cityscapes", **settings, **widths)))
    table, batch = run_tables.masks(run), run_tables.held_out(run, 8)
    assert [each.title for each in table.rows] == ["picture", "mask", "edges", "painted anew"]
    for cell, edges in zip(row(table, "edges"), batch["edges"], strict=True):
        (picture,) = cell.pictures
        assert picture.size == (64, 32)
        dark = torch.tensor(list(picture.convert("L").tobytes())).view(32, 64) == 0
        assert torch.equal(dark, edges.bool())
    assert len(style_tables.exchange(run).columns) == len(run.run.data.val)
    assert run_tables.nearest(run).rows and run_tables.over_time(run).moments


def test_spade_paints_masks_without_styles(tmp_path):
    run = open_run(str(opening.train(tmp_path, "spade-faces", faces=8, held_out=4, size=32, width=4, hidden=8)))
    assert [each.title for each in run_tables.masks(run).rows] == ["picture", "mask", "output"]
    assert style_tables.exchange(run).note == style_tables.edit(run).note == style_tables.NO_STYLES
