"""Lightning's way to checkpoints: directories, there whole or not at all."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from gan.errors import UserError
from strategies.checkpoint import directory
from strategies.checkpoint.directory import ALONE, Ranks


class WholeCheckpointIO(CheckpointIO):
    """Writes by all ranks together; loads without ever unpickling code."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Every rank must call it, with its own shares in the checkpoint."""
        if storage_options is not None:
            raise UserError("checkpoints are written to a local or mounted disk; leave storage_options out")
        directory.save(path, checkpoint, self.ranks)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What is in a checkpoint; its tensors are read when they are wanted.

        Its values are plain, unless the caller insists on `weights_only=False`.
        """
        return directory.load(path, weights_only is not False)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Away with it."""
        directory.remove(path)
