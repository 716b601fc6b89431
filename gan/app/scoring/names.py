"""The scores by the names that are typed, and the file of weights that two of them need."""

INCEPTION = "weights-inception-2015-12-05-6726825d.pth"  # its name ends with the start of its SHA-256

# What each score needs of a game.
TRUTH, SEVERAL, SOUNDS = "a truth to compare each picture with", "two pictures or more", "sounds, and the true ones"
MAPS, DRAWN = "pictures painted from label maps", "the drawn truth of style transfers, which the built-in faces have"
NEEDS = {
    **dict.fromkeys(("ssim", "rmse", "psnr", "lpips"), TRUTH),
    **dict.fromkeys(("fid", "kid", "is", "features", "precision", "recall"), SEVERAL),
    "miou": MAPS,
    "transfer": DRAWN,
    **dict.fromkeys(("mel", "spectral"), SOUNDS),
}

# What is printed for each figure.
TITLES = {
    "ssim": "SSIM, data range 1",
    "ssim_range_2": "SSIM, data range 2 (as published; flatters)",
    "rmse": "RMSE, of 0..1",
    "psnr": "PSNR, dB",
    "lpips": "LPIPS 0.1 by VGG-16",
    "transfer_error": "style-transfer error, of 0..1",
    "region_error": "style-transfer error in the region, of 0..1",
    "region_spill": "change outside of the region, share of inside",
    "mel_error": "error of log mel spectrograms",
    "spectral_error": "distance of spectrograms at three resolutions",
    "fid": "FID",
    "kid": "KID",
    "is": "Inception score",
    "is_deviation": "its deviation, of ten splits",
    "feature_distance": "Fréchet distance (not FID)",
    "kernel_distance": "kernel distance (not KID)",
    "precision": "precision, share of what is made that looks real",
    "recall": "recall, share of what is real that is made",
    "miou": "mIoU",
    "accuracy": "pixel accuracy",
    "miou_of_truth": "mIoU of the true pictures",
    "accuracy_of_truth": "pixel accuracy of the true pictures",
}
BY_FEATURES = ("fid", "kid", "is", "is_deviation", "feature_distance", "kernel_distance", "precision", "recall")
COMPARED = tuple(name for name in BY_FEATURES if not name.startswith("is"))  # with the true pictures
TRAINED_ON, HELD_OUT = "that it trains on, all of them", "held-out samples"  # which those are, in files of scores


def against(true: str) -> str:
    return f"against {'training' if 'trains on' in true else 'held-out'} pictures"


def title_of(name: str, true: str) -> str:
    """What a page or a card shows for a figure, with the true pictures that it compares with."""
    return f"{TITLES[name]}, {against(true)}" if name in COMPARED else TITLES[name]
