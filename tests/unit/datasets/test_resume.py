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
        self.seen.append(batch["index"].tolist())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight * 1.0)
        optimizer.step()

    def validation_step(self, batch):
        self.log("score", float(self.trainer.global_step))


QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
EPOCHS, STEPS = {"max_epochs": 3}, {"max_epochs": -1, "max_steps": 12}
EACH = {"every_n_train_steps": 1}


def train(folder, resume=None, workers=0, save=EACH, **options):
    """The batches that were seen, in epochs of four."""
    module = Recorder()
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, enable_version_counter=False, **save)
    trainer = Trainer(callbacks=[keep], **QUIET, **options)
    trainer.fit(module, GanData(Numbers(18), Numbers(4), batch_size=4, workers=workers), ckpt_path=resume)
    return module.seen


@pytest.mark.parametrize(
    ("options", "save", "workers"),
    [
        (EPOCHS, EACH, 0),
        (EPOCHS, EACH, 2),
        (EPOCHS | {"limit_train_batches": 3}, EACH, 0),
        (EPOCHS | {"limit_val_batches": 0}, {"save_on_train_epoch_end": True}, 0),
        (STEPS | {"val_check_interval": 2}, EACH, 0),
        (STEPS | {"limit_train_batches": 3, "max_steps": 9}, EACH, 0),
        (STEPS, {"save_on_train_epoch_end": True}, 0),
        (STEPS, {"save_on_train_epoch_end": False}, 0),  # but after validation
    ],
)
def test_training_goes_on_at_the_next_batch_from_every_checkpoint(options, save, workers, tmp_path):
    """Also from the checkpoint of a resumed run."""
    whole = train(tmp_path, save=save, **options)
    assert len({*map(tuple, map(sorted, whole))}) == len(whole), "epochs differ"
    steps = sorted(int(path.stem.partition("=")[2]) for path in tmp_path.glob("*.ckpt"))
    for step in [2, 3, 4, 7] if len(steps) > 8 else steps[:2]:
        resumed = train(tmp_path / "resumed", tmp_path / f"step={step}.ckpt", workers, **options)
        assert resumed == whole[step:], step
    again = train(tmp_path / "again", tmp_path / "resumed" / f"step={len(whole) - 2}.ckpt", **options)
    assert again == whole[-2:]
