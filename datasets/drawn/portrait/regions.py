"""The 19 regions of a face, numbered as in CelebAMask-HQ, and the tones that parts of a region may have."""

from enum import IntEnum

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
