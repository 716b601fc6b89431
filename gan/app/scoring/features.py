"""Scores that compare two sets of pictures by a network's features: FID and KID, and a replacement for them."""

import hashlib
import io
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance
from torchvision.models import vgg19

from gan.app.scoring.names import INCEPTION
from gan.files.disk import load_plain
from gan.files.errors import UserError
from nets.published import load_vgg19
from nets.vgg import Vgg19

VGG = "vgg19-dcbb9e9d.pth"
SUBSETS, SUBSET_SIZE, SEED = 100, 1000, 0  # KID's, as Binkowski et al. 2018 have them


@dataclass(frozen=True)
class Extractor:
    """A network from bytes [B, 3, H, W] to features [B, D].

    `fid` says whether its distances may be called FID and KID. `about` is what an evaluation records about it.
    """

    name: str
    network: nn.Module
    size: int
    fid: bool = False
    about: dict[str, Any] = field(default_factory=dict)


def cached(name: str) -> Path:
    """Where torch stores its download of that name."""
    return Path(torch.hub.get_dir()) / "checkpoints" / name


def inception(path: Path | None = None) -> Extractor:
    """The Inception network of FID with weights from a file, or from torch's cache. Nothing is downloaded."""
    file = path or cached(INCEPTION)
    if not file.is_file():
        raise UserError(
            f"FID and KID need the Inception weights, and there is no {file}; bring {INCEPTION}, a release file of "
            f"torch-fidelity, to that place, or type --inception and its path"
        )
    weights = read_weights(file, "the Inception weights")
    # torch-fidelity would unpickle anything in the file. So it gets a copy with only the tensors.
    plain = io.BytesIO()
    torch.save(weights, plain)
    plain.seek(0)
    try:
        # Pictures are resized without antialiasing, as in the first Inception: published figures are made so.
        # pyrefly: ignore[bad-argument-type] - torch.load reads the "path", and an open file as well
        metric = FrechetInceptionDistance(feature_extractor_weights_path=plain, antialias=False)
    except ModuleNotFoundError as error:
        raise UserError("FID and KID need torch-fidelity; type pip install torch-fidelity") from error
    except RuntimeError as error:
        raise UserError(f"{file} holds weights of another network than FID's Inception; bring {INCEPTION}") from error
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    published = digest.startswith(INCEPTION.rpartition("-")[2].removesuffix(".pth"))
    name = "Inception" if published else "Inception with weights other than the published ones"
    about = {"file": str(file), "sha256": digest, "published": published, "layer": 2048, "resize": "TensorFlow 1"}
    return Extractor(name, metric.inception, 2048, fid=True, about=about)


def vgg() -> Extractor:
    """The replacement for Inception: torchvision's VGG-19 where its weights are cached, else one with random weights.

    Features of a network with random weights can also rank sets of pictures, and are not made for one kind of
    picture: Naeem et al. 2020.
    """
    file = cached(VGG)
    if file.is_file():
        return Extractor(
            "VGG-19 relu5_1", Pooled(load_vgg19(str(file), normalise=True)), 512, about={"file": str(file)}
        )
    dice = torch.Generator().manual_seed(SEED)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in vgg19(weights=None).named_parameters()}
    weights = {name: torch.zeros(shape) for name, shape in shapes.items() if name.startswith("features.")}
    for weight in weights.values():
        if weight.ndim == 4:
            nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=dice)
    network = Pooled(Vgg19(weights, normalise=True))
    return Extractor("random VGG-19 relu5_1", network, 512, about={"weights": f"He et al. 2015, seed {SEED}"})


class Pooled(nn.Module):
    """The mean over the picture of a VGG's coarsest features. The picture comes as bytes."""

    def __init__(self, vgg: Vgg19) -> None:
        super().__init__()
        self.vgg = vgg

    def forward(self, pictures: Tensor) -> Tensor:
        return self.vgg(pictures.float() / 127.5 - 1)[-1].mean((2, 3))


def as_bytes(pictures: Tensor) -> Tensor:
    """Pictures in [-1, 1] as the bytes of their files."""
    return ((pictures.clamp(-1, 1) + 1) * 127.5).round().byte()


def frechet_distance(made: Tensor, truth: Tensor) -> float:
    """The distance between two sets of features [N, D] as Gaussians; it is the FID if the features are Inception's."""
    # FID of Heusel et al. 2017. See [Note: a small space]
    made, truth = _small_space(made.double(), truth.double())
    metric = FrechetInceptionDistance(feature=_Given(made.shape[1]), sync_on_compute=False)
    metric.update(made, real=False)
    metric.update(truth, real=True)
    return float(metric.compute())


def _small_space(made: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """The same points in fewer dimensions, where there are fewer points than dimensions.

    [Note: a small space]
    The distance depends only on lengths and angles, and N points lie in a space of N - 1 dimensions. There the matrix
    is only 64 x 64, and its eigenvalues are computed fast and exactly. For a 2048 x 2048 matrix of rank 63 they take a
    minute; 1985 of them should be 0 and are not quite, and their roots add up to a thousandth of the score.
    """
    both = torch.cat([made, truth])
    if len(both) < both.shape[1]:
        left, lengths, _ = torch.linalg.svd(both - both.mean(0), full_matrices=False)
        both = left * lengths
    return both[: len(made)], both[len(made) :]


def kernel_distance(made: Tensor, truth: Tensor) -> tuple[float, float]:
    """The squared distance between two sets of features [N, D] under a cubic kernel, and its standard deviation.

    Both are over seeded random subsets. The distance is the KID if the features are Inception's.
    """
    # KID of Binkowski et al. 2018.
    sizes = kernel_subsets(len(made))
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


def read_weights(file: Path, what: str) -> dict[str, Tensor]:
    """Read a state dict from a file, which may hold only tensors."""
    try:
        weights = load_plain(file)
    except UserError as error:
        raise UserError(f"{file} cannot be read as {what}, a state dict of only tensors ({error})") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{file} is not {what}: a state dict of only tensors, as torch.save(net.state_dict()) makes")
    return weights
