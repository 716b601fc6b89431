"""Runs beside each other on one page."""

import re
import shutil

import pytest
import torch

import gan
from gan import compare
from gan.app.fitting.card import Scored
from gan.app.page import compared
from gan.app.run import settings_file
from gan.app.run.reopen import open_run
from gan.files.errors import UserError
from gan.games.from_noise import FromNoise
from samples import gallery
from tests.support import opening


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in one setting of their game."""
    out = tmp_path_factory.mktemp("compare") / "runs"
    return [opening.train(out, "r3gan-faces", gamma=gamma, **opening.NARROW) for gamma in (2, 50)]


@pytest.fixture(scope="module")
def made(runs):
    assert compare.main([*map(str, runs)]) == 0
    return runs[0].parent / "compare.html"


def section(text, name):
    return re.search(rf'<section id="{name}">.*?</section>', text, re.DOTALL)[0]


def test_settings_that_differ_are_on_top_and_scores_stand_beside_each_other_with_how_they_were_computed(made):
    text = made.read_text()
    assert re.findall(r'<section id="(\w+)"', text) == ["differs", "scores", "pictures", "curves"]
    titles = re.findall(r'<th scope="row"><div>(.*?)</div></th>', section(text, "differs"))
    assert titles == ["gamma"]
    assert re.findall(r'<td class="words">(.*?)</td>', section(text, "differs")) == ["2.0", "50.0"]
    text = section(text, "scores")
    assert "distance of drawn from held-out faces" in text and "on 4 held-out samples" in text
    assert "001-r3gan-faces" in text and "002-r3gan-faces" in text and compared.NO_COMPARISON not in text


@pytest.fixture
def beside(monkeypatch):
    """Games that show fakes beside pictures."""

    def show(game, batch):
        return {"output": game.numbered(torch.arange(len(batch["image"])), batch["image"]), "pictures": batch["image"]}

    monkeypatch.setattr(FromNoise, "show", show)


def test_the_same_held_out_pictures_are_shown_once_and_the_same_seeds_under_each_other(runs, beside):
    opened = [open_run(str(run)) for run in runs]
    table = compared.pictures(opened, ["one", "two"])
    assert table.note == compared.SAME and len(table.columns) == 4
    assert [row.title for row in table.rows][:3] == ["pictures", "output: one", "output: two"]
    seeds = [row.cells[0].pictures[0].tobytes() for row in table.rows[1:3]]
    again = compared.pictures([opened[0], opened[0]], ["one", "two"])
    same = [row.cells[0].pictures[0].tobytes() for row in again.rows[1:3]]
    assert same[0] == same[1] == seeds[0] != seeds[1]  # the control: the same weights, the same seeds


@pytest.mark.slow
def test_runs_that_hold_out_other_pictures_show_their_own(runs, tmp_path, beside):
    other = opening.train(tmp_path, "r3gan-faces", seed=5, **{**opening.NARROW, "held_out": 2})
    opened, names = [open_run(str(run)) for run in (*runs, other)], ["one", "two", "three"]
    table = compared.pictures(opened, names)
    assert table.note == compared.OTHERS
    assert compared.scores(opened, names).note == f"{compared.SOME_COMPARISON}: one, two."
    assert [row.title for row in table.rows][:3] == ["pictures: one, two", "pictures: three", "output: one"]
    assert {len(row.cells) for row in table.rows} == {4}  # rows of two have two empty cells


@pytest.mark.slow
def test_a_curve_keeps_its_colour_where_another_run_has_none(runs, tmp_path, curves):
    one, two = (open_run(str(shutil.copytree(run, tmp_path / run.name))) for run in runs)
    rows = one.folder.metrics.read_text().splitlines()
    drop = rows[0].split(",").index("discriminator/r1")
    kept = [",".join(word for k, word in enumerate(row.split(",")) if k != drop) for row in rows]
    one.folder.metrics.write_text("\n".join(kept) + "\n")
    drawings = compared.curves([one, two], ["one", "two"]).drawings
    second = "#ff7f0e"
    assert second in drawings["discriminator: r1"] and "#1f77b4" not in drawings["discriminator: r1"]
    assert second in drawings["discriminator: r2"] and "#1f77b4" in drawings["discriminator: r2"]


def test_runs_that_differ_in_their_seed_alone_have_a_mean_and_a_deviation(runs, tmp_path, monkeypatch, capsys):
    both = [shutil.copytree(run, tmp_path / f"{run.name}-again") for run in runs]
    for run in both:
        opening.rewrite(run, seed=7)
    values = {0: "1", 7: "3.5"}

    def scores(folder, run, step):
        seed = settings_file.read(folder.settings)["seed"]
        return [Scored("distance", values[seed], ""), *[Scored("of one seed", "2", "")] * seed]

    monkeypatch.setattr(compared.card, "scores", scores)
    opened = [open_run(str(run)) for run in (*runs, both[0])]
    assert compared.over_seeds(opened) == {"gamma 2.0, seeds 0, 7: mean ± deviation": {"distance": "2.25 ± 1.8"}}
    assert compared.over_seeds(opened[:2]) == {}
    table = compared.scores(opened, ["one", "two", "three"])
    assert [[cell.words for cell in row.cells[:4]] for row in table.rows] == [
        ["1", "1", "3.5", "2.25 ± 1.8"],
        ["–", "–", "2", "–"],
    ]
    assert compare.main([str(runs[1]), str(both[1]), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.startswith("seeds 0, 7: mean ± deviation\n  distance  2.25 ± 1.8\nopen ")
    assert "seeds 0, 7: mean ± deviation" in section((tmp_path / "page.html").read_text(), "scores")


def test_two_checkpoints_of_one_run_have_names_of_their_own(runs):
    one = open_run(str(runs[0]))
    assert compared.titles([one, open_run(str(runs[1]))]) == ["001-r3gan-faces", "002-r3gan-faces"]
    other = type(one)(**{**vars(one), "step": 1})
    assert compared.titles([one, other]) == ["001-r3gan-faces, step 2", "001-r3gan-faces, step 1"]


def test_a_run_whose_data_are_gone_has_all_but_pictures(runs, folder_run, tmp_path, capsys):
    gone = shutil.copytree(folder_run, tmp_path / folder_run.name)
    opening.rewrite(gone, data=str(tmp_path / "gone"))
    page = tmp_path / "page.html"
    opened = open_run(str(gone))
    assert opened.gone.startswith(f"there is no folder {tmp_path / 'gone'}; type --data and the folder")
    alone = gallery.page(opened)
    assert "The grids of training." in alone and 'id="masks"' not in alone
    picture, label = (next((folder_run.parent.parent / "data" / each).iterdir()) for each in ("images", "labels"))
    gan.open(gone).reconstruct(picture=f"{picture}:{label}").save(tmp_path / "anew.png")
    with pytest.raises(UserError, match="there is no folder"):
        gan.open(gone).reconstruct()
    assert compare.main([str(gone), str(runs[0]), "-o", str(page)]) == 0
    said = f"{gone}: there is no folder {tmp_path / 'gone'}; the page has its settings, scores and curves, and no pict"
    assert said in capsys.readouterr().out
    shown = dict.fromkeys(re.findall(r'<th scope="row"><div>(.*?)</div></th>', section(page.read_text(), "pictures")))
    assert shown and all(title.endswith(": 001-r3gan-faces") for title in shown)
    scores = compared.scores([compared.open_to_compare(str(run), "cpu") for run in (gone, runs[0])], ["gone", "here"])
    assert [row.title for row in scores.rows if row.cells[0].words != "–"] == ["val/transfer_error"]
    assert scores.note == f"{compared.NO_COMPARISON}."
    assert "curves" in page.read_text() and "step 2" in page.read_text()


def test_one_run_alone_and_a_place_that_cannot_be_written_are_refused(runs, tmp_path, capsys):
    assert compare.main([str(runs[0])]) == 2
    assert "alone cannot be compared; type two runs or more" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert compare.main([*map(str, runs), "-o", str(tmp_path / "file" / "page.html")]) == 2
    assert "choose a place with -o" in capsys.readouterr().err


@pytest.mark.slow
def test_a_browser_shows_it_in_one_file_and_has_nothing_to_complain(made, screen):
    screen.open(made)
    widths = screen.evaluate("[...document.images].map(each => each.complete && each.naturalWidth)")
    assert len(widths) > 20 and all(widths)
    screen.evaluate("document.querySelector('#pictures tbody th div').textContent = 'long-name-of-a-run-'.repeat(9)")
    assert screen.evaluate("document.querySelector('#pictures tbody th').offsetWidth") < 300  # not over the pictures
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", made.read_text())
