"""The interface through which Lightning saves, loads and removes checkpoints."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from gan.checkpoint import load
from gan.errors import UserError
from strategies.checkpoint.folders import remove
from strategies.checkpoint.ranks import ALONE, SavingRanks
from strategies.checkpoint.writing import save


class WholeCheckpointIO(CheckpointIO):
    """All ranks write a checkpoint together. It appears completely or not at all. Loading runs no code."""

    def __init__(self, ranks: SavingRanks = ALONE) -> None:
        self.ranks = ranks

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Every rank must call it, with its own shares in the checkpoint."""
        if storage_options is not None:
            raise UserError("checkpoints are written to a local or mounted disk; leave storage_options out")
        save(path, checkpoint, self.ranks)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A checkpoint's tree. The tensors in it are read later, when they are needed."""
        return load(path, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove(path)
