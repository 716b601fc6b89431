"""What an edit draws: bit for bit what gan.sample draws of the same; and what is refused."""

import base64
import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import gan
from gan.app.editing import editors as module
from gan.app.editing.editors import NoiseEditor, StyleEditor, editor_of, in_bytes
from gan.app.run.reopen import open_run
from gan.app.sampling.drawings import Drawings
from gan.app.sampling.grids import picture
from gan.app.sampling.paintings import Paintings
from gan.app.sampling.shown import Shown
from gan.files.errors import UserError
from tests.support import drawers, opening

SMALL = dict(faces=16, held_out=4, size=32, width=4)


@pytest.fixture(scope="module")
def opened(shared_copy):
    """A copy of the trained run, whose noise is seen."""
    found = open_run(str(shared_copy))
    opening.set_grain(found.run.game, 1.0)
    return found


@pytest.fixture(scope="module")
def editor(opened):
    return StyleEditor(opened, opened.run.data)


@pytest.fixture
def sampled(opened):
    """The one picture of this name that an action of gan.sample makes."""
    return lambda action, single, **how: drawn(getattr(Paintings(opened), action)(**how).singles[single])


def drawn(sample):
    return (sample if isinstance(sample, Image.Image) else picture(sample)).tobytes()


def text(label):
    return base64.b64encode(in_bytes(label)).decode()


def painted(editor, which):
    """The label map of a picture, with a block on it of the first region that it lacks; and that region's name."""
    label = editor.item(which)["label"].clone()
    new = next(region for region in range(len(editor.names)) if region not in label)
    label[2:9, 8:24] = new
    return label, editor.names[new]


def test_a_painted_map_is_what_repaint_makes_of_the_saved_mask(editor, sampled, tmp_path):
    label, new = painted(editor, 1)
    edit = {"picture": 1, "label": text(label), "seed": 4}
    (tmp_path / "mask.png").write_bytes(editor.answers["mask"](json.dumps(edit).encode()))
    image, notes = editor.draw(edit)
    assert image.tobytes() == sampled("repaint", "repainted", picture=1, label=tmp_path / "mask.png", seed=4)
    assert notes == [f"styles of 1 lack {new}: painted in the mean styles"]
    others = [{**edit, "seed": 5}, {"picture": 1, "seed": 4}]
    assert all(editor.draw(other)[0].tobytes() != image.tobytes() for other in others)


def test_a_blend_is_what_interpolate_makes(editor, sampled, opened):
    editor.painter.styles(editor.painter.picture("3")).save(opened.folder.samples / "three.pt")
    assert "three.pt" in editor.about()["files"]
    edit = {"picture": 1, "styles": {"skin": {"from": "2", "to": "three.pt", "share": 0.5}}}
    wanted = sampled("interpolate", "1-001", between=[2, 3], on=1, region="skin", frames=3)
    assert editor.draw(edit)[0].tobytes() == wanted
    assert editor.draw({"picture": 1})[0].tobytes() == sampled("reconstruct", "picture 1", picture=1) != wanted


def test_in_python_an_edit_is_drawn_from_a_file_or_from_what_is_in_it(sean_run, tmp_path, capsys):
    opened, edit = gan.open(sean_run, "cpu"), {"picture": 1, "styles": {"skin": {"from": "2"}}}
    (tmp_path / "edit.json").write_text(json.dumps({**edit, "run": "another"}))
    wanted = opened.edit(edit).tobytes()
    assert wanted != opened.edit({"picture": 1}).tobytes() and capsys.readouterr().out == ""
    assert opened.edit(tmp_path / "edit.json").tobytes() == wanted
    assert capsys.readouterr().out == "the edit was made with another, step 2, where it may have looked different\n"


WRONG = {
    "no edit": ([1], "'picture' of the edit is .* of a wrong kind"),
    "no such picture": ({"picture": 4}, "'picture' of the edit is 4; choose from 0 to 3"),
    "a seed too large": ({"seed": 2**31}, "'seed' of the edit is 2147483648; choose from 0 to 2,147,483,647"),
    "no whole number": ({"seed": 0.5}, r"'seed' of the edit is '0\.5', which is of a wrong kind"),
    "a path for a picture": ({"picture": "/etc/passwd"}, "'picture' of the edit is '/etc/passwd', .* wrong kind"),
    "no base64": ({"label": "?"}, "the label map of the edit is damaged"),
    "too few pixels": ({"label": "AAAA"}, "the edit's label map has 3 pixels, and this run's have 32x32"),
    "no such label": ({"label": text(torch.full((32, 32), 19))}, "the edit has a region 19; this run knows 0 to 18"),
    "no such region": ({"styles": {"hare": {"from": "2"}}}, "there is no region 'hare'; did you mean 'hair'?"),
    "a path for a style": ({"styles": {"skin": {"from": "../three.pt"}}}, r"the run has no styles '\.\./three\.pt'"),
    "no such picture for a style": ({"styles": {"skin": {"from": "99"}}}, "there is no held-out picture 99"),
    "no share": ({"styles": {"skin": {"share": float("nan")}}}, "'share' of the edit is nan"),
    "no style": ({"styles": {"skin": 3}}, "'share' of the edit is 'None', .* wrong kind"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_an_edit_is_said(what, editor):
    edit, words = WRONG[what]
    with pytest.raises(UserError, match=words):
        editor.draw(edit)


def test_an_edit_of_another_kind_of_run_is_refused(editor, noise_editor):
    for one, word in ((editor, "truncation"), (noise_editor, "picture")):
        with pytest.raises(UserError, match=f"the edit has '{word}', which is of another kind of run"):
            one.answers["draw"](json.dumps({"seed": 1, "run": "x", "step": 3, word: 0}).encode())


def test_a_file_that_is_no_edit_is_named(editor, tmp_path):
    path = tmp_path / "edit.json"
    for content in ("", "[" * 100_000, "\xff"):
        path.write_text(content, encoding="latin1")
        with pytest.raises(UserError, match=r"edit\.json' cannot be read as an edit: "):
            editor.repeat(path)


def test_only_styles_inside_the_run_are_offered(editor, opened, tmp_path):
    inside, outside = opened.folder.path / "styles" / "in.pt", tmp_path / "out.pt"
    inside.parent.mkdir(exist_ok=True)
    editor.painter.styles(editor.painter.picture("3")).save(inside)
    shutil.copy(inside, outside)
    (opened.folder.samples / "out.pt").symlink_to(outside)
    assert "in.pt" in editor.files() and "out.pt" not in editor.files()
    with pytest.raises(UserError, match=r"the run has no styles 'out\.pt'"):
        editor.draw({"styles": {"skin": {"from": "out.pt"}}})


def test_a_label_map_is_uploaded_and_others_are_refused(editor, monkeypatch):
    upload, label = editor.answers["upload"], painted(editor, 0)[0]
    saved = editor.answers["mask"](json.dumps({"label": text(label)}).encode())
    assert upload(saved) == in_bytes(label)
    jpeg, soft = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (32, 32)).save(jpeg, format="JPEG")
    Image.new("RGB", (32, 32), (1, 2, 3)).save(soft, format="PNG")
    for content in (b"", jpeg.getvalue(), saved[:40]):
        with pytest.raises(UserError, match=r"no label map: give a PNG|cannot be read as a picture"):
            upload(content)
    with pytest.raises(UserError, match="the label map has the colour #010203"):
        upload(soft.getvalue())
    monkeypatch.setattr(module, "LARGEST", 512 * 512 - 1)
    with pytest.raises(UserError, match="this label map has 262,144 pixels, and the editor takes 262,143 at most"):
        upload(saved)


@pytest.fixture
def noise_editor():
    drawer = drawers.drawer(title="my/net.pkl", classes=2)
    drawer.net.mapping.w_avg.normal_()
    return NoiseEditor(Drawings(drawer))


def test_sliders_draw_what_the_drawer_draws(noise_editor):
    drawer = noise_editor.drawer

    def made(**edit):
        return noise_editor.draw(edit)[0].tobytes()

    def are_equal(one, other):
        """But for a rounding: a batch of two is computed otherwise than two of one."""
        bytes_of = (np.frombuffer(each, np.uint8).astype(int) for each in (one, other))
        return np.abs(np.subtract(*bytes_of)).max() <= 1

    assert are_equal(made(seed=3, truncation=0.5), drawn(drawer.pictures([3], truncation=0.5)[0]))
    assert are_equal(made(seed=3, **{"class": 0}), drawn(drawer.pictures([3], label=0)[0]))
    other = made(seed=5)
    assert are_equal(made(seed=3, layers=0, other=5), other)
    assert not are_equal(made(seed=3), other)
    sheet = Drawings(drawer).directions(seeds=[3], direction=2, strength="2:2")
    assert are_equal(made(seed=3, direction2=2), drawn(sheet.columns["+2"][0]))
    others = ({}, {"layers": 2, "other": 5}, {"truncation": 0}, {"direction2": 1.5}, {"direction1": -3.0})
    assert len({other, *(made(seed=3, **edit) for edit in others)}) == 6
    about = noise_editor.about()
    assert about["run"] == "net.pkl"
    names = ["seed", "class", "truncation", "layers", "other", *(f"direction{k}" for k in range(5))]
    assert [slider["name"] for slider in about["sliders"]] == names
    drawer.class_names = ("cat", "dog")
    (named,) = (slider for slider in NoiseEditor(Drawings(drawer)).sliders if slider.names)
    assert (named.name, named.names) == ("class", ("cat", "dog"))


def test_what_can_be_edited_is_found_by_the_game(opened):
    assert editor_of(Paintings(opened)).kind == "styles"
    assert editor_of(Shown(opening.untrained("pix2pix-faces", **SMALL))).kind == "labels"
    with pytest.raises(UserError, match=r"nothing can be edited of .*: VqGan paints no label maps"):
        editor_of(Shown(opening.untrained("vqgan-faces", **SMALL | {"size": 16})))
