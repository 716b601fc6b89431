"""The drawn faces: the same everywhere, labels that fit the picture, and a truth that is one."""

import hashlib

import numpy as np
import pytest
import torch

from datasets import FLIP_PAIRS, LABELS, FaceDomains, FaceLooks, Faces, FaceTransfers
from datasets.drawn.portrait import draw_portrait
from gan.files.errors import UserError


@pytest.fixture(autouse=True)
def each_time(monkeypatch):
    """A face is drawn anew, also if this process has drawn it before."""
    monkeypatch.setattr("datasets.drawn.faces.draw_portrait", draw_portrait)


def digest(faces, numbers=range(6)):
    content = hashlib.sha256()
    for k in numbers:
        item = faces[k]
        content.update(item["image"].numpy().tobytes() + item["label"].numpy().tobytes())
    return content.hexdigest()


def test_labels_are_named_and_paired():
    names = "background skin nose eye_g l_eye r_eye l_brow r_brow l_ear r_ear mouth u_lip l_lip hair hat ear_r neck_l"
    assert " ".join(LABELS) == names + " neck cloth"
    assert set(FLIP_PAIRS) == {(4, 5), (6, 7), (8, 9)}
    faces = Faces(1)
    assert faces.num_labels == 19 and faces.label_names == LABELS and faces.flip_pairs == FLIP_PAIRS


def test_a_face_does_not_depend_on_the_set_around_it_or_the_order_of_drawing():
    few, later, other = Faces(6), Faces(3, first=2), Faces(3, seed=6)
    backward = Faces(50)
    for k in reversed(range(6)):
        backward[k]
    assert digest(few) == digest(backward)
    assert digest(few, range(2, 5)) == digest(later, range(3))
    assert not torch.equal(few[2]["image"], other[2]["image"])


def test_memory_is_bounded_and_an_item_may_be_written_on(monkeypatch):
    monkeypatch.setattr("datasets.drawn.faces.MEMORY", 4 * 16 * 16 + 10)
    faces = Faces(3, size=16)
    first = digest(faces, range(3))
    assert len(faces._kept) == 2, "one picture and its labels fit"
    for item in faces:
        item["image"].zero_()
    assert digest(faces, range(3)) == first


def test_left_is_left():
    labels, columns = [np.array(Faces(20).label(number)) for number in range(20)], np.arange(64)[None].repeat(64, 0)
    for left, right in FLIP_PAIRS:
        both = [label for label in labels if (label == left).any() and (label == right).any()]
        assert both and all(columns[label == left].mean() < columns[label == right].mean() for label in both)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"look": "noir"}, "look 'noir' is not known; try one of any, poster, neon"),
        ({"size": 15}, "try size 16 or more"),
        ({"length": 0}, "there can be no set of 0 faces; try a length of 1 to 1,000,000,000"),
        ({"length": 2**63}, "there can be no set of 9223372036854775808 faces"),
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
