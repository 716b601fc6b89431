"""The plan of a face: choices that several parts depend on, and random numbers for the rest."""

from enum import IntEnum
from random import Random
from typing import TypeVar

Region = IntEnum(
    "Region",
    "BACKGROUND SKIN NOSE EYE_G L_EYE R_EYE L_BROW R_BROW L_EAR R_EAR"
    " MOUTH U_LIP L_LIP HAIR HAT EAR_R NECK_L NECK CLOTH",
    start=0,
)

LABELS: tuple[str, ...] = tuple(region.name.lower() for region in Region)

# A mirrored picture shows a left eye where the right one was.
FLIP_PAIRS: tuple[tuple[int, int], ...] = (
    (int(Region.L_EYE), int(Region.R_EYE)),
    (int(Region.L_BROW), int(Region.R_BROW)),
    (int(Region.L_EAR), int(Region.R_EAR)),
)

Tone = IntEnum("Tone", "PLAIN SOFT SHADOW DEEP DARK INK BLUSH GLOW LIGHT SHINE WHITE", start=0)

# How a tone changes a colour: factors for red, green and blue, then a share of white.
TONES: dict[Tone, tuple[float, float, float, float]] = {
    Tone.PLAIN: (1, 1, 1, 0),
    Tone.SOFT: (0.94, 0.93, 0.94, 0),
    Tone.SHADOW: (0.86, 0.84, 0.87, 0),
    Tone.DEEP: (0.70, 0.67, 0.71, 0),
    Tone.DARK: (0.45, 0.42, 0.46, 0),
    Tone.INK: (0.17, 0.15, 0.19, 0),
    Tone.BLUSH: (1.0, 0.89, 0.89, 0),
    Tone.GLOW: (1, 1, 1, 0.16),
    Tone.LIGHT: (1, 1, 1, 0.24),
    Tone.SHINE: (1, 1, 1, 0.5),
    Tone.WHITE: (1, 1, 1, 0.93),
}


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
