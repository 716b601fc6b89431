"""Whether a generator's layers compute by our one operation or by torch's own, one after the other.

[Note: one path for all]
On a CPU ours is faster. On an accelerator that depends on the device, the size and the type. So both are measured
there before the first step: forward and backward of the largest layer, on made-up values. The two are equal but for
rounding, and add up other numbers over ranks. So the mean of all ranks' times decides, once for all layers, and a
checkpoint keeps it: a resumed run goes on as it began. Torch's own keep several times as much for backward. So with
`recompute`, which asks for less memory, ours is taken.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from gan import ranks
from nets.blocks import SLOPE
from nets.norm import SyncBatchNorm
from nets.sean.ace import ACE
from nets.sean.generator import Block, SeanGenerator
from nets.sean.normconv import Settings, norm_conv

TURNS = 5  # of which the fastest counts


def choose_path(
    generator: SeanGenerator,
    shape: Sequence[int],
    device: torch.device,
    forward: Callable[[], AbstractContextManager],
) -> str:
    """Take the faster path for batches of this shape [B,H,W], and say so; nothing is said where none was chosen.

    All ranks call it together. `forward` is the context of a forward in the run's precision.
    """
    layers = [each for each in generator.modules() if isinstance(each, ACE)]
    if any(each.recompute or each.plain is not None for each in layers):
        return ""
    with ranks.alone(), forward():
        seconds = [_seconds(generator, shape, device, plain) for plain in (False, True)]
    one, plain = ranks.mean(torch.tensor(seconds, device=device)).tolist()
    for each in layers:
        each.plain = plain < one
    path = "torch's own operations" if plain < one else "one operation"
    return f"SEAN's layers compute by {path}: {1000 * one:.3g} ms as one, {1000 * plain:.3g} ms by torch's own"


def _seconds(generator: SeanGenerator, shape: Sequence[int], device: torch.device, plain: bool) -> float:
    """Forward and backward of the largest layer, on values of its own: its weights may be elsewhere."""
    block, (rows, height, width) = generator.get_submodule(generator.ups[-1]), shape
    assert isinstance(block, Block)
    statistics = block.ace_0.norm.running_mean
    assert statistics is not None
    channels, like = len(statistics), {"device": device, "dtype": statistics.dtype}
    norm = SyncBatchNorm(channels, affine=False, **like)
    picture = (rows, channels, height, width)
    sizes = (picture, (rows, 1, height, width), (channels, 1, 1), picture, picture)
    x, grain, *others = (torch.rand(size, **like) for size in (*sizes, (block.conv_0.out_channels, channels, 3, 3)))
    learning = [tensor.requires_grad_() for tensor in (x, *others)]
    settings, best = Settings(norm, True, None, SLOPE, 1, keep=True, plain=plain), float("inf")
    for _ in range(TURNS):
        began = now(device)
        with torch.enable_grad():
            out = norm_conv(settings, x, grain, *others, bias=None)
        torch.autograd.grad(out, learning, torch.ones_like(out))
        best = min(best, now(device) - began)
    return best


def now(device: torch.device) -> float:
    """The time, after the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
