"""The step that each rank of this host has begun, in a small file. When a rank is killed, its agent reads it there."""

import os
import struct
from pathlib import Path

from gan.errors import UserError

NEVER = -1  # no step has begun
_STEP = struct.Struct("<q")


class Progress:
    """The rank's side. Without an agent it writes nothing."""

    VARIABLE = "GAN_STEPS"  # the environment variable with the file's path

    def __init__(self) -> None:
        path = os.environ.get(self.VARIABLE)
        try:
            self._file = os.open(path, os.O_WRONLY) if path and Path(path).exists() else None
        except OSError as error:
            raise UserError(
                f"the environment variable {self.VARIABLE} is '{path}', which cannot be written to ({error.strerror}); "
                f"unset it"
            ) from error
        self._where = _STEP.size * int(os.environ.get("LOCAL_RANK", 0))

    def begin(self, step: int) -> None:
        """Call it before each step. It takes a microsecond."""
        if self._file is not None:
            os.pwrite(self._file, _STEP.pack(step), self._where)

    @classmethod
    def clear(cls, ranks: int) -> None:
        """The agent's side: no rank has begun a step."""
        Path(os.environ[cls.VARIABLE]).write_bytes(_STEP.pack(NEVER) * ranks)

    @classmethod
    def read(cls, ranks: int) -> list[int]:
        """The agent's side: the step of each rank of this host."""
        return [step for (step,) in _STEP.iter_unpack(Path(os.environ[cls.VARIABLE]).read_bytes())][:ranks]
