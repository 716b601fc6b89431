"""The drawn faces: the same everywhere, labels that fit the picture, and a truth that is one."""

import hashlib
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from datasets import FLIP_PAIRS, LABELS, FaceDomains, FaceLooks, Faces, FaceTransfers
from datasets.drawn.drawing import Canvas, Pen, Region, Tone, arc, mirrored, oval, ribbon, smooth
from datasets.drawn.faces import LEVELS, TEXTURES, any_style, paint, texture_levels
from datasets.drawn.portrait import supersampling
from gan.files.errors import UserError


def digest(faces, numbers=range(6)):
    content = hashlib.sha256()
    for k in numbers:
        item = faces[k]
        content.update(item["image"].numpy().tobytes() + item["label"].numpy().tobytes())
    return content.hexdigest()


def pixels(picture):
    return np.array(picture).astype(int)


def border(label):
    """Pixels that touch another region: they are mixed in the picture."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(label, 1, mode="edge"), (3, 3))
    return (around != label[..., None, None]).any((2, 3))


def test_labels_are_named_and_paired():
    names = "background skin nose eye_g l_eye r_eye l_brow r_brow l_ear r_ear mouth u_lip l_lip hair hat ear_r neck_l"
    assert " ".join(LABELS) == names + " neck cloth"
    assert set(FLIP_PAIRS) == {(4, 5), (6, 7), (8, 9)}
    faces = Faces(1)
    assert faces.num_labels == 19 and faces.label_names == LABELS and faces.flip_pairs == FLIP_PAIRS


def test_items():
    for size in (16, 33, 64):
        item = Faces(3, size=size)[1]
        image, label = item["image"], item["label"]
        assert isinstance(image, tv_tensors.Image) and isinstance(label, tv_tensors.Mask)
        assert image.shape == (3, size, size) and label.shape == (size, size)
        assert image.dtype == label.dtype == torch.uint8 and label.max() < 19


def test_a_face_does_not_depend_on_the_set_around_it_or_the_order_of_drawing():
    few, later, other = Faces(6), Faces(3, first=2), Faces(3, seed=6)
    backward = Faces(50)
    for k in reversed(range(6)):
        backward[k]
    assert digest(few) == digest(backward)
    assert digest(few, range(2, 5)) == digest(later, range(3))
    assert not torch.equal(few[2]["image"], other[2]["image"])


@pytest.mark.slow
def test_a_face_does_not_depend_on_process_or_hash_seed():
    program = "from tests.unit.datasets.drawn.test_faces import *; print(digest(Faces(6)))"
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(Faces(6))


def test_drawing_leaves_the_global_random_states_alone():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    Faces(1)[0]
    assert random.getstate() == before[1] and (np.random.get_state()[1] == before[2]).all()
    assert torch.equal(torch.get_rng_state(), before[0])


def test_memory_is_bounded_and_an_item_may_be_written_on(monkeypatch):
    monkeypatch.setattr("datasets.drawn.faces.MEMORY", 4 * 16 * 16 + 10)
    faces = Faces(3, size=16)
    first = digest(faces, range(3))
    assert len(faces._kept) == 2, "one picture and its labels fit"
    for item in faces:
        item["image"].zero_()
    assert digest(faces, range(3)) == first


def test_the_shape_is_the_same_at_every_size():
    small, large = Faces(8, size=64), Faces(8, size=192)
    for k in range(8):
        agree = np.array(large.label(k))[1::3, 1::3] == np.array(small.label(k))
        assert agree.mean() > 0.96


def test_indices_end():
    faces = Faces(3, first=10)
    assert torch.equal(faces[-1]["image"], faces[2]["image"])
    for index in (3, -4):
        with pytest.raises(IndexError):
            faces[index]
    assert len(list(faces)) == 3


@pytest.mark.parametrize("look", ["any", *(pytest.param(each, marks=pytest.mark.slow) for each in ("poster", "neon"))])
def test_every_region_is_painted_inside_its_labels_alone(look):
    """Repaint one region: no pixel changes that does not hold a point of it."""
    faces, other = Faces(1, 96, look=look), Faces(1, 96, look="neon" if look == "any" else "any")
    fine = supersampling(96)
    for shape in range(6):
        cells, label, before = faces._cells(shape), np.array(faces.label(shape)), pixels(faces.draw(shape))
        own, foreign = faces._styles(shape, None), other._styles(1000, None)
        held = (cells // len(Tone)).reshape(96, fine, 96, fine)
        for region in np.unique(label):
            styles = [*own[:region], foreign[region], *own[region + 1 :]]
            changed = (pixels(paint(cells, styles, 96)) != before).any(-1)
            assert not (changed & ~(held == region).any((1, 3))).any(), LABELS[region]
            inside = (label == region) & ~border(label)
            if inside.sum() > 5:
                assert changed[inside].mean() > 0.5, LABELS[region]


def test_the_mean_colour_of_a_region_is_recognisable():
    faces = Faces(1, size=96)
    far = []
    for face in range(12):
        picture, label = pixels(faces.draw(face)), np.array(faces.label(face))
        for region in (Region.SKIN, Region.HAIR, Region.CLOTH, Region.BACKGROUND, Region.NOSE, Region.HAT, Region.NECK):
            inside = (label == region) & ~border(label)
            if inside.sum() > 30:
                far.append(np.abs(picture[inside].mean(0) - any_style(0, face, region).colour).max())
    assert len(far) > 50 and max(far) < 70 and np.mean(far) < 20


def test_labels_are_the_regions_at_the_middle_of_the_pixels():
    faces, fine = Faces(1, size=48), supersampling(48)
    regions = faces._cells(0) // len(Tone)
    assert (np.array(faces.label(0)) == regions[fine // 2 :: fine, fine // 2 :: fine]).all()


def test_regions_come_and_go():
    faces = Faces(150)
    there = np.concatenate([np.unique(faces.label(k)) for k in range(150)])
    share = dict(zip(LABELS, np.bincount(there, minlength=19) / 150, strict=True))
    for always in ("background", "skin", "nose", "u_lip", "l_lip", "neck", "cloth"):
        assert share[always] == 1, always
    for sometimes in ("eye_g", "l_eye", "r_ear", "mouth", "hair", "hat", "ear_r", "neck_l"):
        assert 0.1 < share[sometimes] < 1, (sometimes, share[sometimes])


def test_no_two_shapes_and_no_two_styles_are_alike():
    faces = Faces(40)
    assert len({np.array(faces.label(k)).tobytes() for k in range(40)}) == 40
    assert len({any_style(0, face, region) for face in range(40) for region in Region}) == 40 * 19


def test_left_is_left():
    labels, columns = [np.array(Faces(20).label(number)) for number in range(20)], np.arange(64)[None].repeat(64, 0)
    for left, right in FLIP_PAIRS:
        both = [label for label in labels if (label == left).any() and (label == right).any()]
        assert both and all(columns[label == left].mean() < columns[label == right].mean() for label in both)


def test_style_is_drawn_independently_of_shape_and_region_by_region():
    faces = Faces(1)
    plain, zero, none = (pixels(faces.draw(0, style=style)) for style in (None, 0, {}))
    whole, pieces = (pixels(faces.draw(0, style=style)) for style in (7, dict.fromkeys(range(len(LABELS)), 7)))
    assert (whole == pieces).all() and (plain == zero).all() and (plain == none).all() and (whole != plain).any()


def test_fixed_looks_paint_every_face_alike():
    for look in ("poster", "neon"):
        faces = Faces(2, look=look)
        assert (pixels(faces.draw(0, style=1)) == pixels(faces.draw(0))).all()
        assert torch.equal(faces[0]["label"], Faces(1)[0]["label"])
    poster, neon = Faces(1, look="poster"), Faces(1, look="neon")
    assert np.abs(pixels(poster.draw(0)) - pixels(neon.draw(0))).mean() > 60


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"look": "noir"}, "look 'noir' is not known; try one of any, poster, neon"),
        ({"size": 15}, "try size 16 or more"),
        ({"length": 0}, "try a length of 1 or more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Faces(**{"length": 1, **arguments})


def test_transfers_hold_the_truth():
    faces = Faces(4, first=20)
    transfers = FaceTransfers(faces)
    assert len(transfers) == 4 and transfers.num_labels == 19 and transfers.flip_pairs == FLIP_PAIRS
    for k, other in enumerate([21, 22, 23, 20]):
        item = transfers[k]
        assert torch.equal(item["image"], faces[k]["image"]) and torch.equal(item["label"], faces[k]["label"])
        assert torch.equal(item["style_image"], faces.image(other))
        assert torch.equal(item["style_label"], faces.label_map(other))
        assert (item["truth"].permute(1, 2, 0).numpy() == np.array(faces.draw(20 + k, style=other))).all()
        assert not torch.equal(item["truth"], item["image"])
        drawn = faces.draw(20 + k, style={item["region"]: other})
        assert (item["region_truth"].permute(1, 2, 0).numpy() == np.array(drawn)).all()
    with pytest.raises(UserError, match="needs two faces"):
        FaceTransfers(Faces(1))


def test_the_region_of_a_transfer_is_large_enough_and_in_both_faces():
    """The pairs take turns, so that many regions are looked at."""
    transfers = FaceTransfers(Faces(24, size=32))
    chosen = []
    for item in map(transfers.__getitem__, range(24)):
        inside = item["label"] == item["region"]
        assert 64 * inside.sum() >= inside.numel()
        assert (item["style_label"] == item["region"]).any()
        changed = (item["region_truth"] != item["image"]).any(0)
        assert changed[inside].float().mean() > 0.5
        assert not changed[~inside & ~torch.from_numpy(border(item["label"].numpy()))].any()
        chosen.append(item["region"])
    assert len(set(chosen)) >= 5


def test_domains_are_unpaired_and_know_their_translations():
    domains = FaceDomains(3, first=5, truth=True)
    poster, neon = Faces(1, look="poster"), Faces(1, look="neon")
    assert len(domains) == 3
    for k, item in enumerate(domains):
        a, b = 2 * (5 + k), 2 * (5 + k) + 1
        assert torch.equal(item["a"], poster.image(a)) and torch.equal(item["truth_b"], neon.image(a))
        assert torch.equal(item["b"], neon.image(b)) and torch.equal(item["truth_a"], poster.image(b))
    assert set(FaceDomains(1)[0]) == {"a", "b"}


def test_faces_with_classes_take_turns():
    looks = FaceLooks(3, 16, first=5)
    for index, kind in enumerate((1, 0, 1)):
        item, wanted = looks[index], Faces(3, 16, first=5, look=FaceLooks.looks[kind])
        assert item["class"] == kind
        assert torch.equal(item["image"], wanted[index]["image"])
    assert len(looks) == 3


def test_curves():
    square = [(0, 0), (1, 0), (1, 1), (0, 1)]
    closed, open_ = smooth(square), arc(square)
    for corner in square:
        assert np.isclose(closed, corner).all(1).any() and np.isclose(open_, corner).all(1).any()
    assert np.allclose(open_[0], square[0]) and np.allclose(open_[-1], square[-1])
    assert np.allclose(np.hypot(*oval(0, 0, 2, 2).T), 2)
    both = mirrored([(1, 0), (2, 1)])
    assert np.allclose(both, [(1, 0), (2, 1), (-2, 1), (-1, 0)])
    band = ribbon([(0, 0), (1, 0), (2, 0)], 0.2, 0.4)
    assert np.isclose(np.ptp(band[:, 1]), 0.4) and np.isclose(abs(band[0, 1]), 0.1)


def test_a_tone_shows_on_its_own_region_only():
    canvas = Canvas(20)
    pen = Pen(canvas, 0, 0, 1)
    box = np.array([(0, 0), (0.5, 0), (0.5, 1), (0, 1)])
    pen.fill(Region.SKIN, box)
    pen.tone(Region.SKIN, Tone.DARK, np.array([(0.25, 0), (1, 0), (1, 1), (0.25, 1)]))
    cells = canvas.cells()
    assert cells[10, 2] == Region.SKIN * len(Tone)
    assert cells[10, 7] == Region.SKIN * len(Tone) + Tone.DARK
    assert cells[10, 15] == Region.BACKGROUND * len(Tone), "the dark was meant for the skin"
    pen.fill(Region.HAIR, box, Tone.LIGHT)
    assert canvas.cells()[10, 7] == Region.HAIR * len(Tone) + Tone.LIGHT


def test_textures_swing_around_the_colour():
    levels = texture_levels(64).reshape(len(TEXTURES), -1).astype(int)
    assert levels.min() >= 0 and levels.max() < LEVELS
    assert (np.abs(levels.mean(1) - LEVELS // 2) < 1.5).all()
    assert (levels[0] == LEVELS // 2).all(), "plain"
    assert len({row.tobytes() for row in levels}) == len(TEXTURES)
