"""The tables of a run's page."""

import errno
import json
import re
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from PIL import Image

from gan.app.fitting import card, metrics
from gan.app.page import compared, run_tables
from gan.app.page.table import Cell, Charts, Row, Table, write
from gan.app.run.folder import RunFolder
from gan.app.run.reopen import open_run
from gan.app.sampling import grids
from gan.app.scoring.names import TRAINED_ON
from gan.files.errors import UserError
from tests.support import opening

# ---- table ----


RED, BLUE = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))


def row(table: Table, title: str) -> list[Cell]:
    (found,) = (row for row in table.rows if row.title == title)
    return found.cells


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
        (Table(["x"], [Row("near", [Cell("a/b_c.jpg: 3%", (RED,))])]), ["<small>a/<wbr>b_<wbr>c<wbr>.jpg: 3%</small>"]),
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


# ---- run tables ----


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
    assert known["opened"] == "step-000002.ckpt" and "begun from" not in known
    begun = replace(run, settings={**run.settings, "from_": "their/net.pkl", "freeze_d": 4})
    assert words(run_tables.facts(begun))["begun from"].startswith("net.pkl, freeze-d 4; the data of that file")


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


def evaluated(folder, name, scores, pictures=4, step=2, **more):
    said = {"step": step, "pictures": pictures, "scores": {"output": scores}, "about": {}, **more}
    (folder / f"evaluation-step-{name}.json").write_text(json.dumps(said))


def test_every_score_says_how_it_was_computed(copy):
    how = {"network": "Inception", "flips": False, "true": TRAINED_ON}
    found = {"score/fid": 12.345678, "score/output: kid": 0.5}
    (copy / "scores.json").write_text(json.dumps({"step": 2, "scores": found, "how": how}))
    about = {"ssim": {"window": "gaussian"}, "features": {"network": "VGG-19"}}
    evaluated(copy, "000002", {"ssim": 0.25, "rmse": "nan", "recall": 0.75, "unknown": 3}, about=about)
    rows = {row.title: [cell.words for cell in row.cells] for row in compared.scores([open_run(str(copy))], [""]).rows}
    how = f"step 2; network Inception; flips no; true {TRAINED_ON}"
    assert rows["FID, against training pictures"] == ["12.35", how]
    assert rows["output: kid"] == ["0.5", "the same"]
    assert rows["SSIM, data range 1"] == ["0.25", "gan.evaluate, step 2, 4 samples; window gaussian"]
    assert rows["recall, share of what is real that is made, against held-out pictures"][1].endswith("network VGG-19")


def test_a_card_has_the_score_of_most_pictures_of_its_step(copy):
    (copy / "scores.json").write_text(json.dumps({"step": 2, "scores": {"score/fid": 12.0}, "how": {"flips": False}}))
    evaluated(copy, "000002", {"ssim": 0.25, "recall": 0.75})
    evaluated(copy, "000002-1", {"ssim": 0.5, "psnr": 20.0, "recall": 0.5}, 3)
    evaluated(copy, "000002-2", {"recall": 0.25}, 5)
    evaluated(copy, "000002-3", {"ssim": 0.75}, 7, settings={"data": "to/testset"})
    evaluated(copy, "0000021", {"ssim": 1.0}, 9, step=21)
    found = {
        each.name: (each.value, each.pictures) for each in card.scores(RunFolder(copy), open_run(str(copy)).run, 2)
    }
    assert found["SSIM, data range 1"] == ("0.25", 4) and found["SSIM, data range 1, on testset"] == ("0.75", 7)
    assert found["PSNR, dB"] == ("20", 3)
    assert found["recall, share of what is real that is made, against held-out pictures"] == ("0.25", 5)
    rows = metrics.read(copy / "metrics.csv")
    head, *lines = (copy / "metrics.csv").read_text().splitlines()
    (copy / "metrics.csv").write_text("".join([f"{head},score/fid\n", *(f"{line},20\n" for line in lines)]))
    validation, *_, other = card.scores(RunFolder(copy), open_run(str(copy)).run, 1)  # of a checkpoint of before
    assert validation.value == f"{rows[1]['val/transfer_error']:.4g}" and validation.how.startswith("step 1; on 4 held")
    assert other[:2] == ("FID, against held-out pictures", "20") and other.how.startswith("step 1; flips no")
    (copy / "scores.json").write_text("{}")
    with pytest.raises(UserError, match=r"scores.json' is damaged"):
        compared.scores([open_run(str(copy))], [""])


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
            assert still.tobytes() == grids.picture(shown[title][number]).tobytes()
    for title in ("output", "one region"):
        assert all(len(cell.pictures) == 3 for cell in row(table, title))


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


def test_spade_paints_masks_without_styles():
    run = opening.untrained("spade-faces", faces=8, held_out=4, size=32, width=4, hidden=8)
    assert [each.title for each in run_tables.masks(run).rows] == ["picture", "mask", "output"]
    assert run_tables.exchange(run).note == run_tables.NO_STYLES
