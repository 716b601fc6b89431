"""Scores that compare a picture with its truth pixel by pixel: one number a picture."""

import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

WINDOW = {"gaussian_kernel": True, "sigma": 1.5, "kernel_size": 11, "k1": 0.01, "k2": 0.03}


def unit(pictures: Tensor) -> Tensor:
    """Pictures in [-1, 1] as float64 in 0..1. Values outside are clipped, as when a picture is saved."""
    return (pictures.double().clamp(-1, 1) + 1) / 2


def ssim(made: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Structural similarity of pictures in [-1, 1], for two data ranges: see [Note: two data ranges]."""
    # SSIM of Wang et al. 2004: a Gaussian window of 11 x 11 pixels with sigma 1.5, mean over pixels and channels.
    one, other = unit(made).float(), unit(truth).float()  # float64 would take forty times as long on a CPU
    return {
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
