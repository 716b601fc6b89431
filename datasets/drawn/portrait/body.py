"""Background, neck, clothes and necklace."""

import numpy as np

from datasets.drawn.portrait.pen import Pen, arc, mirrored, oval, ribbon, smooth
from datasets.drawn.portrait.plan import Plan, Region, Tone

# How far beside the neck a neckline starts, and the range of depths where it ends on the chest.
NECKLINES = {
    "crew": (0.05, 1.30, 1.40),
    "vee": (0.10, 1.50, 1.66),
    "scoop": (0.22, 1.45, 1.60),
    "shirt": (0.06, 1.50, 1.56),
    "roll": (0.05, 1.28, 1.32),
    "hood": (0.12, 1.42, 1.48),
}


def draw_background(pen: Pen, plan: Plan) -> None:
    light = plan.pick("halo", "halo", "band", "hills", "none")
    s, size = plan.side, plan.between(1.25, 1.5)
    if light == "halo":
        pen.tone(Region.BACKGROUND, Tone.GLOW, oval(-s * 0.12, -0.12, size, size))
    elif light == "band":
        pen.tone(
            Region.BACKGROUND, Tone.GLOW, np.array([(-s * 2.2, 0.4), (s * 0.9, -2.2), (s * 2.2, -2.2), (-s * 2.2, 1.6)])
        )
    elif light == "hills":
        pen.tone(Region.BACKGROUND, Tone.SOFT, oval(-s * 1.0, 2.2, 1.9, 1.9))
        pen.tone(Region.BACKGROUND, Tone.SHADOW, oval(s * 1.3, 2.2, 1.7, 1.7))
        pen.tone(Region.BACKGROUND, Tone.GLOW, oval(s * 1.1, -0.95, 0.3, 0.3))


def draw_body(pen: Pen, plan: Plan) -> None:
    """Draw neck, clothes and necklace; the head is drawn over them."""
    neck, wide, slope = plan.width * plan.between(0.46, 0.62), plan.between(1.1, 1.36), plan.between(0.0, 0.12)
    cut = plan.pick(*NECKLINES)
    beside, least, most = NECKLINES[cut]
    deep = plan.between(least, most)

    # Outline the clothes: from the neckline over the shoulder and down.
    start, high = neck + beside, 1.16 + beside * 0.35
    bend = start * 0.72, high + 0.72 * (deep - high)
    if cut in ("vee", "shirt"):
        neckline = np.array([(start, high), (0, deep), (-start, high)])
    else:
        neckline = arc([(start, high), bend, (0, deep), (-bend[0], bend[1]), (-start, high)])
    over, down = (start + 0.25, high + 0.07 + slope * 0.4), (wide + 0.22, 2.4)
    shoulder = arc([(start, high), over, (wide - 0.12, 1.36 + slope), (wide + 0.1, 1.62 + slope), down])
    cloth = np.concatenate([(shoulder * (-1, 1))[:0:-1], neckline[::-1], shoulder[1:]])

    # Draw the neck down to the chest, with the shadow of the chin, and the clothes over it.
    if cut == "hood":
        hood = smooth(mirrored([(0.2, 0.8), (neck + 0.32, 0.95), (neck + 0.42, 1.25), (0.3, 1.5)]))
        pen.fill(Region.CLOTH, hood, Tone.DEEP)
        pen.tone(Region.CLOTH, Tone.PLAIN, hood * (1, 0.6) + (0, 0.56))
    pen.fill(Region.NECK, mirrored([(neck, 0.4), (neck, 1.05), (neck + 0.12, 1.24), (start, 1.36), (start, 1.7)]))
    pen.tone(
        Region.NECK, Tone.SHADOW, arc([(neck, 0.4), (neck, 1.08), (plan.side * 0.1, 1.26), (-neck, 1.08), (-neck, 0.4)])
    )
    pen.fill(Region.CLOTH, cloth)

    # Shade the sleeves.
    outer = shoulder[shoulder[:, 1] > 1.4] * (plan.side, 1)
    pen.tone(
        Region.CLOTH,
        Tone.SOFT,
        np.concatenate([outer, [(plan.side * (wide - 0.5), 2.4), (plan.side * (wide - 0.2), 1.5)]]),
    )
    for sign in (-1, 1):
        fold = [(sign * (wide - 0.3), 1.62 + slope), (sign * (wide - 0.34), 1.8), (sign * (wide - 0.3), 2.3)]
        pen.tone(Region.CLOTH, Tone.SHADOW, ribbon(fold, 0.015, 0.05))

    # Finish the neckline.
    if cut == "shirt":
        pen.tone(Region.CLOTH, Tone.DEEP, ribbon([(0, deep), (0.01, 2.0), (0, 2.4)], 0.03, 0.03))
        for sign in (-1, 1):
            collar = np.array(
                [(start * 0.9, high - 0.1), (start + 0.16, high + 0.08), (0.36, deep + 0.02), (0.0, deep - 0.02)]
            )
            pen.fill(Region.CLOTH, collar * (sign, 1), Tone.LIGHT)
            pen.tone(Region.CLOTH, Tone.DEEP, ribbon(collar[1:] * (sign, 1), 0.03, 0.03))
    elif cut == "roll":
        pen.fill(Region.CLOTH, mirrored([(neck + 0.03, 0.98), (neck + 0.06, 1.32), (0.2, 1.42)]))
        pen.tone(Region.CLOTH, Tone.SHADOW, oval(0, 0.92, neck + 0.02, 0.2))
        pen.tone(
            Region.CLOTH, Tone.SHADOW, ribbon([(neck + 0.05, 1.28), (0, 1.43), (-neck - 0.05, 1.28)], 0.03, 0.05, 0.03)
        )
    elif cut == "hood":
        for sign in (-1, 1):
            pen.tone(
                Region.CLOTH,
                Tone.WHITE,
                ribbon([(sign * 0.22, 1.42), (sign * 0.25, 1.6), (sign * 0.2, 1.75)], 0.045, 0.04),
            )
    else:
        pen.tone(Region.CLOTH, Tone.SHADOW, np.concatenate([neckline, np.add(neckline, (0, 0.09))[::-1]]))

    # Add a necklace where the neck can be seen.
    if cut not in ("roll", "hood") and plan.chance(0.45):
        _draw_necklace(pen, plan, neck, min(deep - 0.1, plan.between(1.24, 1.45)))


def _draw_necklace(pen: Pen, plan: Plan, neck: float, low: float) -> None:
    kind, thick = plan.pick("chain", "beads", "pendant"), plan.between(0.05, 0.075)
    bend = neck * 0.72, (1.04 + 2 * low) / 3
    line = [(neck + 0.02, 1.04), bend, (0, low), (-bend[0], bend[1]), (-neck - 0.02, 1.04)]
    if kind == "beads":
        for x, y in arc(line)[::2]:
            pen.fill(Region.NECK_L, oval(x, y, thick * 0.95, thick * 0.95))
            pen.tone(Region.NECK_L, Tone.SHINE, oval(x - thick * 0.25, y - thick * 0.3, thick * 0.3, thick * 0.3))
    else:
        pen.fill(Region.NECK_L, ribbon(line, thick, thick))
    if kind == "pendant":
        pen.fill(Region.NECK_L, smooth([(0, low), (0.1, low + 0.11), (0, low + 0.22), (-0.1, low + 0.11)]))
        pen.tone(Region.NECK_L, Tone.SHINE, oval(-0.025, low + 0.09, 0.03, 0.03))
