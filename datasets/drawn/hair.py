"""Hair behind the head, and hair on the head."""

from typing import NamedTuple

import numpy as np

from datasets.drawn.drawing import TIED, Pen, Plan, Points, Region, Tone, arc, mirrored, oval, ribbon, smooth

# Lines over the head, from one side to the other: x in half widths of the head.
CROWN = [(-1, 0), (-1.02, -0.35), (-0.86, -0.72), (-0.45, -0.95), (0.1, -1), (0.55, -0.93), (0.9, -0.7), (1.02, -0.35)]
CROWN += [(1, 0)]
ROUND = [(0.95, -0.12), (0.85, -0.45), (0.55, -0.61), (0, -0.64), (-0.55, -0.61), (-0.85, -0.45), (-0.95, -0.12)]
PARTED = [(0.93, -0.12), (0.84, -0.42), (0.5, -0.55), (0, -0.65), (-0.45, -0.71), (-0.8, -0.44), (-0.93, -0.12)]
FRINGE = [(0.95, 0), (0.87, -0.22), (0.45, -0.26), (0, -0.23), (-0.45, -0.26), (-0.87, -0.22), (-0.95, 0)]


class Cut(NamedTuple):
    """Hair that does not cover the ears: how far it stands off the head, and where it ends on the forehead."""

    least: float
    most: float
    aside: float  # beyond the sides of the head
    start: float  # before the ears
    line: Points
    combed: bool = True
    shining: bool = True


CUTS = {
    "buzz": Cut(0.04, 0.05, 0.02, -0.12, ROUND, combed=False, shining=False),
    "parted": Cut(0.10, 0.18, 0.05, -0.02, PARTED),
    "quiff": Cut(0.20, 0.32, 0.05, -0.02, PARTED),
    "spiky": Cut(0.10, 0.16, 0.05, -0.02, ROUND, combed=False),
    "fringe": Cut(0.10, 0.18, 0.08, 0.12, FRINGE),
    "curly": Cut(0.10, 0.16, 0.10, 0.05, ROUND, combed=False, shining=False),
    "afro": Cut(0.20, 0.20, 0.14, 0.02, ROUND, combed=False, shining=False),
    **dict.fromkeys(TIED, Cut(0.06, 0.10, 0.05, -0.02, ROUND)),
}


def draw_back_hair(pen: Pen, plan: Plan) -> None:
    if plan.ears_hidden:
        _draw_fall(pen, plan)
    elif plan.hair == "afro":
        big, middle = plan.between(1.15, 1.35), -0.05 if plan.hat else -0.28
        for x, y in oval(0, middle, big * 0.82, big * 0.78)[::2]:
            pen.fill(Region.HAIR, oval(x, y, 0.24, 0.24))
        pen.fill(Region.HAIR, oval(0, middle, big * 0.86, big * 0.82))
    elif plan.hair == "bun" and not plan.hat:
        x, size = plan.pick(0.0, 0.0, 0.35 * plan.side), plan.between(0.24, 0.36)
        pen.fill(Region.HAIR, oval(x, -1.12 - size * 0.45, size, size * 0.85))
        pen.tone(Region.HAIR, Tone.SHADOW, oval(x, -1.08, size * 0.8, size * 0.4))
    elif plan.hair == "tail":
        tail = [(-0.47, -0.9), (0.25, -0.75), (0.45, -0.1), (0.35, 0.7), (0.2, 1.1), (0.12, 0.5), (0.1, -0.2)]
        pen.fill(Region.HAIR, smooth(_beside(plan, plan.side, [*tail, (-0.37, -0.4)])))
    elif plan.hair == "pigtails":
        low = plan.between(0.6, 1.2)
        tail = [(-0.1, -0.35), (0.22, -0.45), (0.46, 0), (0.4, low * 0.8), (0.22, low), (0.12, low * 0.5), (-0.05, 0)]
        for sign in (-1, 1):
            pen.fill(Region.HAIR, smooth(_beside(plan, sign, tail)))


def draw_front_hair(pen: Pen, plan: Plan) -> None:
    if plan.hair == "bald":
        shine = np.array([(-0.36, -0.74), (-0.2, -0.84), (-0.02, -0.82), (-0.2, -0.72)])
        pen.tone(Region.SKIN, Tone.LIGHT, smooth(shine * (plan.side, 1)))
    elif plan.hair == "ring":
        patch = np.array([(0.84, -0.55), (1.1, -0.4), (1.17, 0), (1.05, 0.22), (0.97, -0.05)])
        for sign in (-1, 1):
            pen.fill(Region.HAIR, smooth(patch * (sign * plan.width, 1)))
    elif plan.ears_hidden:
        _draw_curtains(pen, plan)
    else:
        _draw_cut(pen, plan, CUTS[plan.hair])


def _draw_cut(pen: Pen, plan: Plan, cut: Cut) -> None:
    # A hat presses the hair down.
    lift = 0.05 if plan.hat else plan.between(cut.least, cut.most)
    free = plan.hat is None

    outer = np.array(CROWN)
    outer[[0, -1], 1] = cut.start
    outer[:, 0] *= plan.side * (plan.width + cut.aside)
    outer[3:6, 1] *= 1 + lift
    if plan.hair == "quiff" and free:
        outer[4:6] += (plan.side * 0.08, -0.05)
    inner = np.array(cut.line)
    inner[inner[:, 1] < -0.5, 1] += plan.between(-0.04, 0.06)
    over, front = arc(outer), arc(inner * (plan.side * plan.width, 1))

    if plan.hair == "spiky" and free:
        over = over[::3].copy()
        over[1::2] *= np.where(over[1::2, 1:] < -0.45, (1.16, 1.2), 1)
    pen.fill(Region.HAIR, np.concatenate([over, front]))
    if plan.hair == "curly":
        for x, y in np.concatenate([over[::4], front[4:-4:5] - (0, 0.03)]):
            pen.fill(Region.HAIR, oval(x, y, 0.14, 0.14))
        for x, y in over[2::4] * (0.8, 0.84):
            if y < -0.6:
                pen.tone(Region.HAIR, Tone.SHADOW, ribbon([(x - 0.08, y), (x, y + 0.07), (x + 0.08, y)], 0.035, 0.035))

    if cut.combed:
        crown = outer[4] * (1, 0.95)
        for foot in front[6:31:6]:
            pen.tone(Region.HAIR, Tone.SHADOW, ribbon([crown, (crown + foot) / 2 * (1.12, 1.06), foot], 0.015, 0.04))
    if cut.shining:
        shine = np.array([(-0.72, -0.72), (-0.4, -0.88), (0, -0.93)]) * (plan.side * plan.width, 1)
        pen.tone(Region.HAIR, Tone.LIGHT, ribbon(shine, 0.02, 0.07, 0.02))


def _draw_fall(pen: Pen, plan: Plan) -> None:
    wide, full = plan.width, plan.between(0.2, 0.34)
    low = plan.between(*{"bob": (0.72, 0.98), "long": (1.4, 2.0), "wavy": (1.3, 1.7)}[plan.hair])
    if plan.hair == "wavy":
        waves = np.array([0.12, -0.03, 0.12, -0.03, 0.12])
        ends = [*zip(full + waves, np.linspace(0.45, low, 5), strict=True)]
    else:
        ends = [(full * 1.05, 0.6 * low), (full * (1.15 if plan.hair == "bob" else 0.8), low)]
    side = _beside(plan, 1, [(full * 0.8, -0.35), (full, 0.3), *ends])
    half = [(0.3, -1.12), (wide * 0.85, -0.95), *side, (wide * 0.45, low + (-0.02 if plan.hair == "bob" else 0.08))]
    pen.fill(Region.HAIR, smooth(mirrored(half)))
    inside = [(0.3, 0.0), (wide * 0.95, 0.2), (wide * 0.9, min(low, 0.9)), (wide * 0.7, low)]
    pen.tone(Region.HAIR, Tone.DEEP, smooth(mirrored(inside)))


def _draw_curtains(pen: Pen, plan: Plan) -> None:
    wide, part = plan.width, plan.side * plan.pick(0.0, 0.28) * plan.width
    tall = 1.05 if plan.hat else plan.between(1.1, 1.2)
    full, apart = plan.between(0.12, 0.2), plan.between(0.8, 0.9) * wide
    low = {"bob": 0.72, "long": 1.25, "wavy": 1.05}[plan.hair]

    for sign in (-1, 1):
        outside = _beside(plan, sign, [(full * 0.7, -0.5), (full, 0.1), (full * 1.1, low * 0.75), (0.02, low)])
        inside = [(sign * wide * 0.93, low * 0.6), (sign * apart, 0.0), (sign * apart * 0.92, -0.34)]
        forehead = [(sign * wide * 0.5 + part * 0.4, -0.62), (part, -0.76)]
        crown = [(part, -0.98 * tall), (sign * wide * 0.6, -0.93 * tall)]
        pen.fill(Region.HAIR, smooth([*crown, *outside, *inside, *forehead]))
        strand = [(part, -0.98), (sign * wide * 0.72, -0.62), *_beside(plan, sign, [(0.05, 0.0), (0.08, low * 0.8)])]
        pen.tone(Region.HAIR, Tone.SHADOW, ribbon(strand, 0.015, 0.05, 0.03))
        shine = [(part + sign * 0.12, -0.98), (sign * wide * 0.8, -0.76), (sign * (wide + 0.04), -0.5)]
        pen.tone(Region.HAIR, Tone.LIGHT, ribbon(shine, 0.02, 0.07, 0.02))

    # Let a fringe fall between them.
    if plan.chance(0.35):
        edge = arc(np.array([(0.88, -0.2), (0.4, -0.25), (0, -0.22), (-0.4, -0.25), (-0.88, -0.2)]) * (wide, 1))
        pen.fill(Region.HAIR, np.concatenate([edge, [(-wide * 0.8, -0.7), (0, -0.98), (wide * 0.8, -0.7)]]))
        for x in np.linspace(-0.6, 0.6, 5) * wide:
            pen.tone(Region.HAIR, Tone.SHADOW, ribbon([(x * 0.5, -0.85), (x * 0.9, -0.5), (x, -0.22)], 0.015, 0.035))
        shine = [(-wide * 0.6, -0.68), (0, -0.78), (wide * 0.6, -0.68)]
        pen.tone(Region.HAIR, Tone.LIGHT, ribbon(shine, 0.02, 0.07, 0.02))


def _beside(plan: Plan, sign: int, points: Points) -> np.ndarray:
    """Points on one side of the head, with x counted outwards from the head's edge."""
    return np.add(points, (plan.width, 0)) * (sign, 1)


def _draw_beanie(pen: Pen, plan: Plan) -> None:
    top, low, out = plan.between(-1.35, -1.2), plan.between(-0.52, -0.44), plan.width + 0.12
    dome = [(0.25, top), (out * 0.82, top + 0.24), (out, -0.6), (out, low), (out * 0.5, low + 0.05)]
    pen.fill(Region.HAT, smooth(mirrored(dome)))
    for x in (-0.55, -0.2, 0.2, 0.55):
        pen.tone(Region.HAT, Tone.SOFT, ribbon([(x * 0.5, top), (x * 1.3 * out, low)], 0.03, 0.05))
    band = [(out * 0.5, low - 0.22), (out + 0.04, low - 0.3), (out + 0.05, low), (out * 0.5, low + 0.06)]
    pen.fill(Region.HAT, smooth(mirrored(band)), Tone.SHADOW)
    if plan.chance(0.5):
        pen.fill(Region.HAT, oval(0, top - 0.05, 0.2, 0.19), Tone.LIGHT)


def _draw_cap(pen: Pen, plan: Plan) -> None:
    out, low = plan.width + 0.09, -0.48
    dome = [(0.25, -1.22), (out * 0.85, -0.98), (out, -0.6), (out * 0.97, low), (out * 0.4, low)]
    pen.fill(Region.HAT, smooth(mirrored(dome)))
    for x in (-0.45, 0.45):
        pen.tone(Region.HAT, Tone.SHADOW, ribbon([(0, -1.22), (x, -0.9), (x * 1.1, low)], 0.02, 0.025))
    pen.tone(Region.HAT, Tone.LIGHT, oval(0, -0.86, 0.17, 0.15))
    upper = [(-out * 0.98, low - 0.1), (-0.2, low - 0.16), (out * 0.9, low - 0.1)]
    lower = [(out + 0.3, low + 0.14), (0.3, low + 0.12), (-out * 0.8, low + 0.1)]
    pen.fill(Region.HAT, smooth(np.array(upper + lower) * (plan.side, 1)), Tone.DEEP)


def _draw_brim(pen: Pen, plan: Plan) -> None:
    wide, low, top = plan.width, -0.56, plan.between(-1.32, -1.2)
    out = wide * 0.92
    crown = [(0.3, top + 0.04), (out * 0.8, top), (out * 0.98, -0.85), (out * 1.04, low), (0.2, low + 0.08)]
    pen.fill(Region.HAT, smooth(mirrored(crown)))
    band = [(out * 0.5, low - 0.2), (out * 1.05, low - 0.26), (out * 1.05, low), (0.2, low + 0.1)]
    pen.tone(Region.HAT, Tone.DARK, smooth(mirrored(band)))
    upper = [(0.3, low - 0.04), (wide * 0.9, low - 0.11), (wide + 0.42, low - 0.12)]
    lower = [(wide + 0.46, low), (wide * 0.9, low + 0.12), (0.3, low + 0.16)]
    brim = smooth(mirrored(upper + lower))
    pen.fill(Region.HAT, brim, Tone.SHADOW)
    pen.tone(Region.HAT, Tone.PLAIN, brim * (0.97, 1) - (0, 0.045))


def _draw_beret(pen: Pen, plan: Plan) -> None:
    wide, flip = plan.width, (plan.side, 1)
    left = [(-wide * 0.95, -0.5), (-wide - 0.1, -0.85), (-0.4, -1.25)]
    right = [(0.5, -1.28), (wide + 0.4, -0.95), (wide + 0.32, -0.62), (wide * 0.9, -0.52)]
    pen.fill(Region.HAT, smooth(np.array([*left, *right, (0, -0.6)]) * flip))
    edge = np.array([(-wide * 0.95, -0.5), (0, -0.63), (wide * 0.95, -0.54)]) * flip
    pen.tone(Region.HAT, Tone.SHADOW, ribbon(edge, 0.09, 0.09))
    pen.fill(Region.HAT, ribbon(np.array([(0.1, -1.2), (0.14, -1.36)]) * flip, 0.06, 0.05), Tone.DEEP)
    shine = np.array([(-0.5, -0.95), (-0.1, -1.12), (0.4, -1.12), (-0.1, -0.98)])
    pen.tone(Region.HAT, Tone.LIGHT, smooth(shine * flip))


DRAW_HAT = {"beanie": _draw_beanie, "cap": _draw_cap, "brim": _draw_brim, "beret": _draw_beret}
