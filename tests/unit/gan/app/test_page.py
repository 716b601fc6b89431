"""The tables of a run's page."""

import base64
import errno
import json
import re
import shutil
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from gan.app.page import compared, run_tables
from gan.app.page.table import Cell, Charts, Row, Table, encode, spread, write
from gan.app.run.folder import RunFolder
from gan.app.run.reopen import open_run
from gan.app.sampling import grids
from gan.app.sampling.painter import Painter
from gan.app.scoring.names import TRAINED_ON
from gan.app.training import card, metrics
from gan.files.errors import UserError
from gan.sound import Sound
from tests.support import opening

# ---- table ----


RED, BLUE = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))


def decoded(uri: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(uri.partition(",")[2])))


def noise(size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8))


def row(table: Table, title: str) -> list[Cell]:
    (found,) = (row for row in table.rows if row.title == title)
    return found.cells


def picture_of(sample) -> bytes:
    """The bytes of a sample, as a cell shows it."""
    return grids.picture(sample).tobytes()


MOVING = [Row("output", [Cell(pictures=(RED, BLUE))])]
EYES = [Row("eyes", [Cell(pictures=(RED,)), Cell("has none")], (1, 2, 3))]


def test_a_page_for_which_there_is_no_space_is_refused_by_name(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    message = "cannot write '.*c.html': No space left on device; choose a place with -o"
    with mock.patch("pathlib.Path.write_text", side_effect=full), pytest.raises(UserError, match=message):
        write(tmp_path / "c.html", str, "-o")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        (Table(["one", "two"], EYES), ['<th scope="col">one</th>', '<th scope="col">two</th>']),
        (Table(["one", "two"], EYES), ['<span class="swatch" style="background:rgb(1, 2, 3)"></span>eyes</div></th>']),
        (Table(["one", "two"], EYES), ['width="4" height="4" alt="eyes, one">', '<td class="words">has none</td>']),
        (Table(["one"], [Row("near", [Cell("no. 3", (RED,))])]), ['alt="near, one: no. 3"', "<small>no. 3</small>"]),
        (Table(note="nothing"), ['<div class="table"><p class="note">nothing</p></div>']),
        (Table(rows=[Row("size", [Cell("64")])]), ['class="table plain"']),
        (Table(rows=[Row("hair", [Cell("3%")], (0, 0, 0))]), ['class="table plain legend"']),
        (Table(["x"], [Row("hair", [Cell(pictures=(RED,))])]), ['class="table"']),
        # Only the last moment is shown.
        (Table(["x"], MOVING, moments=["step 0", "step 9"]), ['alt="output, x, step 0" hidden', '<td class="moving">']),
        (Table(["x"], MOVING, moments=["step 0", "step 9"]), ['alt="output, x, step 9">']),
        (Charts({"losses": b"<svg/>"}, "pale"), ['alt="curves of losses over the steps"', ">pale<", "base64,PHN2Zy8+"]),
    ],
)
def test_a_table_has_headings_and_pictures_say_where_they_are(table, parts):
    assert [part for part in parts if part not in table.html()] == []
    assert table.html() in table._repr_html_() or table.moments


def test_what_is_not_ours_is_escaped():
    table = Table(["<a>"], [Row("<b>", [Cell('<c> "', (RED,))])], "<d>")
    html = table.html()
    assert not re.search(r"<[abcd]>", html)
    assert 'alt="&lt;b&gt;, &lt;a&gt;: &lt;c&gt; &quot;"' in html
    assert "&lt;e&gt;" in Charts({"<e>": b"<svg/>"}).html()


def test_unrolled_has_a_row_a_moment_and_leaves_still_rows_alone():
    moving = Cell(pictures=(RED, RED, RED, BLUE))
    table = Table(["x"], [Row("shape", [Cell(pictures=(RED,))]), Row("output", [moving])], "note", list("abcd"))
    rows = table.unrolled(most=2).rows
    assert [row.title for row in rows] == ["shape", "output, a", "output, d"]
    assert [row.cells[0].pictures for row in rows] == [(RED,), (RED,), (BLUE,)]
    assert table.unrolled().html() in table._repr_html_()
    assert not table.unrolled().moments


@pytest.mark.parametrize(
    "length, most, numbers",
    [(0, 3, []), (1, 3, [0]), (3, 3, [0, 1, 2]), (10, 4, [0, 3, 6, 9]), (5, 2, [0, 4]), (5, 1, [4]), (5, 0, [])],
)
def test_spread_has_the_first_and_the_last(length, most, numbers):
    assert spread(length, most) == numbers


def test_large_pictures_are_packed_and_small_ones_and_masks_are_exact():
    large = noise(256).resize((200, 200), Image.Resampling.BICUBIC)
    assert encode(large).startswith("data:image/webp;")
    off = np.abs(np.array(decoded(encode(large)), int) - np.array(large)).mean()
    assert 0 < off < 30
    for exact in (noise(96), RED.resize((300, 300))):
        assert np.array_equal(np.array(decoded(encode(exact)).convert("RGB")), np.array(exact))
    for picture, kind in ((noise(96), True), (large, False)):
        assert ('class="exact"' in Table(["x"], [Row("y", [Cell(pictures=(picture,))])]).html()) == kind


# ---- style tables ----


@pytest.fixture(scope="module")
def run(sean_run):
    return open_run(str(sean_run))


@pytest.fixture(scope="module")
def lively(sean_run):
    """The run with changed weights: after two steps styles make hardly a difference yet."""
    opened = open_run(str(sean_run))
    dice = torch.Generator().manual_seed(0)
    for name, weight in opened.run.game.generator.named_parameters():
        if "style" in name or "region" in name:
            weight += 0.3 * torch.randn(weight.shape, generator=dice)
    return opened


def moved(one: Image.Image, other: Image.Image) -> torch.Tensor:
    """Which pixels differ, [H, W]."""
    bytes_of = lambda image: torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)  # noqa: E731
    return (bytes_of(one) != bytes_of(other)).view(one.height, one.width, 3).any(2)


def test_one_region_at_a_time_is_exchanged(lively):
    table = run_tables.exchange(lively, 0, [1, 2])
    assert list(table.columns) == ["picture 0", "style of picture 1", "style of picture 2"]
    painter = Painter(lively)
    own, theirs = (painter.styles(painter.picture(number)) for number in "01")
    given = 0
    for each in table.rows[1:-1]:
        region = painter.label_names.index(each.title)
        if not theirs.present[region]:
            assert each.cells[1].words == "has none"
            continue
        made = painter.paint(painter.picture("0"), own.taking(theirs, [region]))
        assert each.cells[1].pictures[0].tobytes() == picture_of(made)
        given += 1
    assert given > 3


def test_regions_of_a_picture_come_by_size_and_where_they_lie_is_shown(run):
    table, item = run_tables.exchange(run, 2, [1]), run_tables.held_out(run, 3)
    label, names = item["label"][2], run.run.data.val.label_names
    regions = [names.index(each.title) for each in table.rows[1:-1]]
    assert [each.swatch for each in table.rows[1:-1]] == list(map(grids.colour, regions))
    areas = label.flatten().bincount()[regions].tolist()
    assert areas == sorted(areas, reverse=True) and len(areas) > 3
    (spot,) = table.rows[1].cells[0].pictures
    change = moved(spot, grids.picture(item["image"][2]))
    assert not change[label == regions[0]].any() and change[label != regions[0]].float().mean() > 0.9


# ---- run tables ----


def words(table) -> dict[str, str]:
    return {row.title: row.cells[0].words for row in table.rows}


def test_facts_say_what_the_run_is(run):
    known = words(run_tables.facts(run))
    assert known["run"].startswith("001-sean-faces: SEAN on drawn faces")
    assert known["trained"] == "2 of 2 steps, 4 pictures a step"
    assert known["pictures"] == "16 to train on, 4 held out, 32 x 32 pixels"
    encoder = sum(weight.numel() for weight in run.run.game.encoder.parameters())
    assert f"encoder {encoder:,}" in known["parameters"]
    assert known["opened"] == "step-000002.ckpt" and "begun from" not in known
    begun = replace(run, settings={**run.settings, "from_": "their/net.pkl", "freeze_d": 4})
    assert words(run_tables.facts(begun))["begun from"].startswith("net.pkl, freeze-d 4; the data of that file")


def test_facts_count_the_pictures_up_to_the_checkpoint_while_a_run_trains_on(run, copy):
    there = RunFolder(copy)
    there.metrics.write_text("step,seconds,pictures\n2,60,8000\n3,600,80000\n")
    assert words(run_tables.facts(replace(run, folder=there)))["time"] == "8 kimg in 01:00"


def test_scores_are_the_first_and_the_last_and_settings_those_of_the_file(run, sean_run, copy):
    rows, told = metrics.read(sean_run / "metrics.csv").values(), words(run_tables.facts(run))["scores"]
    for name, what in run.run.scores.items():
        values = [values[name] for values in rows if name in values]
        assert f"{what}: {values[-1]:.4g} (step 2; on 4 held-out samples; {values[0]:.4g} at first; lower" in told
    assert words(run_tables.facts(replace(run, step=0)))["scores"] != "none yet"  # of the untrained networks
    (copy / "metrics.csv").write_text("step,val/transfer_error\n0,0.5\n")
    (copy / "scores.json").write_text(json.dumps({"step": 0, "scores": {"score/fid": 9.0}, "how": {}}))
    assert words(run_tables.facts(open_run(str(copy))))["scores"] == "none yet"
    known = words(run_tables.settings(run))
    assert known["run"] == "sean-faces" and known["held_out"] == "4" and known["save_every"] == "2"


def test_a_chart_a_phase_and_health_has_one_of_its_own(copy, curves):
    head, *rows = (copy / "metrics.csv").read_text().splitlines()
    more = [f"{head},health/told_apart\n", *(f"{row},0.7\n" for row in rows)]
    (copy / "metrics.csv").write_text("".join(more))
    run = open_run(str(copy))
    health = run_tables.health(run)
    assert list(health.drawings) == ["health"] and health.note == f"told_apart: {run_tables.WELL['told_apart']}"
    charts = run_tables.curves(run)
    wanted = "discriminator, generator, learning rates, gradient norms, held-out scores"
    assert ", ".join(charts.drawings) == wanted
    assert all(b"</svg>" in drawing for drawing in charts.drawings.values())


def test_curves_and_grids_of_an_earlier_checkpoint_end_at_its_step(run, monkeypatch):
    for each in (compared, run_tables):
        monkeypatch.setattr(each, "charts", lambda panels, *_: panels)
    early = replace(run, step=1)
    alone, beside = run_tables.curves(early), compared.curves([run, early], ["late", "early"])
    assert {points[-1][0] for panel in alone.values() for points in panel.values()} == {1}
    ends = {(panel["late"][-1][0], panel["early"][-1][0]) for panel in beside.values()}
    assert ends == {(2, 1)}
    assert run_tables.over_time(early).moments == ["step 0", "step 1"]
    monkeypatch.setattr(RunFolder, "steps", lambda _: [1])  # now it is the newest one
    assert {points[-1][0] for panel in run_tables.curves(early).values() for points in panel.values()} == {2}


def test_every_score_says_how_it_was_computed(copy):
    how = {"network": "Inception", "flips": False, "true": TRAINED_ON}
    found = {"score/fid": 12.345678, "score/output: kid": 0.5}
    (copy / "scores.json").write_text(json.dumps({"step": 2, "scores": found, "how": how}))
    about = {"ssim": {"window": "gaussian"}, "features": {"network": "VGG-19"}}
    figures = {"output": {"ssim": 0.25, "rmse": "nan", "recall": 0.75, "unknown": 3}}
    evaluated = {"step": 2, "pictures": 4, "scores": figures, "about": about}
    (copy / "evaluation-step-000002.json").write_text(json.dumps(evaluated))
    rows = {row.title: [cell.words for cell in row.cells] for row in compared.scores([open_run(str(copy))], [""]).rows}
    how = f"step 2; network Inception; flips no; true {TRAINED_ON}"
    assert rows["FID, against training pictures"] == ["12.35", how]
    assert rows["output: kid"] == ["0.5", "the same"]
    assert rows["SSIM, data range 1"] == ["0.25", "gan.evaluate, step 2, 4 samples; window gaussian"]
    assert rows["recall, share of what is real that is made, against held-out pictures"][1].endswith("network VGG-19")
    fewer = {"step": 2, "pictures": 3, "scores": {"output": {"ssim": 0.5, "psnr": 20.0, "recall": 0.5}}, "about": {}}
    more = {**fewer, "pictures": 5, "scores": {"output": {"recall": 0.25}}}
    other = {**more, "pictures": 9, "step": 21, "scores": {"output": {"ssim": 1.0}}}
    tested = {**more, "pictures": 7, "scores": {"output": {"ssim": 0.75}}, "settings": {"data": "to/testset"}}
    for name, said in (("2-1", fewer), ("2-2", more), ("2-3", more), ("2-4", tested), ("21", other)):
        (copy / f"evaluation-step-00000{name}.json").write_text(json.dumps(said))
    scores = card.scores(RunFolder(copy), open_run(str(copy)).run, 2)
    found = {each.name: (each.value, each.pictures) for each in scores}
    assert found["SSIM, data range 1"] == ("0.25", 4) and found["SSIM, data range 1, on testset"] == ("0.75", 7)
    assert found["PSNR, dB"] == ("20", 3)
    assert found["recall, share of what is real that is made, against held-out pictures"] == ("0.25", 5)
    rows = metrics.read(copy / "metrics.csv")
    head, *lines = (copy / "metrics.csv").read_text().splitlines()
    (copy / "metrics.csv").write_text("".join([f"{head},score/fid\n", *(f"{line},20\n" for line in lines)]))
    validation, *_, other = card.scores(RunFolder(copy), open_run(str(copy)).run, 1)  # of a checkpoint of before
    assert validation.value == f"{rows[1]['val/transfer_error']:.4g}" and validation.how.startswith("step 1; on 4 held")
    assert other[:2] == ("FID, against training pictures", "20") and other.how.startswith("step 1; network Inception")
    (copy / "scores.json").write_text("{}")
    with pytest.raises(UserError, match=r"scores.json' is damaged"):
        compared.scores([open_run(str(copy))], [""])


def test_videos_of_the_samples_are_shown(copy):
    assert not run_tables.videos(open_run(str(copy)))
    RED.save(copy / "samples" / "walk.gif", save_all=True, append_images=[BLUE])
    (copy / "samples" / "walk.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    text = run_tables.videos(open_run(str(copy))).html()
    assert text.count('<img src="data:image/gif;base64,') == 1 and 'title="walk.mp4"></video>' in text


def test_a_run_that_has_logged_and_drawn_nothing_is_said(copy):
    (copy / "metrics.csv").unlink()
    shutil.rmtree(copy / "samples")
    run = open_run(str(copy))
    assert run_tables.over_time(run).note == "This run has drawn no grids yet."
    assert run_tables.curves(run).note == "This run has logged nothing yet."
    assert words(run_tables.facts(run))["scores"] == "none yet"


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


def test_a_checkpoint_between_two_grids_has_its_own(copy):
    with Image.open(copy / "samples" / "step-000002.png") as sheet:
        wanted = sheet.convert("RGB").tobytes()
    (copy / "samples" / "step-000002.png").unlink()
    with mock.patch.object(run_tables, "_cut", lambda *_: []):
        table = run_tables.over_time(open_run(str(copy)))
    assert table.moments == ["step 0", "step 1", "step 2"] and row(table, "grid")[0].pictures[-1].tobytes() == wanted


def test_grids_of_fewer_samples_as_another_number_of_ranks_draws_them_are_shown_beside_others(copy):
    path, ends = copy / "samples" / "step-000002.png", grids.TITLE + grids.MARGIN
    with Image.open(path) as sheet:
        half = sheet.crop((0, 0, sheet.width, ends + (sheet.height - ends) // 2))
    half.save(path)
    table = run_tables.over_time(open_run(str(copy)))
    assert list(table.columns) == ["picture 0", "picture 1"]
    assert [len(cell.pictures) for cell in row(table, "output")] == [3, 3]


def test_a_long_run_shows_some_of_its_steps_and_grids_of_another_shape_whole(copy):
    for step in (*range(3, 2000, 7), 1_000_000):
        shutil.copy(copy / "samples" / "step-000002.png", copy / "samples" / f"step-{step:06d}.png")
    moments = run_tables.over_time(replace(open_run(str(copy)), step=1_000_000), most=5).moments
    assert len(moments) == 5 and moments[0] == "step 0" and moments[-1] == "step 1,000,000"
    sheet = Image.new("RGB", (333, 222), "red")
    for path in copy.glob("samples/step-*.png"):
        path.unlink() if int(path.stem[5:]) > 2 else sheet.save(path)
    (only,) = run_tables.over_time(open_run(str(copy))).rows
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
    assert "16 of 16" in table.note and re.search(r"and held-out pictures \d+\.\d%\.$", table.note)
    assert [row.title for row in table.rows] == ["made", "nearest 1", "nearest 2", "nearest 3"]

    # A game that has memorised three training pictures.
    learned = torch.stack([run.run.data.train[index]["image"] for index in (5, 2, 11)]) / 127.5 - 1
    run.run.game.show = lambda batch: {"shape": batch["label"], "output": learned}
    table = run_tables.nearest(run, count=3)
    assert [cell.words for cell in row(table, "nearest 1")] == ["no. 5: 0.0%", "no. 2: 0.0%", "no. 11: 0.0%"]
    assert "They are 0.0% away (median)" in table.note
    assert row(table, "nearest 1")[2].pictures[0].tobytes() == row(table, "made")[2].pictures[0].tobytes()


def test_nearest_looks_at_some_of_many_and_passes_over_what_is_no_picture(run, monkeypatch):
    wanted, show = run_tables.nearest(run), run.run.game.show
    assert "among 5 of 16" in run_tables.nearest(run, among=5).note
    assert len(run_tables.nearest(run, among=2).rows) == 3
    monkeypatch.setattr(run.run.game, "show", lambda batch: {"codes": batch["label"].clone(), **show(batch)})
    assert run_tables.nearest(run).note == wanted.note  # VQGAN shows a map of its codes
    for shows in ({"heard": Sound(torch.zeros(1, 8000), 8000)}, {}):  # a game that shows sounds only, or nothing
        monkeypatch.setattr(run.run.game, "show", lambda batch, shows=shows: shows)
        assert run_tables.nearest(run) == Table(note=run_tables.NO_PICTURES)


def test_only_pictures_of_the_side_that_is_made_are_compared_with_it():
    """A game that gives back its inputs copies no picture of the side that it should make."""
    run = opening.untrained("cyclegan-faces", faces=8, held_out=4, size=16, width=2, blocks=1)
    train = {side: [item[side] / 127.5 - 1 for item in run.run.data.train] for side in "ab"}
    made = {f"as {side}": torch.stack(train[other][:2]) for side, other in ("ba", "ab")}
    run.run.game.show = lambda batch: made
    known = replace(run, settings={"run": "cyclegan-faces"})
    assert "kinds" not in words(run_tables.facts(known))
    with mock.patch.object(type(run.run.data.train), "kinds", ("flags", "fruit"), create=True):
        assert words(run_tables.facts(known))["kinds"] == "a: flags, b: fruit"
    table = run_tables.nearest(run, count=2, show=1)
    assert [each.title for each in table.rows] == ["made: as b", "nearest 1", "made: as a", "nearest 1"]
    for side, (_, near) in (("b", table.rows[:2]), ("a", table.rows[2:])):
        assert {cell.pictures[0].tobytes() for cell in near.cells} <= {picture_of(each) for each in train[side]}
    side = SimpleNamespace(pictures=SimpleNamespace(sample_names=[b"\x1b"]))
    assert run_tables._names(SimpleNamespace(a=None, b=side, sample_names=[b"of both"]), "b") == ["\\x1b"]
    assert re.search(r"Those as b are [1-9][\d.]*% away .* Those as a are [1-9][\d.]*% away", table.note)


def test_looking_changes_no_random_state(run):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run_tables.over_time(run), run_tables.masks(run), run_tables.nearest(run)
    run_tables.exchange(run, 0, [1], most=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_spade_paints_masks_without_styles():
    run = opening.untrained("spade-faces", faces=8, held_out=4, size=32, width=4, hidden=8)
    assert [each.title for each in run_tables.masks(run).rows] == ["picture", "mask", "output"]
    assert run_tables.exchange(run).note == run_tables.NO_STYLES
