"""The page: what is on it, and that a browser shows it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from gan.app.fitting import metrics
from gan.files.errors import UserError
from samples import gallery
from tests.support import commands

ROOT = Path(__file__).resolve().parents[2]
EVERY_PICTURE = "[...document.images]"


@pytest.fixture(scope="module")
def made(sean_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page") / "deep" / "page.html"
    few = lambda rows, every=metrics.panels: dict([*every(rows).items()][:2])  # noqa: E731 - each takes a while
    with commands.curves(), mock.patch.object(metrics, "panels", few):
        assert gallery.main([str(sean_run), "--out", str(out)]) == 0
    return out


def test_a_browser_shows_every_picture_of_the_one_file_and_has_nothing_to_complain(made, screen):
    screen.open(made)
    pictures = screen.evaluate(
        f"{EVERY_PICTURE}.map(each => [each.complete && each.naturalWidth, each.alt, each.closest('section').id])"
    )
    assert len(pictures) > 60
    assert all(width > 0 for width, *_ in pictures)
    assert all(alt for _, alt, _ in pictures)
    assert len({(alt, section) for _, alt, section in pictures}) == len(pictures)

    text = made.read_text()
    assert [path.name for path in made.parent.iterdir()] == ["page.html"]
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "@import" not in text and "url(" not in text
    here = ["training", "masks", "styles", "copies", "scores", "curves", "run"]
    for link in [*here, "sounds", "videos", "health"]:  # SEAN makes none, and two steps are too few
        assert (f'<section id="{link}">' in text) == (f'href="#{link}"' in text) == (link in here)
    assert "transfer error" in text.lower() and "batch_size" in text


def test_problems_are_heard_of(tmp_path, screen):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='missing.png'><script>console.error('x'); nothing.here</script>")
    screen.open(bad)
    assert screen.evaluate(f"{EVERY_PICTURE}.map(each => each.naturalWidth)") == [0]
    heard, screen.problems[:] = " ".join(screen.problems), []
    assert "ERR_FILE_NOT_FOUND" in heard
    assert "nothing is not defined" in heard
    assert '"value":"x"' in heard


def test_the_slider_goes_through_training(made, screen):
    screen.open(made)
    seen = "[...document.querySelectorAll('.moving')].map(cell => [...cell.children].findIndex(each => !each.hidden))"
    shown = "document.querySelector('.moments output').textContent"
    last = screen.evaluate(seen)
    assert set(last) == {2}
    assert len(last) == 2 * 4  # what it makes of four held-out faces
    assert screen.evaluate(shown) == "step 2"
    screen.evaluate("document.querySelector('.moving').append(document.createElement('small'))")  # such as a seed
    screen.evaluate(
        "{const s = document.querySelector('.moments input'); s.value = 0; s.dispatchEvent(new Event('input'))}"
    )
    assert set(screen.evaluate(seen)) == {0} and not screen.evaluate("document.querySelector('.moving small').hidden")
    assert screen.evaluate(shown) == "step 0"

    # It also plays to the end.
    screen.evaluate("document.querySelector('.moments button').click()")
    play = "document.querySelector('.moments button').textContent"
    assert screen.evaluate(play) == "Pause"
    screen.evaluate("new Promise(done => setTimeout(done, 1500))")
    assert screen.evaluate(play) == "Play"
    assert screen.evaluate(shown) == "step 2"


def test_a_click_enlarges_and_keys_go_on(made, screen):
    screen.open(made)
    words = "document.querySelector('dialog[open] p')?.textContent"
    screen.evaluate("document.querySelectorAll('#styles img')[1].click()")
    assert screen.evaluate(words) == screen.evaluate("document.querySelectorAll('#styles img')[1].alt")
    size = screen.evaluate(
        "(({width, height}) => [width, height])(document.querySelector('dialog img').getBoundingClientRect())"
    )
    assert size[0] == size[1] > 300
    screen.press("ArrowLeft")
    assert screen.evaluate(words) == screen.evaluate("document.querySelectorAll('#styles img')[0].alt")
    screen.press("Escape")
    assert screen.evaluate(words) is None

    # It also works without a mouse.
    screen.evaluate("document.querySelector('#masks img').focus()")
    screen.press("Enter")
    assert screen.evaluate(words) == "picture, picture 0"
    screen.evaluate("document.querySelector('dialog').click()")
    assert screen.evaluate(words) is None


def test_a_phone_scrolls_tables_and_not_the_page_and_a_score_is_on_one_line(made, screen):
    screen.resize(360, 740)
    screen.open(made)
    assert screen.evaluate("document.documentElement.scrollWidth") <= 360
    assert screen.evaluate("document.querySelector('#styles .scroll').scrollWidth") > 360
    assert screen.evaluate(
        "[...document.querySelectorAll('#run .table:not(details *) td')].every(e => e.offsetWidth > 250)"
    )
    screen.call("Emulation.clearDeviceMetricsOverride")
    screen.evaluate("window.cell = document.querySelector('#scores tbody td'); cell.textContent = '0.00546490123'")
    screen.evaluate("window.range = document.createRange(); range.selectNodeContents(cell)")
    assert screen.evaluate("range.getClientRects().length") == 1


def test_on_paper_all_pictures_stand_in_dark_words_on_white_and_without_scripts_the_last_step_is_shown(made, screen):
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    screen.resize(660, 900)
    screen.open(made)
    screen.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert screen.evaluate(f"{EVERY_PICTURE}.every(each => each.getBoundingClientRect().right < 640)")
    assert screen.evaluate("getComputedStyle(document.querySelector('.scroll')).overflow") == "visible"
    assert screen.evaluate("getComputedStyle(document.body).color") == "rgb(31, 35, 40)"
    screen.call("Emulation.setEmulatedMedia", media="", features=[])
    screen.call("Emulation.clearDeviceMetricsOverride")
    screen.call("Emulation.setScriptExecutionDisabled", value=True)
    screen.open(made)
    screen.call("Emulation.setScriptExecutionDisabled", value=False)
    assert screen.evaluate("document.querySelector('.moments').offsetHeight") == 0
    shown = "[...document.querySelectorAll('.moving img')].filter(each => each.offsetHeight).map(each => each.alt)"
    assert all(alt.endswith("step 2") for alt in screen.evaluate(shown))
    assert len(screen.evaluate(shown)) == 2 * 4


def test_the_page_lies_where_it_is_told_to(sean_run, here, capsys, monkeypatch):
    monkeypatch.setattr(gallery, "page", lambda run: f"of {run.name}")
    shutil.copytree(sean_run, here / "runs" / "007-mine")
    for words, path in (
        ("", "runs/007-mine/gallery.html"),  # of the newest run
        ("runs/007-mine", "runs/007-mine/gallery.html"),
        ("runs/007-mine --out pages", "pages/007-mine.html"),
        ("runs/007-mine --out some/page.htm", "some/page.htm"),
    ):
        assert gallery.main(words.split()) == 0
        assert Path(path).read_text() == "of sean-faces"
        assert f"open {path} in a browser" in capsys.readouterr().out
        assert not list(Path(path).parent.glob("*.part"))
        Path(path).unlink()


def test_a_page_that_cannot_be_written_is_said_before_it_is_made(sean_run, tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(gallery, "page")
    (tmp_path / "file").write_text("")
    assert gallery.main([str(sean_run), "--out", str(tmp_path / "file" / "page.html")]) == 2
    assert "choose a place with --out" in capsys.readouterr().err


def test_what_fails_leaves_no_page(sean_run, tmp_path, monkeypatch, capsys):
    def fail(run):
        raise UserError("no")

    monkeypatch.setattr(gallery, "page", fail)
    assert gallery.main([str(sean_run), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: no\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_it_is_a_command_of_its_own(tmp_path):
    call = [sys.executable, str(ROOT / "samples" / "gallery.py"), "nowhere"]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = subprocess.run(call, cwd=tmp_path, env=plain, capture_output=True, text=True)
    assert told.returncode == 2
    assert told.stderr.startswith("error: there is no 'nowhere'")
