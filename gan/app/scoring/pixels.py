"""Scores that compare a picture with its truth pixel by pixel: one number a picture."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure
from torchvision import models
from torchvision.transforms.v2 import functional

from gan.app.scoring.features import read_weights
from gan.files.errors import UserError
from nets.vgg import Lpips, load_lpips

VGG = "vgg16-397923af.pth"  # as torchvision publishes the weights
WINDOW = {"gaussian_kernel": True, "sigma": 1.5, "kernel_size": 11, "k1": 0.01, "k2": 0.03}


def unit(pictures: Tensor) -> Tensor:
    """Pictures in [-1, 1] as float64 in 0..1. Values outside are clipped, as when a picture is saved."""
    return (pictures.double().clamp(-1, 1) + 1) / 2


def ssim(made: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Structural similarity of pictures in [-1, 1], for two data ranges: see [Note: two data ranges]."""
    # SSIM of Wang et al. 2004: a Gaussian window of 11 x 11 pixels with sigma 1.5, mean over pixels and channels.
    one, other = unit(made).float(), unit(truth).float()  # float64 would take forty times as long on a CPU
    return {
        # pyrefly: ignore[missing-attribute] - torchmetrics gives a tuple only with return_full_image
        name: structural_similarity_index_measure(one, other, data_range=range_, reduction="none", **WINDOW).double()
        for name, range_ in (("ssim", 1.0), ("ssim_range_2", 2.0))
    }


# [Note: two data ranges]
# The data range is the difference between the largest and the smallest value a pixel can have. It scales the constants
# that keep SSIM's quotients from 0 / 0. Pictures in 0..1 have a range of 1. SEAN's published figures were computed with
# 2 on such pictures: this hides differences in dark and flat parts, so the figures are too good. Compare only figures
# of the same range.


def rmse(made: Tensor, truth: Tensor) -> Tensor:
    """Root of the mean squared difference of pictures in [-1, 1], scaled to 0..1."""
    return (unit(made) - unit(truth)).square().flatten(1).mean(1).sqrt()


def psnr(made: Tensor, truth: Tensor) -> Tensor:
    """Peak signal to noise ratio in dB of pictures in [-1, 1]; infinite for equal ones."""
    return peak_signal_noise_ratio(unit(made), unit(truth), data_range=1.0, reduction="none", dim=(1, 2, 3))


def lpips(file: Path | None) -> Lpips:
    if file is None:
        raise UserError(f"LPIPS needs VGG-16's weights; bring {VGG}, and type --lpips and its path")
    return load_lpips(str(file))


def masked_error(made: Tensor, truth: Tensor, known: Tensor) -> Tensor:
    """For each picture the sum of absolute differences where the truth is known, and the number of such pixels: [B, 2].

    Scaled to 0..1, but not clipped, so that it is the same error that validation logs.
    """
    error = (made.double() - truth.double()).abs().mean(1) / 2
    return torch.stack([(error * known).flatten(1).sum(1), known.double().flatten(1).sum(1)], 1)


def region_error(made: Tensor, truth: Tensor, region: Tensor) -> Tensor:
    """The mean absolute difference inside a region, scaled to 0..1."""
    return _mean_where(region, (made.double() - truth.double()).abs().mean(1) / 2)


def region_spill(made: Tensor, before: Tensor, region: Tensor) -> Tensor:
    """How much a change of one region also changed the other pixels, as a share of the change inside the region."""
    moved = (made.double() - before.double()).abs().mean(1)
    return _mean_where(~region, moved) / _mean_where(region, moved).clamp_min(1e-12)


def _mean_where(chosen: Tensor, values: Tensor) -> Tensor:
    return (values * chosen).flatten(1).sum(1) / chosen.flatten(1).sum(1).clamp_min(1)


# ---- scores by a segmentation network: does it find the labels that a picture was painted from? ----

BRING = "a state dict of one of torchvision's segmentation networks, such as deeplabv3_resnet101, for {} labels"

MEAN, SPREAD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet, which torchvision's networks expect


def segmenter(file: Path | None, labels: int) -> nn.Module:
    """A segmentation network of torchvision. The names and shapes of the weights in the file say which one."""
    wanted = BRING.format(labels)
    if file is None:
        raise UserError(f"mIoU needs a segmentation network: type --segmenter and the path of {wanted}")
    if not file.is_file():
        raise UserError(f"there is no file {file}; bring {wanted}")
    weights = read_weights(file, "a segmentation network")
    shapes = {name: weight.shape for name, weight in weights.items()}
    extra = any(name.startswith("aux_classifier.") for name in weights)
    for name in models.list_models(module=models.segmentation):
        kind = {} if name.startswith("lraspp") else {"aux_loss": extra}
        with torch.device("meta"):
            net = models.get_model(name, weights=None, weights_backbone=None, num_classes=labels, **kind)
        own = {name: weight.shape for name, weight in net.state_dict().items()}
        if own == shapes:
            net.load_state_dict(weights, assign=True)
            return net.eval().requires_grad_(False)
        if own.keys() == shapes.keys():
            other = next(name for name in own if own[name] != shapes[name])
            raise UserError(
                f"{file} has {other} of shape {list(shapes[other])} in place of {list(own[other])}; bring {wanted}"
            )
    raise UserError(f"{file} is not of a segmentation network of torchvision; bring {wanted}")


@torch.no_grad()
def confusion(net: nn.Module, pictures: Tensor, label: Tensor, labels: int, ignore: tuple[int, ...] = ()) -> Tensor:
    """How many pixels were painted as one label and found as another: [labels painted, labels found]."""
    seen = functional.normalize((pictures.float().clamp(-1, 1) + 1) / 2, MEAN, SPREAD)
    found = net(seen)["out"].argmax(1)
    counted = torch.isin(label, label.new_tensor(ignore), invert=True)
    return multiclass_confusion_matrix(found[counted], label[counted], labels).cpu()


def intersection_over_union(confusion: Tensor) -> Tensor:
    """The IoU of each label; NaN for a label that was neither painted nor found."""
    # Everingham et al. 2010: true positives / (true positives + false positives + false negatives).
    hits = confusion.diagonal().double()
    return hits / (confusion.sum(0) + confusion.sum(1) - hits)


def accuracy(confusion: Tensor) -> float:
    return float(confusion.diagonal().sum() / confusion.sum())
