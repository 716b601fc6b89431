"""How far one set of pictures is from another, by features of a network.

Where the features are those of FID's Inception, the Fréchet distance is the FID and the kernel distance is the KID.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics.image.kid import poly_mmd

SPLITS = 10  # of the Inception score
SUBSETS, SUBSET_SIZE, SEED = 100, 1000, 0  # KID's, as Binkowski et al. 2018 have them
NEIGHBOURS = 3  # as Kynkäänniemi et al. 2019 have them
COMPARED = 10_000  # pictures of each set, evenly spread, that are compared one by one: for all but the Fréchet distance


@dataclass(frozen=True)
class Known:
    """What is known of `count` pictures: the mean [D] of their features, and a root R of the covariance, R^T R.

    `features` [N, D] are those of at most COMPARED pictures.
    """

    mean: Tensor
    root: Tensor
    count: int
    features: Tensor

    @staticmethod
    def of(features: Tensor) -> "Known":
        """The covariance is divided by N - 1, as by pytorch-fid, clean-fid and torch-fidelity."""
        count, size = features.shape
        exact = features.double()
        mean = exact.mean(0)
        root = (exact - mean) / max(1, count - 1) ** 0.5
        if count > size:
            root = torch.linalg.qr(root, mode="r").R
        few = torch.arange(min(count, COMPARED)) * count // min(count, COMPARED)
        return Known(mean, root, count, features[few])


def distances(made: Known, truth: Known, scores: Collection[str], names: tuple[str, str]) -> dict[str, float]:
    """The figures of fid, kid, features (both), precision, recall; `names` are of Fréchet and kernel distance."""
    figures = {}
    if {"fid", "features"} & set(scores):
        figures[names[0]] = frechet_distance(made, truth)
    if {"kid", "features"} & set(scores):
        figures[names[1]], deviation = kernel_distance(made.features, truth.features)
        if kernel_subsets(len(made.features), len(truth.features))["subsets"] > 1:
            figures[f"{names[1]}_deviation"] = deviation
    if {"precision", "recall"} & set(scores):
        figures["precision"], figures["recall"] = precision_recall(made.features, truth.features)
    return figures


def frechet_distance(made: Known, truth: Known) -> float:
    """The distance between two Gaussians with these means and covariances."""
    # FID of Heusel et al. 2017: |m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2)). With roots R1 and R2 of the
    # covariances the last trace is the sum of the singular values of R1 R2^T. No root of a small number is taken there,
    # so the distance is exact also where there are fewer pictures than features.
    both = torch.linalg.matrix_norm(made.root @ truth.root.T, "nuc")
    spreads = made.root.square().sum() + truth.root.square().sum()
    return float((made.mean - truth.mean).square().sum() + spreads - 2 * both)


def kernel_distance(made: Tensor, truth: Tensor) -> tuple[float, float]:
    """The squared distance of features [N, D] under a cubic kernel, and its deviation, over seeded random subsets."""
    # KID of Binkowski et al. 2018, with the unbiased estimate: a feature is not compared with itself.
    sizes, dice = kernel_subsets(len(made), len(truth)), torch.Generator().manual_seed(SEED)
    size = sizes["subset_size"]
    found = []
    for _ in range(sizes["subsets"]):
        one, other = (some[torch.randperm(len(some), generator=dice)[:size]].double() for some in (made, truth))
        found.append(poly_mmd(one, other))
    values = torch.stack(found)
    return float(values.mean()), float(values.std(correction=0))


def kernel_subsets(*counts: int) -> dict[str, int]:
    """How many subsets there are, and of how many pictures; one subset where it has all pictures of both sets."""
    size = min(SUBSET_SIZE, *counts)
    return {"subsets": SUBSETS if max(counts) > size else 1, "subset_size": size}


def inception_score(features: Tensor, head: Tensor) -> tuple[float, float]:
    """How sure Inception is of each picture's class, and of how many classes: mean and deviation of ten splits."""
    # Salimans et al. 2016: exp of the mean KL divergence of p(y|x) from p(y). The last layer has no bias here, as in
    # the published code.
    found = []
    for some in features.tensor_split(min(SPLITS, len(features))):
        known = (some.double() @ head.double().T).log_softmax(1)
        among = known.exp().mean(0).log()
        found.append((known.exp() * (known - among)).sum(1).mean().exp())
    values = torch.stack(found)
    return float(values.mean()), float(values.std(correction=0))


def precision_recall(made: Tensor, truth: Tensor) -> tuple[float, float]:
    """The share of the pictures made that lie among the true ones, and the share of the true ones among those made."""
    # Kynkäänniemi et al. 2019: a set is the union of balls around its points, each as large as to reach its third
    # nearest neighbour.
    made, truth = made.double(), truth.double()  # in float32 the pictures of a collapsed generator are one
    return _share_inside(made, truth), _share_inside(truth, made)


def _share_inside(points: Tensor, others: Tensor) -> float:
    nearest = min(NEIGHBOURS + 1, len(others))  # the first one is the point itself
    reach = torch.cat([torch.cdist(rows, others).kthvalue(nearest, 1).values for rows in others.split(1000)])
    inside = torch.cat([(torch.cdist(rows, others) <= reach).any(1) for rows in points.split(1000)])
    return float(inside.double().mean())
