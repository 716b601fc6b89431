"""The editor as a person uses it: the command, and its page in a browser by strokes, clicks and keys."""

import base64
import io
import json
import shutil
from functools import partial

import pytest
import torch
from PIL import Image

from gan import edit, sample
from gan.app.editing.editors import NoiseEditor, StyleEditor
from gan.app.run.reopen import open_run
from gan.app.sampling.drawer import Drawer
from gan.app.sampling.drawings import Drawings
from nets.stylegan import StyleGenerator
from tests.support.commands import until
from tests.support.editor import Visitor, serving

AFTER = "document.getElementById('after').src"
STATUS = "document.getElementById('status').textContent"
PROBLEM = "document.getElementById('problem').textContent"
CHANGED = "[...edit.label].reduce((n, each, k) => n + (each !== originals.get(edit.picture)[k]), 0)"


@pytest.fixture(scope="module")
def address(shared_copy):
    opened = open_run(str(shared_copy))
    with serving(StyleEditor(opened, opened.run.data)) as found:
        yield found


@pytest.fixture
def page(address, screen, tmp_path):
    """The editor, just opened; what it saves goes to `tmp_path`."""
    screen.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    screen.open(address)
    settle(screen)
    return screen


def settle(page):
    """Wait until the newest edit is drawn."""
    ready = "typeof edit === 'object' && !asking && !!document.getElementById('before').src"
    assert until(lambda: page.evaluate(f"{ready} || {PROBLEM} !== ''"))


def pixels(source):
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).tobytes()


def stroke(page, *places):
    """Paint over places of the label map, as parts of its width and height."""
    page.evaluate("document.getElementById('canvas').scrollIntoView({block: 'center', behavior: 'instant'})")
    x, y, w, h = page.evaluate("(box => [box.x, box.y, box.width, box.height])(canvas.getBoundingClientRect())")
    page.stroke([(x + across * w, y + down * h) for across, down in places])
    settle(page)


def choose_region(page, name):
    page.click(f"#region-{page.evaluate('about.regions.map(each => each.name)').index(name)}")


def saved(folder, page, button, pattern):
    page.click(button)
    return until(lambda: [path for path in folder.glob(pattern) if path.suffix != ".crdownload"])[0]


def sampled(run, folder, *words):
    """The pixels of the one picture that gan.sample makes by itself."""
    assert sample.main([str(run), *map(str, words), "--singles", "-o", str(folder / "grid.png")]) == 0
    (single,) = (folder / "grid").glob("*.png")
    return Image.open(single).tobytes()


def test_a_stroke_and_a_style_give_what_gan_sample_gives(page, shared_copy, tmp_path):
    before = page.evaluate(AFTER)
    assert page.evaluate("region > 0 && new Set(edit.label).has(region)")  # one that is there
    choose_region(page, "skin")
    stroke(page, (0.1, 0.1), (0.3, 0.2), (0.3, 0.6))
    painted = page.evaluate(AFTER)
    assert pixels(painted) != pixels(before)
    assert page.evaluate(CHANGED) > 20
    mask = saved(tmp_path, page, "#save-mask", "*-mask.png")
    assert pixels(painted) == sampled(shared_copy, tmp_path, "repaint", "--picture", 0, "--label", mask)

    page.click("#reset")
    settle(page)
    assert pixels(page.evaluate(AFTER)) == pixels(before)
    choose_region(page, "background")
    page.click("#from")
    offers = "[...document.querySelectorAll('#offers button')]"
    assert page.evaluate(f"{offers}.map(each => each.textContent)") == [
        *("its own", "the mean", "picture 0", "picture 1", "picture 2", "picture 3")
    ]
    page.click("#offers button:nth-child(5)")
    settle(page)
    shutil.rmtree(tmp_path / "grid")
    words = ("transfer", "--from", 2, "--to", 0, "--region", "background")
    assert pixels(page.evaluate(AFTER)) == sampled(shared_copy, tmp_path, *words)


def test_what_is_saved_is_drawn_again_by_the_command_and_by_the_page(page, shared_copy, tmp_path, capsys):
    stroke(page, (0.5, 0.5), (0.7, 0.7))
    page.evaluate("change({styles: {skin: {from: '1', to: 'mean', share: 0.25}}, seed: 5})")
    settle(page)
    picture = saved(tmp_path, page, "#save-picture", "*-0.png")
    file = saved(tmp_path, page, "#save-edit", "*-edit.json")
    assert Image.open(picture).tobytes() == pixels(page.evaluate(AFTER))
    assert edit.main([str(shared_copy), "--repeat", str(file), "-o", str(tmp_path / "again.png")]) == 0
    assert str(tmp_path / "again.png") in capsys.readouterr().out
    assert Image.open(tmp_path / "again.png").tobytes() == Image.open(picture).tobytes()

    page.click("#reset")
    settle(page)
    hand_over(page, file)
    assert pixels(page.evaluate(AFTER)) == Image.open(picture).tobytes()
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"run": "zzz", "step": 5, "picture": 2}))
    hand_over(page, other)
    assert page.evaluate(STATUS).endswith("made with zzz, step 5, where it may have looked different")
    page.click("#reset")
    settle(page)
    assert page.evaluate(STATUS).endswith("ms.") and page.evaluate("edit.picture") == 2
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"picture": 77}))
    hand_over(page, wrong)
    assert page.evaluate(PROBLEM) == "'picture' of the edit is 77; choose from 0 to 3"
    assert page.evaluate("edit.picture") == 2
    page.problems[:] = [problem for problem in page.problems if "400 (Bad Request)" not in problem]


def hand_over(page, path):
    """Choose a file for Open, as in the browser's dialog."""
    page.call("DOM.enable")
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.evaluate("before = JSON.stringify(edit), 0")
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])
    until(lambda: page.evaluate(f"JSON.stringify(edit) !== before || {PROBLEM} !== ''"), 10)
    settle(page)


@pytest.mark.slow
def test_all_can_be_done_with_keys_and_undone(page):
    page.evaluate("document.getElementById('region-14').focus()")
    page.press(" ")
    page.evaluate("document.getElementById('canvas').focus()")
    before = page.evaluate(AFTER)
    page.press("ArrowLeft")
    page.press(" ")
    settle(page)
    after = page.evaluate(AFTER)
    assert after != before and page.evaluate(f"{CHANGED} > 0 && edit.label.includes(14)")
    for key, shift, shown in (("z", 0, before), ("z", 8, after), ("z", 0, before), ("y", 0, after)):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=2 + shift)
        settle(page)
        assert page.evaluate(AFTER) == shown
    names = page.evaluate(
        "[...document.querySelectorAll('input, button, canvas')].filter(each => each.offsetParent).map(each => "
        "each.ariaLabel || each.labels?.[0]?.textContent.trim() || each.textContent.trim())"
    )
    assert len(names) > 30 and all(names)


@pytest.mark.slow
def test_what_is_painted_while_another_picture_comes_is_kept(page):
    choose_region(page, "skin")
    page.evaluate("real = ask, ask = (...all) => new Promise(done => answer = () => done(real(...all))), undefined")
    page.evaluate("begin(3), ask = real, undefined")
    stroke(page, (0.1, 0.1), (0.3, 0.2), (0.3, 0.6))
    x, y, w, h = page.evaluate("(box => [box.x, box.y, box.width, box.height])(canvas.getBoundingClientRect())")
    hold = partial(page.call, "Input.dispatchMouseEvent", x=x + w / 2, y=y + h / 2, button="left", buttons=1)
    hold(type="mousePressed", clickCount=1)
    page.evaluate("answer(), undefined")
    assert until(lambda: page.evaluate("edit.picture") == 3)
    hold(type="mouseReleased", clickCount=1)
    settle(page)
    assert page.evaluate(f"[{CHANGED}, past.length]") == [0, 3]
    page.click("#undo")
    settle(page)
    assert page.evaluate(f"[edit.picture, {CHANGED} > 20, past.length]") == [0, True, 2]

    hold(type="mousePressed", clickCount=1)
    page.call("Input.dispatchKeyEvent", type="keyDown", key="z", modifiers=2)
    hold(type="mouseReleased", clickCount=1)
    settle(page)
    assert page.evaluate("[past.length, future.length]") == [2, 1]
    page.evaluate("ask = async () => { throw new Error('gone') }, begin(2).catch(() => ask = real)")
    assert page.evaluate("[edit.picture, past.length, future.length]") == [0, 2, 1]


@pytest.mark.slow
def test_a_painting_that_is_not_saved_is_not_left_without_a_question(page, address, tmp_path):
    for is_saved in (True, False):
        stroke(page, (0.5, 0.5), (0.7, 0.7))
        if is_saved:
            saved(tmp_path, page, "#save-edit", "*-edit.json")
        page.open(address)
        assert ("Page.javascriptDialogOpening" in page.events) is not is_saved
        settle(page)


def test_brush_and_fill_paint_whole_pixels_only(page):
    choose_region(page, "hat")
    page.click("[value=fill]")
    stroke(page, (0.02, 0.02))
    own = page.evaluate("originals.get(0)[0]")
    area = page.evaluate(f"[...originals.get(0)].filter(each => each === {own}).length")
    assert 0 < page.evaluate(CHANGED) <= area
    page.click("[value=brush]")
    page.evaluate("size.value = 1, undefined")
    stroke(page, (0.5, 0.5))
    shown = page.evaluate(
        "[...new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, width, height).data.buffer))]"
    )
    assert sorted(shown) == page.evaluate("[...new Set(edit.label)].map(each => colours[each]).sort((a, b) => a - b)")
    page.click("[value=pick]")
    stroke(page, (0.98, 0.98))
    assert page.evaluate("region") == page.evaluate("edit.label.at(-1)")


def test_two_visitors_do_not_disturb_each_other(page, address):
    other = Visitor(address)
    alone = [other.draw(picture=k)[1]["picture"] for k in (1, 2)]
    own = page.evaluate(AFTER)
    page.evaluate("change({seed: 1}), change({seed: 0}), undefined")
    assert [other.draw(picture=k) for k in (1, 2)] == [(200, {"picture": each, "notes": []}) for each in alone]
    settle(page)
    assert page.evaluate(AFTER) == own and len({own, *alone}) == 3


@pytest.mark.slow
def test_a_phone_shows_it_without_scrolling_sideways(page):
    page.resize(400, 800)
    page.click("#choose")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("document.getElementById('dialog').offsetWidth") <= 400
    page.press("Escape")
    assert page.evaluate("document.getElementById('canvas').offsetWidth") > 350
    page.call("Emulation.clearDeviceMetricsOverride")


def set_to(screen, element, value):
    screen.evaluate(f"(each => {{each.value = {value}; each.dispatchEvent(new Event('change'))}})({element})")
    settle(screen)


def test_sliders_change_a_picture_from_noise(screen, tmp_path):
    torch.manual_seed(0)
    net = StyleGenerator(16, base=64, most=8, latent=8, style=8, mapping=2, classes=2).eval().requires_grad_(False)
    editor = NoiseEditor(Drawings(Drawer(net, "mine.pkl", ("cat", "dog"))))
    with serving(editor) as address:
        screen.open(address)
        settle(screen)
        seen = [screen.evaluate(AFTER)]
        for name, value in (("seed", 7), ("class", 1), ("truncation", 0.5), ("layers", 2)):
            set_to(screen, f"document.getElementById('slider-{name}')", value)
            seen.append(screen.evaluate(AFTER))
        image, _ = editor.draw({"seed": 7, "class": 1, "truncation": 0.5, "layers": 2, "other": 1})
        assert screen.evaluate("document.getElementById('slider-class').selectedOptions[0].text") == "dog"
        assert pixels(seen[-1]) == image.tobytes() and len(set(seen)) == len(seen)
        screen.click("#undo")
        settle(screen)
        assert screen.evaluate(AFTER) == seen[-2]
        set_to(screen, "document.getElementsByName('seed')[1]", "'4.5'")
        assert screen.evaluate(f"[edit.seed, {PROBLEM}]") == [4, ""]
        (tmp_path / "part.json").write_text(json.dumps({"seed": 3}))
        hand_over(screen, tmp_path / "part.json")
        assert pixels(screen.evaluate(AFTER)) == editor.draw({"seed": 3})[0].tobytes()
        screen.open("about:blank/")
