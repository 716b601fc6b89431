"""Pictures of a person's own: what a path holds is found out, and becomes batches."""

import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from gan.files.errors import UserError
from gan.runs.pictures import OnPictures
from gan.runs.run import made_to


def put(path, size=(12, 8), mode="RGB", colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size, colour or (len(path.name) * 9 % 256, 50, 100))
    picture.convert(mode).save(path)
    return path


def two_classes(root):
    """A folder with two folders of small pictures, wider than high."""
    for number in range(16):
        put(root / "ab"[number % 2] / f"{number}.png", (16, 12), colour=(16 * number,) * 3)
    return str(root)


def found(path, **settings):
    return OnPictures(data=str(path), workers=0, **settings).find()


def test_a_folder_of_pictures_becomes_batches(tmp_path, capsys):
    for number in range(12):
        put(tmp_path / "deep" / f"{number}.jpg")
    data = found(tmp_path)
    assert (data.size, data.channels, data.classes) == ((8, 12), 3, 0)
    assert len(data.train) == 9 and len(data.val) == 3
    batch = next(iter(data.data(4).train_dataloader()))
    assert set(batch) == {"image"} and batch["image"].shape == (4, 3, 8, 12)
    assert batch["image"].dtype == torch.float32 and -1 <= batch["image"].min() < batch["image"].max() <= 1
    assert (
        "12 pictures in a folder (12x8; RGB 12); no classes; scaled and cropped to 12x8 (all are), RGB"
        in capsys.readouterr().err
    )


def test_sub_folders_that_hold_all_pictures_are_classes(tmp_path, capsys, monkeypatch):
    for number in range(8):
        put(tmp_path / ("cat", "dog")[number % 2] / f"{number}.png")
    data = found(tmp_path)
    assert data.class_names == ("cat", "dog")
    for part in (data.train, data.val):
        assert all(part[row]["class"] == ("cat", "dog").index(part.name(row)[:3]) for row in range(len(part)))
    assert "2 classes (cat, dog; --classes false for none)" in capsys.readouterr().err
    assert found(tmp_path, classes=False).classes == 0
    monkeypatch.chdir(tmp_path)
    assert found(".").class_names == ("cat", "dog")
    put(tmp_path / "beside.png")
    assert found(tmp_path).classes == 0
    with pytest.raises(UserError, match="pictures lie beside those"):
        found(tmp_path, classes=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("labels", [[2, 0, 1, 1], [[0.5, 1], [1, 0], [0, 0], [2, 2]], None])
def test_stylegans_data_sets_have_their_labels(tmp_path, packed, labels):
    names = [f"00000/img{number:08}.png" for number in range(4)]
    (tmp_path / "set").mkdir()
    given = None if labels is None else list(reversed(list(zip(names, labels, strict=True))))
    (tmp_path / "set" / "dataset.json").write_text(json.dumps({"labels": given}))
    for name in names:
        put(tmp_path / "set" / name)
    path = tmp_path / "set"
    if packed:
        path = tmp_path / "set.zip"
        with zipfile.ZipFile(path, "w") as file:
            for name in ("dataset.json", *names):
                file.write(tmp_path / "set" / name, name)
    data = found(path, held_out=0.0)
    assert data.classes == (0 if labels is None else 3 if labels[0] == 2 else 2)
    for row in range(4) if labels else ():
        assert np.array_equal(data.train[row]["class"], np.float32(labels[row]))


def test_a_picture_that_was_trained_on_is_never_held_out_later(tmp_path):
    for number in range(40):
        put(tmp_path / f"{number}.png", (4, 4))
    before = found(tmp_path)
    trained = {before.train.name(row) for row in range(len(before.train))}
    for number in range(40, 80):
        put(tmp_path / f"{number}.png", (4, 4))
    after = found(tmp_path)
    assert trained < {after.train.name(row) for row in range(len(after.train))}
    assert 0 < len(after.val) < 20


def test_a_plan_needs_no_pictures(tmp_path):
    with made_to("plan"):
        data = found(tmp_path / "nowhere", size="48x32", channels=4)
    assert next(iter(data.data(2).train_dataloader()))["image"].shape == (2, 4, 32, 48)
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        found(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"channels": 2}, "2 channels are not known"), ({"background": "purplish"}, "there is no colour 'purplish'")],
)
def test_what_cannot_be_meant_is_refused(tmp_path, settings, message):
    put(tmp_path / "a.png")
    with pytest.raises(UserError, match=message):
        found(tmp_path, **settings)
