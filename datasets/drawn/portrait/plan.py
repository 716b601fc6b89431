"""The plan of a face: what more than one of its parts has to know, and the dice for the rest."""

from random import Random
from typing import TypeVar

T = TypeVar("T")

SHORT = ("bald", "ring", "buzz", "parted", "quiff", "spiky", "fringe", "curly", "afro")
TIED = ("bun", "tail", "pigtails")
LONG = ("long", "wavy", "bob")
HATS = ("beanie", "cap", "brim", "beret")
GLASSES = ("round", "square", "cat", "sun")


class Plan:
    """Decides on a face, part after part, from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

        # Choose the head.
        self.side = self.pick(-1, 1)  # of the parting, of the shadow and of whatever is on one side only
        self.width = self.between(0.70, 0.84)  # of the head, half
        self.jaw = self.between(0.74, 0.92)  # its part that is left at the jaw
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
        """Whether the hair falls over the ears, and over what hangs on them."""
        return self.hair in LONG

    def between(self, low: float, high: float) -> float:
        """A number of the range."""
        return low + (high - low) * self._random()

    def chance(self, share: float) -> bool:
        """True in that share of the faces."""
        return self._random() < share

    def pick(self, *choices: T) -> T:
        """One of the choices, each as likely as the others."""
        return choices[int(self._random() * len(choices))]
