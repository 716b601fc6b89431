"""The one DataModule: any data set, in batches that are the same at any number of ranks."""

from lightning.pytorch import LightningDataModule

from datasets.augment import Augment, Prepared, Samples
from datasets.batches import GlobalBatches, ResumableLoader, check_divides, check_held_out
from datasets.workers import usual
from gan.files.errors import UserError

FEW = 256  # held-out samples that a rank reads without workers


class GanData(LightningDataModule):
    """Training and held-out samples of a run. `batch_size` counts the samples of all ranks together.

    Each rank gets an equal part of every batch, and a sample's augmentation depends on its own number. So all ranks
    together see what one device would see. Held-out samples are not augmented or shuffled; validation uses the first
    `val_count` of them, by default all.

    `workers` are processes of each rank that prepare training batches, and those of many held-out samples. With None
    there are so many as the rank has CPUs, and at most 4. `new_data`: a resumed run may have other samples.
    """

    def __init__(
        self,
        train: Samples,
        val: Samples | None = None,
        *,
        batch_size: int,
        val_count: int | None = None,
        workers: int | None = 0,
        seed: int = 0,
        flip: bool = True,
        crop: bool = False,
        new_data: bool = False,
    ) -> None:
        super().__init__()
        self.train, self.val = train, val
        self.batch_size = batch_size
        self.val_count = min(val_count or len(val), len(val)) if val is not None else 0
        self.asked_workers, self.seed, self.flip, self.crop = workers, seed, flip, crop
        self.new_data = new_data

    @property
    def workers(self) -> int:
        if self.asked_workers is not None:
            return self.asked_workers
        return usual(self.trainer.world_size // self.trainer.num_nodes if self.trainer is not None else 1)

    def setup(self, stage: str | None = None) -> None:
        """Refuse, before the first step, what cannot be split into equal parts."""
        _, ranks = self._rank_of_ranks()
        check_divides(self.batch_size, ranks, "--batch-size ")
        if len(self.train) < self.batch_size:
            # A power of two for each rank: where the ranks are not known yet, most of them can share that too.
            fits = ranks << (len(self.train) // ranks).bit_length() >> 1
            advice = f"try --batch-size {fits}" if fits >= ranks else f"try at most {len(self.train)} ranks"
            raise UserError(f"{len(self.train)} training samples do not fill a batch of {self.batch_size}; {advice}")
        if self.val is not None:
            check_held_out(self.val_count, ranks, by=" by --held-out")

    def train_dataloader(self) -> ResumableLoader:
        """This rank's part of the training batches, in another order in every epoch."""
        augment = Augment(self.seed, self.flip, self.crop, getattr(self.train, "flip_pairs", ()))
        return self._loader(Prepared(self.train, augment), len(self.train), self.batch_size, training=True)

    def val_dataloader(self) -> ResumableLoader | list:
        """This rank's part of the held-out batches, in order. The last batch may be smaller."""
        if self.val is None:
            return []
        return self._loader(Prepared(self.val), self.val_count, self.batch_size, training=False)

    def _loader(self, dataset: Prepared, count: int, batch_size: int, training: bool) -> ResumableLoader:
        rank, ranks = self._rank_of_ranks()
        sampler = GlobalBatches(count, batch_size, ranks=ranks, rank=rank, seed=self.seed, training=training)
        workers = self.workers if training or count > FEW else 0
        return ResumableLoader(dataset, sampler, workers=workers, new_data=self.new_data)

    def _rank_of_ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
