"""The scores by the names that are typed, and the file of weights that two of them need."""

INCEPTION = "weights-inception-2015-12-05-6726825d.pth"  # its name ends with the start of its SHA-256

# What each score needs of a game.
NEEDS = {
    "ssim": "a truth to compare each picture with",
    "rmse": "a truth to compare each picture with",
    "psnr": "a truth to compare each picture with",
    "fid": "two pictures or more",
    "kid": "two pictures or more",
    "features": "two pictures or more",
    "precision": "two pictures or more",
    "recall": "two pictures or more",
    "miou": "pictures painted from label maps",
    "transfer": "the drawn truth of style transfers, which the built-in faces have",
    "mel": "sounds, and the true ones",
}
