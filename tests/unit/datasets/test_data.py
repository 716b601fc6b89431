"""Batches: the same at any number of ranks, augmented by sample, and resumed where they stopped."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset, DistributedSampler
from torchvision import tv_tensors

from datasets import Augment, Faces, FaceTransfers, GanData, GlobalBatches, ResumableLoader
from datasets.augment import Prepared, to_tensors
from gan.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "Using ModelCheckpoint with manual",
        "Checkpoint directory",
        "The dirpath has changed",
        "Be aware that when using .ckpt_path.",
        ".isinstance.treespec",
    )
]


class Numbers(Dataset):
    """Samples that say who they are."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"index": index}


def part(ranks, rank, epoch=0, length=26, batch=8, seed=0, training=True):
    sampler = GlobalBatches(length, batch, ranks=ranks, rank=rank, seed=seed, training=training)
    sampler.set_epoch(epoch)
    pairs = list(sampler)
    assert len(pairs) == len(sampler) and {e for e, _ in pairs} <= {epoch}
    return [index for _, index in pairs]


def together(ranks, batch=8, **options):
    """The global batches that all ranks see together."""
    parts = [part(ranks, rank, batch=batch, **options) for rank in range(ranks)]
    share = batch // ranks
    return [[index for p in parts for index in p[k : k + share]] for k in range(0, len(parts[0]), share)]


def epoch_of(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return [batch["index"].tolist() for batch in loader]


# Global batches.


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("epoch", [0, 3])
def test_ranks_together_see_what_one_device_sees(training, epoch):
    options = {"epoch": epoch, "training": training, "length": 28 if not training else 26}
    alone = together(1, **options)
    for ranks in (2, 4):
        assert together(ranks, **options) == alone
    control = [GlobalBatches(26, 8, ranks=2, rank=rank, seed=rank) for rank in range(2)]
    assert [i for s in control for _, i in s] != [i for b in together(2) for i in b], "ranks of unequal seeds disagree"


def test_an_epoch_holds_every_sample_once_but_for_the_last_incomplete_batch():
    batches = together(1)
    assert [len(batch) for batch in batches] == [8, 8, 8]
    assert len({index for batch in batches for index in batch}) == 24


def test_every_epoch_and_every_seed_shuffles_anew():
    orders = {tuple(part(1, 0, epoch=epoch, seed=seed)) for epoch in range(4) for seed in range(3)}
    assert len(orders) == 12
    assert part(1, 0, epoch=2) == part(1, 0, epoch=2)
    assert part(1, 0) != sorted(part(1, 0))


def test_held_out_samples_come_in_order_and_once():
    assert part(1, 0, length=10, training=False) == list(range(10))
    for ranks in (2, 4):
        parts = [part(ranks, rank, length=10, training=False) for rank in range(ranks)]
        assert sorted(index for p in parts for index in p) == list(range(10 - 10 % ranks))
        assert len({len(p) for p in parts}) == 1, "ranks wait for each other"


def test_lightning_leaves_the_sampler_alone_and_an_epoch_can_start_inside():
    sampler = GlobalBatches(26, 8)
    assert isinstance(sampler, DistributedSampler)
    whole = [list(sampler), (sampler.set_epoch(1), list(sampler))[1]]
    sampler.resume(1, 2)
    sampler.set_epoch(1)
    assert len(sampler) == 24, "the length is that of an epoch wherever it starts"
    assert list(sampler) == whole[1][16:]
    assert list(sampler) == whole[1], "only the next pass starts inside"
    sampler.resume(0, 2)
    sampler.set_epoch(1)
    assert list(sampler) == whole[1], "another epoch starts at its beginning"


# The loader.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_after_what_was_handed_out(workers):
    def loader(ranks=1, rank=0):
        return ResumableLoader(
            Prepared(Numbers(40)), GlobalBatches(40, 4, ranks=ranks, rank=rank, seed=7), workers=workers
        )

    first = loader()
    first.sampler.set_epoch(2)
    passing = iter(first)
    seen = [next(passing)["index"].tolist() for _ in range(3)]
    state = first.state_dict()
    assert (state["epoch"], state["batch"]) == (2, 3), "batches prepared ahead do not count"
    rest = [batch["index"].tolist() for batch in passing]
    assert len(seen + rest) == 10

    second = loader()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert epoch_of(second, 2) == rest
    assert epoch_of(second, 3) == epoch_of(first, 3), "the next epoch starts at its beginning"

    # Another number of ranks goes on at the same place.
    halves = [loader(2, rank) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    assert [a + b for a, b in zip(*(epoch_of(half, 2) for half in halves), strict=True)] == rest


def test_nothing_is_prepared_before_the_epoch_is_known():
    loader = ResumableLoader(Prepared(Numbers(40)), GlobalBatches(40, 4), workers=1)
    early = iter(loader)
    loader.sampler.set_epoch(5)
    assert next(early)["index"].tolist() == [i for _, i in list(_sampler(epoch=5))[:4]]


def _sampler(epoch):
    sampler = GlobalBatches(40, 4)
    sampler.set_epoch(epoch)
    return sampler


@pytest.mark.parametrize(
    "length, batch, seed, message",
    [
        (40, 8, 0, "batch size 4, this run has 8; resume with 4"),
        (44, 4, 0, "samples 40, this run has 44"),
        (40, 4, 1, "seed 0, this run has 1"),
    ],
)
def test_another_order_is_not_resumed(length, batch, seed, message):
    state = ResumableLoader(Prepared(Numbers(40)), GlobalBatches(40, 4)).state_dict()
    other = ResumableLoader(Prepared(Numbers(length)), GlobalBatches(length, batch, seed=seed))
    with pytest.raises(UserError, match=message):
        other.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_global_random_state_alone(workers):
    data = GanData(Faces(8, size=16), batch_size=4, workers=workers, crop=True)
    before = torch.get_rng_state()
    list(data.train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


# Augmentation.


def moved(seed=0, epoch=0, index=0, item=None, **options):
    item = Faces(1, size=64)[0] if item is None else item
    return Augment(seed, **{"flip": False, "crop": False, **options})(item, epoch, index)


def test_what_happens_to_a_sample_depends_on_its_number_alone():
    same = [moved(1, 2, 3, crop=True, flip=True)["image"] for _ in range(2)]
    assert torch.equal(*same)
    others = {tuple(moved(*at, crop=True)["image"].flatten()[:500].tolist()) for at in np.ndindex(3, 3, 3)}
    assert len(others) > 20
    generator = torch.get_rng_state()
    moved(crop=True, flip=True)
    assert torch.equal(torch.get_rng_state(), generator)


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


def test_a_cut_keeps_224_of_256():
    ramp = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    cut = moved(item={"label": tv_tensors.Mask(ramp)}, crop=True)["label"]
    assert 226 <= int(cut.max()) - int(cut.min()) <= 230  # 256 * 256 / 286 = 229


def test_tensors_for_the_networks():
    item = to_tensors({**Faces(1)[0], "name": "zero"})
    image, label = item["image"], item["label"]
    assert type(image) is type(label) is torch.Tensor
    assert image.dtype == torch.float32 and -1 <= image.min() < -0.5 and 0.5 < image.max() <= 1
    assert label.dtype == torch.int64 and label.max() < 19
    assert item["name"] == "zero"
    ends = to_tensors({"image": tv_tensors.Image(torch.tensor([[[0, 255]]], dtype=torch.uint8))})["image"]
    assert ends.tolist() == [[[-1, 1]]]


# The DataModule.


def placed(data, ranks, rank=0):
    """The data as a rank of a larger run sees it."""
    data.trainer = SimpleNamespace(world_size=ranks, global_rank=rank, overfit_batches=0)
    return data


def faces_data(**options):
    return GanData(Faces(9, size=16), Faces(6, size=16, first=100), **{"batch_size": 4, "crop": True, **options})


@pytest.mark.parametrize("which", ["train_dataloader", "val_dataloader"])
def test_ranks_together_get_the_tensors_of_one_device(which):
    alone = list(getattr(faces_data(), which)())
    for ranks in (2,):
        data = [placed(faces_data(), ranks, rank) for rank in range(ranks)]
        for d in data:
            d.setup("fit")
        for whole, *shares in zip(alone, *(getattr(d, which)() for d in data), strict=True):
            for name in whole:
                assert torch.equal(whole[name], torch.cat([share[name] for share in shares])), name


def test_workers_change_nothing():
    alone, helped = faces_data().train_dataloader(), faces_data(workers=2).train_dataloader()
    for epoch in (0, 1):
        alone.sampler.set_epoch(epoch), helped.sampler.set_epoch(epoch)
        for one, other in zip(alone, helped, strict=True):
            assert torch.equal(one["image"], other["image"]) and torch.equal(one["label"], other["label"])


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
        ({"batch_size": 10}, 4, r"batch 10 is not divisible by 4 ranks; try --batch-size 8 or --batch-size 12"),
        ({"batch_size": 2}, 4, r"batch 2 is not divisible by 4 ranks; try --batch-size 4"),
        ({"batch_size": 0}, 4, r"batch 0 is empty; try --batch-size 4"),
        ({"batch_size": 64}, 4, r"50 training samples do not fill a batch of 64; try --batch-size 48"),
        ({"batch_size": 64}, 64, r"50 training samples do not fill a batch of 64; try at most 50 ranks"),
        (
            {"batch_size": 8, "val_batch_size": 6},
            4,
            r"validation batch 6 .* try --val-batch-size 4 or --val-batch-size 8",
        ),
        ({"batch_size": 8, "val_batch_size": 0}, 4, r"validation batch 0 is empty"),
        ({"batch_size": 8, "val": Numbers(3)}, 4, r"3 held-out samples are too few for 4 ranks; hold out 4 or more"),
    ],
)
def test_what_cannot_be_split_is_refused(options, ranks, message):
    with pytest.raises(UserError, match=message):
        placed(GanData(Numbers(50), **{"val": Numbers(8), **options}), ranks).setup("fit")


def test_overfitting_is_refused():
    data = placed(GanData(Numbers(50), batch_size=2), 1)
    data.trainer.overfit_batches = 2
    with pytest.raises(UserError, match="try limit_train_batches"):
        data.setup("fit")


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


# Real training that stops and goes on.


class Recorder(LightningModule):
    """Learns nothing and remembers its batches."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch):
        self.seen.append((self.trainer.current_epoch, batch["index"].tolist()))
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight * 1.0)
        optimizer.step()

    def validation_step(self, batch):
        self.log("score", float(self.trainer.global_step))


QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
EPOCHS = {"max_epochs": 3}
STEPS = {"max_epochs": -1, "max_steps": 12}


def train(folder, resume=None, workers=0, save=None, **options):
    """Epochs of four batches, by default with a checkpoint after every batch; gives the batches that were seen."""
    module = Recorder()
    save = {"filename": "{step}", "every_n_train_steps": 1} if save is None else save
    keep = ModelCheckpoint(folder, save_top_k=-1, enable_version_counter=False, **save)
    trainer = Trainer(callbacks=[keep], **QUIET, **options)
    data = GanData(Numbers(18), Numbers(4), batch_size=4, workers=workers)
    trainer.fit(module, data, ckpt_path=resume)
    return module.seen


@pytest.mark.parametrize(
    "options",
    [EPOCHS, STEPS, EPOCHS | {"limit_val_batches": 0}, STEPS | {"val_check_interval": 2}],
    ids=["epochs", "steps", "no validation", "validation inside"],
)
def test_training_goes_on_at_the_next_batch_from_every_checkpoint(tmp_path, options):
    whole = train(tmp_path, **options)
    assert [epoch for epoch, _ in whole] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({tuple(sorted(batch)) for _, batch in whole}) == 12, "epochs differ"
    for step in range(1, 12):
        resumed = train(tmp_path / "resumed", tmp_path / f"step={step}.ckpt", **options)
        assert [batch for _, batch in resumed] == [batch for _, batch in whole[step:]], step


def test_training_goes_on_with_workers(tmp_path):
    whole = train(tmp_path, workers=2, **EPOCHS)
    for step in (2, 4):
        assert train(tmp_path / "resumed", tmp_path / f"step={step}.ckpt", workers=1, **EPOCHS) == whole[step:]


@pytest.mark.parametrize("options", [EPOCHS, STEPS], ids=["epochs", "steps"])
@pytest.mark.parametrize("at_the_end", [True, False], ids=["at the end", "after validation"])
def test_training_goes_on_from_checkpoints_of_whole_epochs(tmp_path, options, at_the_end):
    save = {"filename": "{step}", "save_on_train_epoch_end": at_the_end}
    whole = [batch for _, batch in train(tmp_path, save=save, **options)]
    for step in (4, 8):
        resumed = train(tmp_path / "resumed", tmp_path / f"step={step}.ckpt", **options)
        assert [batch for _, batch in resumed] == whole[step:], step

    # A resumed run can be resumed.
    again = train(tmp_path / "again", tmp_path / "resumed" / "step=10.ckpt", **options)
    assert [batch for _, batch in again] == whole[10:]


@pytest.mark.parametrize("options", [EPOCHS, STEPS | {"max_steps": 9}], ids=["epochs", "steps"])
def test_training_of_limited_epochs_goes_on(tmp_path, options):
    options = options | {"limit_train_batches": 3}
    whole = [batch for _, batch in train(tmp_path, **options)]
    assert len(whole) == 9
    for step in range(1, 9):
        resumed = train(tmp_path / "resumed", tmp_path / f"step={step}.ckpt", **options)
        assert [batch for _, batch in resumed] == whole[step:], step
