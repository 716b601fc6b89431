"""Portraits drawn from a seed: a plan, then part after part from back to front.

Lengths are in heads: the crown is at y = -1, the chin at y = 1; x grows to the right and y down. Left and right
are those of the picture.
"""

import numpy as np

from datasets.drawn.drawing import SHORT, Canvas, Pen, Plan, Region, Tone, arc, mirrored, oval, ribbon, smooth
from datasets.drawn.hair import DRAW_HAT, draw_back_hair, draw_front_hair

# How far beside the neck a neckline starts, and the range of depths where it ends on the chest.
NECKLINES = {
    "crew": (0.05, 1.30, 1.40),
    "vee": (0.10, 1.50, 1.66),
    "scoop": (0.22, 1.45, 1.60),
    "shirt": (0.06, 1.50, 1.56),
    "roll": (0.05, 1.28, 1.32),
    "hood": (0.12, 1.42, 1.48),
}

# Lenses of the right eye, around (0, 0), from -1 to 1.
LENSES = {
    "square": [(-1, -0.8), (-0.4, -1), (0.6, -1), (1, -0.8), (0.95, 0.6), (0.6, 1), (-0.6, 1), (-0.95, 0.6)],
    "cat": [(-1, -0.5), (0, -0.75), (1.15, -1.15), (0.95, 0.3), (0.2, 1), (-0.8, 0.6)],
    "sun": [(-1, -0.8), (0, -1), (1.1, -0.8), (1, 0.4), (0.4, 1.15), (-0.6, 0.9)],
}


def supersampling(size: int) -> int:
    """The number of points along the side of a pixel. It is odd, so that one of them is in the middle."""
    return 5 if size < 64 else 3


def draw_portrait(seed: int, side: int) -> np.ndarray:
    """The cells of a portrait: [side, side] bytes of Region * len(Tone) + Tone. It depends on the seed alone."""
    plan = Plan(seed)
    canvas = Canvas(side)
    upright, head = Pen(canvas, plan.x, plan.y, plan.size), Pen(canvas, plan.x, plan.y, plan.size, plan.turn)

    draw_background(upright, plan)
    draw_back_hair(head, plan)
    draw_body(upright, plan)
    for draw in (draw_ears, draw_face, draw_nose, draw_mouth, draw_glasses, draw_eyes, draw_front_hair, draw_earrings):
        draw(head, plan)
    if plan.hat:
        DRAW_HAT[plan.hat](head, plan)
    return canvas.cells()


def draw_background(pen: Pen, plan: Plan) -> None:
    light = plan.pick("halo", "halo", "band", "hills", "none")
    s, size = plan.side, plan.between(1.25, 1.5)
    if light == "halo":
        pen.tone(Region.BACKGROUND, Tone.GLOW, oval(-s * 0.12, -0.12, size, size))
    elif light == "band":
        band = [(-s * 2.2, 0.4), (s * 0.9, -2.2), (s * 2.2, -2.2), (-s * 2.2, 1.6)]
        pen.tone(Region.BACKGROUND, Tone.GLOW, band)
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
    chin = [(neck, 0.4), (neck, 1.08), (plan.side * 0.1, 1.26), (-neck, 1.08), (-neck, 0.4)]
    pen.tone(Region.NECK, Tone.SHADOW, arc(chin))
    pen.fill(Region.CLOTH, cloth)

    outer = shoulder[shoulder[:, 1] > 1.4] * (plan.side, 1)
    inner = [(plan.side * (wide - 0.5), 2.4), (plan.side * (wide - 0.2), 1.5)]
    pen.tone(Region.CLOTH, Tone.SOFT, np.concatenate([outer, inner]))
    for sign in (-1, 1):
        fold = [(sign * (wide - 0.3), 1.62 + slope), (sign * (wide - 0.34), 1.8), (sign * (wide - 0.3), 2.3)]
        pen.tone(Region.CLOTH, Tone.SHADOW, ribbon(fold, 0.015, 0.05))

    if cut == "shirt":
        pen.tone(Region.CLOTH, Tone.DEEP, ribbon([(0, deep), (0.01, 2.0), (0, 2.4)], 0.03, 0.03))
        edge = [(start * 0.9, high - 0.1), (start + 0.16, high + 0.08), (0.36, deep + 0.02), (0.0, deep - 0.02)]
        for sign in (-1, 1):
            collar = np.multiply(edge, (sign, 1))
            pen.fill(Region.CLOTH, collar, Tone.LIGHT)
            pen.tone(Region.CLOTH, Tone.DEEP, ribbon(collar[1:], 0.03, 0.03))
    elif cut == "roll":
        pen.fill(Region.CLOTH, mirrored([(neck + 0.03, 0.98), (neck + 0.06, 1.32), (0.2, 1.42)]))
        pen.tone(Region.CLOTH, Tone.SHADOW, oval(0, 0.92, neck + 0.02, 0.2))
        fold = [(neck + 0.05, 1.28), (0, 1.43), (-neck - 0.05, 1.28)]
        pen.tone(Region.CLOTH, Tone.SHADOW, ribbon(fold, 0.03, 0.05, 0.03))
    elif cut == "hood":
        for sign in (-1, 1):
            cord = [(sign * 0.22, 1.42), (sign * 0.25, 1.6), (sign * 0.2, 1.75)]
            pen.tone(Region.CLOTH, Tone.WHITE, ribbon(cord, 0.045, 0.04))
    else:
        pen.tone(Region.CLOTH, Tone.SHADOW, np.concatenate([neckline, np.add(neckline, (0, 0.09))[::-1]]))

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


def draw_ears(pen: Pen, plan: Plan) -> None:
    size = plan.between(0.85, 1.2)
    for sign, region in ((-1, Region.L_EAR), (1, Region.R_EAR)):
        x, y = sign * (plan.width + 0.03), plan.eye_y + 0.08
        ear = np.array([(-0.1, -0.14), (0.04, -0.22), (0.12, -0.12), (0.09, 0.06), (0.02, 0.2), (-0.08, 0.18)])
        pen.fill(region, smooth(ear * (sign * size, size) + (x, y)))
        pen.tone(region, Tone.DEEP, smooth(ear * (sign * size * 0.55, size * 0.6) + (x, y - 0.01)))


def draw_face(pen: Pen, plan: Plan) -> None:
    """Draw the skin, its shadow on one side, and cheeks, freckles or a beard."""
    wide, jaw, chin = plan.width, plan.width * plan.jaw, plan.width * plan.between(0.30, 0.46)
    upper = [(wide * 0.45, -0.95), (wide * 0.88, -0.6), (wide, -0.1)]
    lower = [(wide * 0.98, 0.24), (jaw, 0.62), (chin, 0.93)]
    face = smooth(mirrored(upper + lower))
    pen.fill(Region.SKIN, face, Tone.SHADOW)
    pen.tone(Region.SKIN, Tone.PLAIN, np.where(plan.side * face[:, :1] > 0, face * (0.87, 0.98), face))

    if plan.chance(0.6):
        for sign in (-1, 1):
            pen.tone(Region.SKIN, Tone.BLUSH, oval(sign * wide * 0.58, plan.eye_y + 0.36, 0.15, 0.11))
    if plan.chance(0.18):
        for sign in (-1, 1):
            for _ in range(6):
                x, y = plan.between(0.22, 0.8) * wide, plan.eye_y + plan.between(0.24, 0.42)
                pen.tone(Region.SKIN, Tone.SHADOW, oval(sign * x, y, 0.02, 0.02))
    if plan.hair in SHORT and plan.chance(0.35):
        line = arc([(-wide * 0.8, 0.36), (-wide * 0.4, 0.5), (0.0, 0.5), (wide * 0.4, 0.5), (wide * 0.8, 0.36)])
        pen.tone(Region.SKIN, plan.pick(Tone.SHADOW, Tone.DEEP), np.concatenate([face[face[:, 1] > 0.12], line]))


def draw_nose(pen: Pen, plan: Plan) -> None:
    wing, low, bridge = plan.between(0.10, 0.17), plan.between(0.36, 0.46), plan.between(0.045, 0.07)
    top = plan.eye_y - 0.03
    pen.tone(Region.SKIN, Tone.SHADOW, oval(plan.side * 0.03, low + 0.03, wing * 0.9, 0.05))
    nose = [(bridge * 0.7, top), (bridge, low - 0.2), (wing, low - 0.06), (wing * 0.62, low + 0.02)]
    pen.fill(Region.NOSE, smooth(mirrored(nose)))
    dark = [(bridge * 0.6, top), (wing, low - 0.2), (wing + 0.03, low), (0.02, low + 0.04), (wing * 0.5, low - 0.1)]
    pen.tone(Region.NOSE, Tone.SHADOW, smooth(np.multiply(dark, (plan.side, 1))))
    pen.tone(Region.NOSE, Tone.LIGHT, oval(-plan.side * 0.025, low - 0.08, 0.035, 0.045))
    for sign in (-1, 1):
        pen.tone(Region.NOSE, Tone.DARK, oval(sign * wing * 0.48, low - 0.005, wing * 0.24, 0.022))


def draw_glasses(pen: Pen, plan: Plan) -> None:
    """Draw the glasses, if any. The label covers rims and lenses; eyes are drawn over all but dark lenses."""
    if plan.glasses is None:
        return
    half, tall = min(plan.eye_x - 0.07, plan.between(0.24, 0.3)), plan.between(0.17, 0.23)
    if plan.glasses == "round":
        lens = oval(0, 0, half, half * 0.92)
    else:
        lens = smooth(np.multiply(LENSES[plan.glasses], (half, tall)))
    x, y, end = plan.eye_x, plan.eye_y + 0.03, plan.width + 0.04

    # Draw the frame: the bridge, and on each side a temple and a rim around the lens.
    pen.fill(Region.EYE_G, ribbon([(-x, y - 0.04), (0, y - 0.08), (x, y - 0.04)], 0.05, 0.05), Tone.DARK)
    for sign in (-1, 1):
        pen.fill(Region.EYE_G, ribbon([(sign * x, y - 0.06), (sign * end, y - 0.04)], 0.055, 0.055), Tone.DARK)
    for sign in (-1, 1):
        pen.fill(Region.EYE_G, lens * (sign, 1) + (sign * x, y), Tone.DARK)
        glass = lens * (sign * 0.83, 0.8) + (sign * x, y)
        pen.tone(Region.EYE_G, Tone.DEEP if plan.glasses == "sun" else Tone.LIGHT, glass)
        glint = [(sign * x - half * 0.5, y + tall * 0.1), (sign * x - half * 0.2, y - tall * 0.6)]
        pen.tone(Region.EYE_G, Tone.SHINE, ribbon(glint, 0.04, 0.04))


def draw_eyes(pen: Pen, plan: Plan) -> None:
    half, open_, slant = plan.between(0.15, 0.19), plan.between(0.08, 0.125), plan.between(-0.03, 0.04)
    iris, look = plan.between(0.085, 0.105), plan.between(-0.04, 0.04)
    arch, thick, rise = plan.between(0.0, 0.09), plan.between(0.05, 0.1), plan.between(0.2, 0.27)
    frown = plan.between(-0.04, 0.05)
    for sign, region, brow_region in ((-1, Region.L_EYE, Region.L_BROW), (1, Region.R_EYE, Region.R_BROW)):
        at = (sign * plan.eye_x, plan.eye_y)
        lid = np.array([(-half, 0.02 + slant), (-half * 0.45, -open_ * 0.8), (half * 0.35, -open_), (half, -slant)])
        if plan.glasses != "sun":
            under = np.array([(half * 0.45, open_ * 0.62), (-half * 0.45, open_ * 0.68)])
            around = Region.EYE_G if plan.glasses else Region.SKIN
            pen.tone(around, Tone.DARK, ribbon(lid * (sign * 1.06, 1) + at + (0, -0.02), 0.03, 0.06, 0.05))
            eye = smooth(np.concatenate([lid, under]) * (sign, 1) + at)
            pen.fill(region, eye)
            x, y = at[0] + look, at[1] - 0.012
            pen.tone(region, Tone.DARK, oval(x, y, iris, iris))
            pen.tone(region, Tone.INK, oval(x, y, iris * 0.6, iris * 0.6))
            pen.tone(region, Tone.WHITE, oval(x - 0.03, y - 0.03, 0.028, 0.028))
            pen.tone(region, Tone.INK, ribbon(lid * (sign, 1) + at, 0.03, 0.05, 0.04))

        brow = [(-half * 0.9, frown), (0.0, -0.03 - arch), (half * 0.75, -0.02 - arch * 0.6), (half * 1.25, 0.06)]
        line = np.multiply(brow, (sign, 1)) + at + (0, -rise)
        pen.fill(brow_region, ribbon(line, thick * 0.8, thick, thick * 0.8, 0.025))


def draw_mouth(pen: Pen, plan: Plan) -> None:
    y, half, smile = plan.between(0.62, 0.68), plan.between(0.19, 0.29), plan.between(-0.015, 0.085)
    gap = plan.between(0.06, 0.17) if plan.chance(0.45) else 0.0
    upper, lower = plan.between(0.05, 0.085), plan.between(0.065, 0.11)

    # Compute the four lines from corner to corner, top to bottom.
    t = np.linspace(-1, 1, 15)
    x, round_ = t * half, 1 - t**2
    middle = y + smile * (0.4 - t**2)
    bow = 1 - 0.3 * np.exp(-((t / 0.2) ** 2))
    top_in, low_in = middle - 0.35 * gap * round_, middle + 0.65 * gap * round_
    top, low = top_in - upper * round_**0.6 * bow, low_in + lower * round_**0.7

    def between(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.concatenate([np.stack([x, one], 1), np.stack([x, other], 1)[::-1]])

    pen.tone(Region.SKIN, Tone.SHADOW, oval(plan.side * 0.02, low.max() + 0.04, half * 0.5, 0.035))
    pen.fill(Region.L_LIP, between(low_in, low))
    pen.fill(Region.U_LIP, between(top, top_in))
    pen.tone(Region.U_LIP, Tone.SHADOW, between(top_in - upper * 0.45 * round_, low_in))
    shine = oval(-plan.side * half * 0.25, float(low_in[7]) + lower * 0.5, half * 0.28, lower * 0.2)
    pen.tone(Region.L_LIP, Tone.LIGHT, shine)
    if gap:
        pen.fill(Region.MOUTH, between(top_in, low_in), Tone.DARK)
        pen.tone(Region.MOUTH, Tone.PLAIN, oval(0, float(low_in[7]), half * 0.5, gap * 0.35))
        if gap > 0.09:
            pen.tone(Region.MOUTH, Tone.WHITE, between(top_in, np.minimum(top_in + 0.055 * round_**0.5, low_in))[1:-1])
    else:
        pen.tone(Region.L_LIP, Tone.DARK, between(middle - 0.012, middle + 0.016))
        pen.tone(Region.U_LIP, Tone.DARK, between(middle - 0.012, middle + 0.016))


def draw_earrings(pen: Pen, plan: Plan) -> None:
    if plan.ears_hidden or not plan.chance(0.35):
        return
    kind, size = plan.pick("stud", "drop", "hoop"), plan.between(0.8, 1.2)
    for sign in (-1, 1):
        x, y = sign * (plan.width + 0.04), plan.eye_y + 0.3
        if kind == "stud":
            pen.fill(Region.EAR_R, oval(x, y, 0.065 * size, 0.065 * size))
        elif kind == "drop":
            drop = np.array([(0, -0.06), (0.07, 0.15), (0, 0.22), (-0.07, 0.15)])
            pen.fill(Region.EAR_R, smooth(drop * size + (x, y)))
        else:
            turn = np.linspace(0, 2 * np.pi, 13)
            ring = np.stack([np.sin(turn) * 0.1, 0.1 - np.cos(turn) * 0.12], 1)
            pen.fill(Region.EAR_R, ribbon(ring * size + (x, y - 0.03), 0.055, 0.055))
        pen.tone(Region.EAR_R, Tone.SHINE, oval(x - 0.02, y + (0.1 if kind == "drop" else 0), 0.025, 0.025))
