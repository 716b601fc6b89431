"""The plan of a face: choices that several parts depend on, and random numbers for the rest."""

from random import Random
from typing import TypeVar

T = TypeVar("T")

SHORT = ("bald", "ring", "buzz", "parted", "quiff", "spiky", "fringe", "curly", "afro")
TIED = ("bun", "tail", "pigtails")
LONG = ("long", "wavy", "bob")
HATS = ("beanie", "cap", "brim", "beret")
GLASSES = ("round", "square", "cat", "sun")


class Plan:
    """Chooses a face from one seed. The order of the calls matters: each takes the next random number."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

        # Choose the head.
        self.side = self.pick(-1, 1)  # where the parting, the shadow and other one-sided things are
        self.width = self.between(0.70, 0.84)  # half the width of the head
        self.jaw = self.between(0.74, 0.92)  # the width at the jaw, as a part of that
        self.turn = self.between(-0.10, 0.10)
        self.size = self.between(0.285, 0.325)
        self.x, self.y = self.between(0.47, 0.53), self.between(0.455, 0.49)

        # Choose the eyes.
        self.eye_x = self.width * self.between(0.43, 0.50)
        self.eye_y = self.between(-0.02, 0.08)

        # Choose what is worn.
        self.hair = self.pick(*SHORT, *TIED, *LONG)
        self.hat = self.pick(*HATS) if self.chance(0.22) else None
        self.glasses = self.pick(*GLASSES) if self.chance(0.28) else None

    @property
    def ears_hidden(self) -> bool:
        return self.hair in LONG

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random()

    def chance(self, share: float) -> bool:
        """True for this share of all faces."""
        return self._random() < share

    def pick(self, *choices: T) -> T:
        return choices[int(self._random() * len(choices))]
