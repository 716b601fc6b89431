"""Portraits drawn from a seed: a plan, then part after part from back to front.

Lengths are in heads: the crown is at y = -1, the chin at y = 1; x grows to the right and y down. Left and right
are those of the picture.
"""

import numpy as np

from datasets.drawn.portrait.body import draw_background, draw_body
from datasets.drawn.portrait.hair import draw_back_hair, draw_front_hair, draw_hat
from datasets.drawn.portrait.head import (
    draw_earrings,
    draw_ears,
    draw_eyes,
    draw_face,
    draw_glasses,
    draw_mouth,
    draw_nose,
)
from datasets.drawn.portrait.pen import Canvas, Pen
from datasets.drawn.portrait.plan import FLIP_PAIRS, LABELS, Plan, Region, Tone

__all__ = ["FLIP_PAIRS", "LABELS", "Region", "Tone", "draw_portrait", "supersampling"]


def supersampling(size: int) -> int:
    """The number of points along the side of a pixel. It is odd, so that one of them is in the middle."""
    return 5 if size < 64 else 3


def draw_portrait(seed: int, side: int) -> np.ndarray:
    """The cells of a portrait: [side, side] bytes of Region * len(Tone) + Tone. It depends on the seed alone."""
    plan = Plan(seed)
    canvas = Canvas(side)
    upright, head = Pen(canvas, plan.x, plan.y, plan.size), Pen(canvas, plan.x, plan.y, plan.size, plan.turn)

    # Draw from back to front.
    draw_background(upright, plan)
    draw_back_hair(head, plan)
    draw_body(upright, plan)
    draw_ears(head, plan)
    draw_face(head, plan)
    draw_nose(head, plan)
    draw_mouth(head, plan)
    draw_glasses(head, plan)
    draw_eyes(head, plan)
    draw_front_hair(head, plan)
    draw_earrings(head, plan)
    draw_hat(head, plan)
    return canvas.cells()
