"""Checkpoint files that are there whole or not at all.

Lightning's own writer goes through a temporary file that may lie on another disk, whence it is copied: a kill
in the middle of that copy leaves half a file under the final name.
"""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from gan.errors import UserError


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, then renames; loads without ever unpickling code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write, flush to the disk, rename: the last step is atomic, and until then the old file stays."""
        if storage_options is not None:
            raise UserError("checkpoints are written to a local or mounted disk; leave storage_options out")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint as plain tensors and values, unless the caller insists on `weights_only=False`."""
        if not Path(path).is_file():
            raise UserError(f"no checkpoint at {path}; look in the run's checkpoints/ folder, or type --resume auto")
        try:
            return torch.load(path, map_location=map_location, weights_only=weights_only is not False)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{path} cannot be read as a checkpoint: {reason}") from error
