"""Files are cut from what they hold, at the published place and size; edges move along."""

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torchvision import tv_tensors

from datasets import Augment, Faces, FolderPairs, GanData
from datasets.augment import Prepared, to_tensors
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
        fits = [
            (top, left)
            for top in range(5)
            for left in range(9)
            if torch.equal(larger["image"][:, top : top + 32, left : left + 64], cut["image"])
        ]
        assert len(fits) == 1
        ((top, left),) = fits
        assert torch.equal(larger["label"][top : top + 32, left : left + 64], cut["label"])
        places.add(fits[0])
    assert {top for top, _ in places} == set(range(5)) and len({left for _, left in places}) == 9


def test_a_cut_from_the_file_is_sharper_than_one_that_was_enlarged(pairs):
    whole = Augment(flip=False, crop=True)
    cut, enlarged = whole.load(pairs, 0, 0), whole(pairs[0], 0, 0)
    assert cut["image"].float().std() > 1.05 * enlarged["image"].float().std()
    assert torch.equal(whole.load(Subset(pairs, [0]), 0, 0)["image"], enlarged["image"]), "what hides the files"


def test_without_a_crop_and_for_drawn_pictures_nothing_is_read_twice(pairs):
    plain = Augment(flip=True)
    assert torch.equal(plain.load(pairs, 3, 0)["image"], plain(pairs[0], 3, 0)["image"])
    faces, crop = Faces(2, size=16), Augment(crop=True)
    assert torch.equal(crop.load(faces, 1, 1)["image"], crop(faces[1], 1, 1)["image"])


def test_edges_are_cut_and_mirrored_with_the_picture(tmp_path):
    """Two instances side by side: their edge follows the border between their labels, wherever it goes."""
    written = cityscapes(tmp_path)
    values = np.full((64, 128), 7)
    values[:, 40:] = 26
    for path in (written.pictures[0], written.labels[0], written.labels[0].with_name("x")):
        if path.name == "x":
            path = written.labels[0].with_name(written.labels[0].name.replace("labelIds", "instanceIds"))
        put(path, values if path != written.pictures[0] else np.repeat(values[..., None], 3, 2) * 5)
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


def test_edges_of_other_data_move_too():
    edges = torch.zeros(16, 16, dtype=torch.uint8)
    edges[:, 3] = 1
    item = {"edges": tv_tensors.Mask(edges)}
    flipped = next(moved for k in range(20) if (moved := Augment()(item, k, 0))["edges"][0, 3] == 0)
    assert torch.equal(flipped["edges"], edges.flip(-1))


def test_the_data_module_cuts_files(pairs):
    data = GanData(pairs, pairs, batch_size=1, crop=True, flip=False)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    expected = to_tensors(Augment(0, flip=False, crop=True).load(pairs, 0, 0))
    assert torch.equal(batch["image"][0], expected["image"]) and torch.equal(batch["label"][0], expected["label"])
    assert torch.equal(Prepared(pairs)[0, 0]["image"], to_tensors(pairs[0])["image"]), "held-out samples stay whole"
