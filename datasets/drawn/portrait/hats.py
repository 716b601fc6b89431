"""Hats."""

import numpy as np

from datasets.drawn.portrait.pen import Pen, mirrored, oval, ribbon, smooth
from datasets.drawn.portrait.plan import Plan
from datasets.drawn.portrait.regions import Region, Tone


def draw_hat(pen: Pen, plan: Plan) -> None:
    if plan.hat:
        HATS[plan.hat](pen, plan)


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


HATS = {"beanie": _draw_beanie, "cap": _draw_cap, "brim": _draw_brim, "beret": _draw_beret}
