"""Lightning's way to checkpoints, with folders that are there whole or not at all."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from gan.checkpoint import load
from gan.errors import UserError
from strategies.checkpoint.folders import remove
from strategies.checkpoint.ranks import ALONE, Ranks
from strategies.checkpoint.writing import save


class WholeCheckpointIO(CheckpointIO):
    """Writes by all ranks together; loads without running code."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Every rank must call it, with its own shares in the checkpoint."""
        if storage_options is not None:
            raise UserError("checkpoints are written to a local or mounted disk; leave storage_options out")
        save(path, checkpoint, self.ranks)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A checkpoint's tree; its tensors are read when they are wanted.

        Its values are plain, unless the caller insists on `weights_only=False`.
        """
        return load(path, weights_only is not False)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove(path)
