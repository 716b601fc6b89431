"""Samples are mirrored and cropped by their own number, and files are cropped from their stored size."""

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torchvision import tv_tensors

from datasets import Augment, Faces, FaceTransfers, FolderPairs
from datasets.augment import to_tensors
from tests.support.layouts import cityscapes, colours, labels, put


@pytest.fixture
def pairs(tmp_path):
    put(tmp_path / "images" / "a.png", colours(72, 128))
    put(tmp_path / "labels" / "a.png", labels(72, 128))
    return FolderPairs(tmp_path, 4, (32, 64))


def test_a_file_is_resized_once_and_cut(pairs):
    """286/256 of 32 x 64 is 36 x 72 (35.75 and 71.5): the cut is some part of that, and of nothing else."""
    larger = FolderPairs(pairs.root, 4, (36, 72))[0]
    places = set()
    for epoch in range(40):
        cut = Augment(flip=False, crop=True).load(pairs, epoch, 0)
        windows = {at: (..., slice(at[0], at[0] + 32), slice(at[1], at[1] + 64)) for at in np.ndindex(5, 9)}
        (place,) = [at for at in windows if torch.equal(larger["image"][windows[at]], cut["image"])]
        assert torch.equal(larger["label"][windows[place]], cut["label"])
        places.add(place)
    assert {top for top, _ in places} == set(range(5)) and len({left for _, left in places}) == 9
    whole, hides_files = Augment(flip=False, crop=True), Subset(pairs, [0])
    assert torch.equal(whole.load(hides_files, 0, 0)["image"], whole(pairs[0], 0, 0)["image"])


def test_edges_are_cut_and_mirrored_with_the_picture(tmp_path):
    """Two instances side by side: their edge follows the border between their labels, wherever it goes."""
    written = cityscapes(tmp_path)
    values = np.full((64, 128), 7)
    values[:, 40:] = 26
    instances = written.labels[0].with_name(written.labels[0].name.replace("labelIds", "instanceIds"))
    for path, written_values in ((written.labels[0], values), (instances, values), (written.pictures[0], 5 * values)):
        put(path, written_values)
    data = written.open(size=(32, 64))
    seen = set()
    for epoch in range(12):
        item = Augment(flip=True, crop=True).load(data, epoch, 0)
        row, edge = item["label"][0], item["edges"][0]
        border = int((row[1:] != row[:-1]).nonzero()[0, 0])
        assert edge.nonzero().flatten().tolist() == [border, border + 1]
        assert (item["edges"] == edge).all()
        assert abs(int((item["image"][0, 0] > 80).nonzero()[0 if row[0] == 7 else -1, 0]) - border) <= 1
        seen.add((int(row[0]), border))
    assert len({side for side, _ in seen}) == 2 and len(seen) > 4
    assert to_tensors(item)["edges"].dtype == torch.int64


def moved(seed=0, epoch=0, index=0, item=None, **options):
    item = Faces(1, size=64)[0] if item is None else item
    return Augment(seed, **{"flip": False, "crop": False, **options})(item, epoch, index)


def test_what_happens_to_a_sample_depends_on_its_number_alone():
    generator = torch.get_rng_state()
    assert torch.equal(*(moved(1, 2, 3, crop=True, flip=True)["image"] for _ in range(2)))
    assert torch.equal(torch.get_rng_state(), generator)
    others = {moved(*at, crop=True)["image"].numpy().tobytes() for at in np.ndindex(3, 3, 3)}
    assert len(others) > 20


def test_a_mirrored_face_has_its_left_eye_on_the_left():
    item = FaceTransfers(Faces(2, size=64))[0]
    item["note"] = "kept"
    pairs = Faces.flip_pairs
    drawn = [moved(index=k, item=item, flip=True, flip_pairs=pairs) for k in range(40)]
    flipped = [d for d in drawn if not torch.equal(d["image"], item["image"])]
    assert 8 < len(flipped) < 32
    mirror = flipped[0]
    for name in ("image", "truth", "style_image"):
        assert torch.equal(mirror[name], item[name].flip(-1))
    for name in ("label", "style_label"):
        back = mirror[name].flip(-1)
        for region in range(19):
            partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}.get(region, region)
            assert torch.equal(back == partner, item[name] == region), region
    assert not torch.equal(mirror["label"], item["label"].flip(-1)), "without the swap it would be wrong"
    assert mirror["note"] == "kept"


def test_pictures_and_labels_are_cut_alike():
    """Grey squares: after the cut the grey of a pixel still says its label, but at the squares' borders."""
    label = torch.arange(16).reshape(4, 4).repeat_interleave(16, 0).repeat_interleave(16, 1).to(torch.uint8)
    item = {"image": tv_tensors.Image((label * 15).expand(3, 64, 64).contiguous()), "label": tv_tensors.Mask(label)}
    places = set()
    for index in range(20):
        cut = moved(index=index, item=item, crop=True)
        assert cut["image"].shape == (3, 64, 64) and cut["label"].shape == (64, 64)
        wrong = (cut["image"][0].int() - cut["label"].int() * 15).abs() > 7
        assert wrong.float().mean() < 0.03
        assert set(cut["label"].unique().tolist()) <= set(range(16))
        places.add(int((cut["label"] == 0).sum()))
    assert len(places) > 8, "cuts are at random places"
