"""The data module: what ranks get together is what one device gets."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import Faces, GanData, workers
from datasets.augment import to_tensors
from gan.files.errors import UserError
from tests.support.numbers import Numbers


def placed(data, ranks, rank=0):
    """The data as a rank of a larger run sees it."""
    data.trainer = SimpleNamespace(world_size=ranks, global_rank=rank)
    return data


def faces_data(**options):
    return GanData(Faces(9, size=16), Faces(6, size=16, first=100), **{"batch_size": 4, "crop": True, **options})


@pytest.mark.parametrize("which", ["train_dataloader", "val_dataloader"])
def test_ranks_together_get_the_tensors_of_one_device(which):
    data = [placed(faces_data(), 2, rank) for rank in range(2)]
    for each in data:
        each.setup("fit")
    for whole, *shares in zip(*(getattr(each, which)() for each in (faces_data(), *data)), strict=True):
        for name in whole:
            assert torch.equal(whole[name], torch.cat([share[name] for share in shares])), name


def test_without_a_word_ranks_share_the_cpus_and_few_samples_are_read_without_workers(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 6)
    data = faces_data(workers=None)
    assert (data.train_dataloader().num_workers, data.val_dataloader().num_workers) == (4, 0)
    for ranks, hosts, wanted in ((2, 1, 3), (4, 2, 3), (16, 1, 1)):
        placed(data, ranks).trainer.num_nodes = hosts
        assert data.workers == wanted
    many = GanData(Faces(9, size=16), Faces(300, size=16, first=100), batch_size=4, workers=2)
    assert many.val_dataloader().num_workers == 2


def test_epochs_augment_anew_and_held_out_samples_stay_as_they_are():
    data = GanData(Faces(2, size=16), Faces(3, size=16), batch_size=2, crop=True)
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        epochs.append(torch.cat([batch["image"] for batch in loader]).sort(0).values)
    assert not torch.equal(*epochs)
    held_out = torch.cat([batch["image"] for batch in data.val_dataloader()])
    assert torch.equal(held_out, torch.stack([to_tensors(item)["image"] for item in Faces(3, size=16)]))
    assert GanData(Faces(2), batch_size=2).val_dataloader() == []


@pytest.mark.parametrize(
    "options, ranks, message",
    [
        ({"batch_size": 10}, 4, r"10 is not divisible by 4 ranks; try --batch-size 8 or --batch-size 12, or 2 ranks$"),
        ({"batch_size": 2}, 4, r"batch 2 is not divisible by 4 ranks; try --batch-size 4, or 2 ranks$"),
        ({"batch_size": 0}, 4, r"batch 0 is empty; try --batch-size 4"),
        ({"batch_size": 64}, 4, r"50 training samples do not fill a batch of 64; try --batch-size 32"),
        ({"batch_size": 64}, 64, r"50 training samples do not fill a batch of 64; try --batch-size 32 on 32 ranks$"),
        ({"batch_size": 45}, 40, r"batch 45 is not divisible by 40 ranks; try --batch-size 40, or 15 ranks$"),
        ({"batch_size": 64}, 1, r"50 training samples do not fill a batch of 64; try --batch-size 32"),
        ({"batch_size": 64, "new_data": True}, 1, r"a resumed run keeps its batch, so give it 64 or more to train on$"),
        ({"batch_size": 8, "val": Numbers(3)}, 4, r"3 held-out .* for 4 ranks; hold out 4 or more by --held-out$"),
    ],
)
def test_what_cannot_be_split_is_refused(options, ranks, message):
    with pytest.raises(UserError, match=message):
        placed(GanData(Numbers(50), **{"val": Numbers(8), **options}), ranks).setup("fit")


def test_validation_may_look_at_the_first_held_out_samples_only():
    data = GanData(Faces(4, size=16), Faces(5, size=16), batch_size=2, val_count=3)
    data.setup()
    assert [len(batch["image"]) for batch in data.val_dataloader()] == [2, 1]
    assert len(data.val) == 5
    assert GanData(Faces(4, size=16), Faces(5, size=16), batch_size=2, val_count=30).val_count == 5


def test_held_out_samples_that_are_left_out_are_named():
    with pytest.warns(UserWarning, match="2 of 10 held-out samples are left out, so that 4 ranks get equally many"):
        placed(GanData(Numbers(8), Numbers(10), batch_size=8), 4).setup("fit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed(GanData(Numbers(8), Numbers(8), batch_size=8), 4).setup("fit")


KINDS = {
    "picture": Image.fromarray,
    "palette": lambda pixels: Image.fromarray(pixels).convert("P"),
    "gray": lambda pixels: Image.fromarray(pixels[:, :, 0]),
    "array": np.asarray,
    "plane": lambda pixels: pixels[:, :, 0],
    "bytes": lambda pixels: torch.from_numpy(pixels).permute(2, 0, 1),
}


class Given(Numbers):
    """What torchvision's sets give: a picture in some form, alone or with its class."""

    def __init__(self, kind, labelled):
        super().__init__(6)
        self.kind, self.labelled = kind, labelled

    def __getitem__(self, index):
        sample = KINDS[self.kind](np.full((4, 6, 3), 40 * index, np.uint8))
        return (sample, index) if self.labelled else sample


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_torchvisions_sets_give_becomes_pictures_and_classes(kind, labelled):
    data = GanData(Given(kind, labelled), Given(kind, labelled), batch_size=3, flip=True)
    for batch in (*data.train_dataloader(), *data.val_dataloader()):
        assert batch["image"].shape == (3, 1 if kind in ("gray", "plane") else 3, 4, 6)
        assert ("class" in batch) == labelled
        assert batch["image"].dtype == torch.float32
        if labelled and kind != "palette":
            assert torch.equal(batch["image"].amax((1, 2, 3)), batch["class"] * 40 / 127.5 - 1)
