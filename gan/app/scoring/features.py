"""How far one set of pictures is from another, by features of a network: FID's Inception, or its replacement.

Where the features are those of Inception, the Fréchet distance is the FID and the kernel distance is the KID.
"""

import hashlib
import io
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import poly_mmd

from gan.app.scoring.names import INCEPTION
from gan.files.disk import read_plain
from gan.files.errors import UserError, explained
from nets.vgg import cached, downloaded

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


# ---- the networks ----


# The published Inception of FID, by the SHA-256 of the two files that others read: the weights that torch-fidelity and
# pytorch-fid (as pt_inception-...) share, and NVIDIA's program of TorchScript, inception-2015-12-05.pt.
WEIGHTS = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
TORCHSCRIPT = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"

STATE = "bring a state dict of only tensors, as torch.save(net.state_dict()) makes"
DOWNLOADED = Path("torch-fidelity")  # what is typed for the first of these names
NAMES = (INCEPTION, "pt_inception-2015-12-05-6726825d.pth", "inception-2015-12-05.pt")


@dataclass(frozen=True)
class Extractor:
    """A network from bytes [B, 3, H, W] to features [B, D].

    `fid` says whether its distances may be called FID and KID. `about` is what an evaluation records about it. `head`
    are the weights [classes, D] that make classes of the features, for the Inception score.
    """

    name: str
    network: nn.Module
    size: int
    fid: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    head: Tensor | None = None

    @property
    def names(self) -> tuple[str, str]:
        """What the Fréchet and the kernel distance by these features are called."""
        return ("fid", "kid") if self.fid else ("feature_distance", "kernel_distance")


def inception(path: Path | None = None) -> Extractor:
    """The published Inception of FID: from a file, from torch's cache, or, for "torch-fidelity", downloaded to there.

    It resizes pictures to 299 pixels itself, as TensorFlow 1 did: bilinear, without antialias. A file with another
    hash is refused, because its distances would not be FID. So no program but NVIDIA's is ever run.
    """
    there = path or next(filter(Path.is_file, map(cached, NAMES)), cached(INCEPTION))
    file = _downloaded() if there == DOWNLOADED else there
    if not file.is_file():
        raise UserError(
            f"FID and KID need the Inception weights, and there is no {file}; type --inception {DOWNLOADED}, which "
            f"downloads them once, or --inception and the path of {INCEPTION}"
        )
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest not in (WEIGHTS, TORCHSCRIPT):
        raise UserError(
            f"{file} is not the published Inception of FID (its SHA-256 begins with {digest[:8]}); bring {INCEPTION}, "
            f"a release file of torch-fidelity, or NVIDIA's inception-2015-12-05.pt"
        )
    network = _weights(file) if digest == WEIGHTS else _Scripted(file)
    about = {"file": file.name, "sha256": digest, "layer": "2048, before the last"}
    head = None if isinstance(network, _Scripted) else network.get_parameter("fc.weight").detach()
    return Extractor("Inception", network, 2048, fid=True, about=about, head=head)


def _downloaded() -> Path:
    with explained(f"FID and KID need {DOWNLOADED}; type pip install {DOWNLOADED}", ModuleNotFoundError):
        from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
    place = cached(URL_INCEPTION_V3)
    failed = f"the download of the Inception weights failed ({{why}}); bring {URL_INCEPTION_V3} as '{place}'"
    return downloaded(URL_INCEPTION_V3, failed)


def _weights(file: Path) -> nn.Module:
    # torch-fidelity would unpickle anything in the file. So it gets a copy with only the tensors.
    plain = io.BytesIO()
    torch.save(read_weights(file, "the Inception weights"), plain)
    plain.seek(0)
    with explained("FID and KID need torch-fidelity; type pip install torch-fidelity", ModuleNotFoundError):
        # pyrefly: ignore[bad-argument-type] - torch.load reads the "path", and an open file as well
        return FrechetInceptionDistance(feature_extractor_weights_path=plain, antialias=False).inception


class _Scripted(nn.Module):
    """NVIDIA's file, which has the program with the weights."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.net = torch.jit.load(file, map_location="cpu").eval()

    def forward(self, pictures: Tensor) -> Tensor:
        return self.net(pictures, return_features=True)


def best(path: Path | None = None) -> Extractor:
    """FID's Inception, if its file is named or there, else what is always there."""
    there = path is not None or any(map(Path.is_file, map(cached, NAMES)))
    return inception(path) if there else always()


def always() -> Extractor:
    network = RandomConvolutions()
    return Extractor("random convolutions", network, network.size, about={"weights": f"He et al. 2015, seed {SEED}"})


class RandomConvolutions(nn.Module):
    """Five convolutions of random weights that are always the same, each at half the size of the one before.

    The features are the mean and the deviation of each channel. Features of a network with random weights can also
    rank sets of pictures, and are not made for one kind of picture: Naeem et al. 2020.
    """

    widths = (3, 32, 64, 128, 128, 128)

    def __init__(self) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(SEED)
        self.layers = nn.ParameterList()
        for inside, outside in pairwise(self.widths):
            weight = torch.empty(outside, inside, 3, 3)
            nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=dice)
            self.layers.append(nn.Parameter(weight, requires_grad=False))
        self.size = 2 * sum(self.widths[1:])

    def forward(self, pictures: Tensor) -> Tensor:
        x, found = pictures.float() / 127.5 - 1, []
        for weight in self.layers:
            x = F.relu(F.conv2d(x, weight, padding=1))
            found += [x.mean((2, 3)), x.std((2, 3), correction=0)]
            x = F.avg_pool2d(x, 2, ceil_mode=True)
        return torch.cat(found, 1)


def as_bytes(pictures: Tensor) -> Tensor:
    """Pictures in [-1, 1] as the bytes of their files, in three colours: grey thrice, and RGBA on white."""
    if pictures.shape[1] in (2, 4):
        colours, opaque = pictures[:, :-1], (pictures[:, -1:].clamp(-1, 1) + 1) / 2
        pictures = 1 + (colours - 1) * opaque
    pictures = ((pictures.float().clamp(-1, 1) + 1) * 127.5).round().byte()
    return pictures.expand(-1, 3, -1, -1)


def read_weights(file: Path, what: str) -> dict[str, Tensor]:
    weights = read_plain(file, what, STATE)
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{file} is not {what}; {STATE}")
    return weights
