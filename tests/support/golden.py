"""The golden figures of SEAN, and the recipe of the weights and inputs they were made with."""

import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

FILE = Path(__file__).parents[3] / "shared" / "golden" / "sean_small.pt"


def load() -> dict[str, Any]:
    """The figures; without them the test is skipped."""
    if not FILE.exists():
        pytest.skip("no golden figures: shared/golden/sean_small.pt is not beside the checkout")
    return torch.load(FILE, weights_only=True)


def weights(shapes: dict[str, list[int]], seed: int) -> dict[str, Tensor]:
    """A published state dict, each tensor of its key alone."""
    return {key: _tensor(key, shape, seed) for key, shape in shapes.items()}


def _tensor(key: str, shape: list[int], seed: int) -> Tensor:
    last = key.split(".")[-1]
    if last == "num_batches_tracked":
        return torch.zeros(shape, dtype=torch.int64)
    rng = numpy.random.default_rng([seed, zlib.crc32(key.encode())])
    x = torch.as_tensor(rng.standard_normal(shape), dtype=torch.float64)
    if last == "noise_var":
        return torch.zeros_like(x)
    if last == "running_var":
        return 0.5 + x.abs()
    if last in ("weight_u", "weight_v"):
        return x / x.norm()
    if last in ("blending_gamma", "blending_beta"):
        return x
    if last != "running_mean" and x.dim() > 1:
        return x / x[0].numel() ** 0.5
    return 0.1 * x


def inputs(settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Picture and label map; region 7 is absent everywhere."""
    rng = numpy.random.default_rng(settings["seed"] + 2)
    batch, crop = settings["batch"], settings["crop"]
    cells = rng.integers(0, 19, (batch, crop // 16, crop // 16))
    cells[cells == 7] = 3
    label = numpy.kron(cells, numpy.ones((1, 16, 16), dtype=numpy.int64))
    image = rng.uniform(-1, 1, (batch, 3, crop, crop))
    return torch.from_numpy(image), torch.from_numpy(label)
