"""Real training under a Lightning Trainer, which stops and continues at the next batch."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from datasets import GanData
from tests.support.numbers import Numbers

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's


class Recorder(LightningModule):
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
    ("options", "batches"),
    [
        (EPOCHS, 4),
        (STEPS, 4),
        (EPOCHS | {"limit_val_batches": 0}, 4),
        (STEPS | {"val_check_interval": 2}, 4),
        (EPOCHS | {"limit_train_batches": 3}, 3),
        (STEPS | {"limit_train_batches": 3, "max_steps": 9}, 3),
    ],
    ids=["epochs", "steps", "no validation", "validation inside", "limited epochs", "limited steps"],
)
def test_training_goes_on_at_the_next_batch_from_every_checkpoint(tmp_path, options, batches):
    whole = train(tmp_path, **options)
    assert [epoch for epoch, _ in whole] == [epoch for epoch in range(3) for _ in range(batches)]
    assert len({tuple(sorted(batch)) for _, batch in whole}) == 3 * batches, "epochs differ"
    for step in range(1, 3 * batches):
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
