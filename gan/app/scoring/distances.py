"""How far one set of pictures is from another, by features of a network.

Where the features are those of FID's Inception, the Fréchet distance is the FID and the kernel distance is the KID.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.image.kid import KernelInceptionDistance

from gan.files.errors import UserError, reason

SUBSETS, SUBSET_SIZE, SEED = 100, 1000, 0  # KID's, as Binkowski et al. 2018 have them
NEIGHBOURS = 3  # as Kynkäänniemi et al. 2019 have them
ALL = ("frechet", "kernel", "precision", "recall")
COMPARED = 10_000  # pictures of each set, evenly spread, that are compared one by one: for all but the Fréchet distance


@dataclass(frozen=True)
class Known:
    """What is known of a set of pictures: the mean [D] of their features, and a root R of the covariance, R^T R.

    `features` [N, D] are those of at most COMPARED pictures. Statistics in a file of others do not have them.
    """

    mean: Tensor
    root: Tensor
    count: int | None = None
    features: Tensor | None = None

    @staticmethod
    def of(features: Tensor) -> "Known":
        """The covariance is divided by N - 1, as by pytorch-fid, clean-fid and torch-fidelity."""
        count, size = features.shape
        exact = features.double()
        mean = exact.mean(0)
        root = (exact - mean) / max(1, count - 1) ** 0.5
        if count > size:
            root = torch.linalg.qr(root, mode="r").R
        return Known(mean, root, count, features[spread(count)])

    @staticmethod
    def read(path: Path, size: int | None = None) -> "Known":
        """Statistics from an .npz with `mu` and `sigma`, as pytorch-fid, EDM and ADM write them."""
        try:
            with np.load(path, allow_pickle=False) as file:
                mean, sigma = (torch.from_numpy(np.asarray(file[name], np.float64)) for name in ("mu", "sigma"))
        except OSError as error:
            raise UserError(f"cannot read statistics from '{path}': {reason(error)}") from error
        except (ValueError, TypeError, KeyError, EOFError, BadZipFile) as error:
            raise UserError(f"'{path}' is not an .npz file with mu and sigma, as pytorch-fid writes it") from error
        if mean.ndim != 1 or sigma.shape != 2 * mean.shape or not (mean.isfinite().all() and sigma.isfinite().all()):
            raise UserError(f"'{path}' has no mean mu [D] and covariance sigma [D, D] of finite numbers")
        if size not in (None, len(mean)):
            raise UserError(f"'{path}' has statistics of {len(mean)} features, and the network here has {size}")
        values, vectors = torch.linalg.eigh(sigma)
        return Known(mean, values.clamp_min(0).sqrt()[:, None] * vectors.T)


def spread(count: int, most: int = COMPARED) -> Tensor:
    """The numbers of at most `most` of so many pictures, evenly spread."""
    return torch.arange(min(count, most)) * count // min(count, most)


def distances(made: Tensor, truth: Known, names: Iterable[str]) -> dict[str, float]:
    """Those of the four figures that are named and that can be told of what is known of the truth."""
    figures = {}
    if "frechet" in names:
        figures["frechet"] = frechet_distance(Known.of(made), truth)
    if truth.features is None:
        return figures
    few = made[spread(len(made))]
    if "kernel" in names:
        figures["kernel"], deviation = kernel_distance(few, truth.features)
        if kernel_subsets(min(len(few), len(truth.features)))["subsets"] > 1:
            figures["kernel_deviation"] = deviation
    if {"precision", "recall"} & set(names):
        figures["precision"], figures["recall"] = precision_recall(few, truth.features)
    return figures


def named(figures: dict[str, float], fid: bool) -> dict[str, float]:
    """The distances by the names that they may have: FID and KID by the published Inception only."""
    names = {"frechet": "fid", "kernel": "kid"} if fid else {"frechet": "feature_distance", "kernel": "kernel_distance"}
    found = {}
    for name, value in figures.items():
        first, _, rest = name.partition("_")
        found[f"{names.get(first, first)}_{rest}" if rest else names.get(first, first)] = value
    return found


def frechet_distance(made: Known, truth: Known) -> float:
    """The distance between two Gaussians with these means and covariances."""
    # FID of Heusel et al. 2017: |m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2)). With roots R1 and R2 of the
    # covariances the last trace is the sum of the singular values of R1 R2^T. No root of a small number is taken there,
    # so the distance is exact also where there are fewer pictures than features.
    both = torch.linalg.matrix_norm(made.root @ truth.root.T, "nuc")
    spreads = made.root.square().sum() + truth.root.square().sum()
    return float((made.mean - truth.mean).square().sum() + spreads - 2 * both)


def kernel_distance(made: Tensor, truth: Tensor) -> tuple[float, float]:
    """The squared distance between two sets of features [N, D] under a cubic kernel, and its standard deviation.

    Both are over seeded random subsets.
    """
    # KID of Binkowski et al. 2018.
    sizes = kernel_subsets(min(len(made), len(truth)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*will save all extracted features.*")
        metric = KernelInceptionDistance(
            _Given(made.shape[1]), sizes["subsets"], sizes["subset_size"], sync_on_compute=False
        )
    metric.update(made.double(), real=False)
    metric.update(truth.double(), real=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        mean, deviation = metric.compute()
    return float(mean), float(deviation)


def kernel_subsets(count: int) -> dict[str, int]:
    """How many subsets there are, and of how many pictures; one subset where it has all pictures."""
    return {"subsets": SUBSETS if count > SUBSET_SIZE else 1, "subset_size": min(SUBSET_SIZE, count)}


class _Given(nn.Module):
    """Stands in a metric for its network, where the features are computed already."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size

    def forward(self, features: Tensor) -> Tensor:
        return features


def precision_recall(made: Tensor, truth: Tensor) -> tuple[float, float]:
    """The share of the pictures made that lie among the true ones, and the share of the true ones among those made."""
    # Kynkäänniemi et al. 2019: a set is the union of balls around its points, each as large as to reach its third
    # nearest neighbour.
    return _share_inside(made, truth), _share_inside(truth, made)


def _share_inside(points: Tensor, others: Tensor) -> float:
    nearest = min(NEIGHBOURS + 1, len(others))  # the first one is the point itself
    reach = torch.cat([torch.cdist(rows, others).kthvalue(nearest, 1).values for rows in others.split(1000)])
    inside = torch.cat([(torch.cdist(rows, others) <= reach).any(1) for rows in points.split(1000)])
    return float(inside.double().mean())
