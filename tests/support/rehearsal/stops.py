"""A run that a person writes: a tiny R3GAN, which presses Ctrl-C itself after the step that the environment names."""

import os
import signal
from typing import Any

from datasets import Faces, GanData
from gan.games.r3gan import R3Gan
from gan.runs import Run
from nets.r3 import R3Discriminator, R3Generator

VARIABLE = "STOP_AFTER"


class Stops(R3Gan):
    def on_train_batch_end(self, *_: Any) -> None:
        if os.environ.get(VARIABLE) == str(self.step):
            signal.raise_signal(signal.SIGINT)


def stops(max_steps: int = 6, batch_size: int = 4, workers: int = 0, seed: int = 0) -> Run:
    game = Stops(R3Generator(4, [4, 4, 4]), R3Discriminator([4, 4, 4]), batch_size=batch_size)
    train, val = Faces(12, size=16), Faces(4, size=16, first=1000)
    return Run(game, GanData(train, val, batch_size=batch_size, workers=workers, seed=seed), max_steps)
