"""VGG-19's weights, from a file or from torchvision's cache."""

import sys
from http.client import HTTPException
from pathlib import Path

import torch
from filelock import FileLock
from torchvision.models import VGG19_Weights

from gan.files.disk import load_plain
from gan.files.errors import UserError
from nets.vgg import Vgg19

SOURCE = VGG19_Weights.IMAGENET1K_V1


def load_vgg19(weights: str, normalise: bool = False) -> Vgg19:
    """VGG-19 with weights from a file. For "torchvision", from its cache; a missing file is downloaded to there."""
    path = _cached() if weights == "torchvision" else Path(weights)
    if not path.is_file():
        raise UserError(f"there is no file '{path}' of VGG-19's weights; {_advice()}")
    try:
        state = load_plain(path)
    except UserError as error:
        raise UserError(f"'{path}' cannot be read as weights: {error}; {_advice()}") from error
    try:
        return Vgg19(state, normalise)
    except (ValueError, AttributeError) as error:
        raise UserError(f"'{path}' does not hold VGG-19 as torchvision saves it: {error}; {_advice()}") from error


def _cached() -> Path:
    """The file in torchvision's cache. See [Note: one download a machine]."""
    path = Path(torch.hub.get_dir(), "checkpoints", Path(SOURCE.url).name)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                print(f"downloading VGG-19's weights, {SOURCE.meta['_file_size']:.0f} MB, to {path}", file=sys.stderr)
                prefix = path.stem.rpartition("-")[2]
                torch.hub.download_url_to_file(SOURCE.url, str(path), prefix, progress=sys.stderr.isatty())
    except (OSError, RuntimeError, HTTPException) as error:
        raise UserError(
            f"the perceptual loss needs VGG-19's weights and their download failed ({error}); {_advice()}"
        ) from error
    return path


# [Note: one download a machine]
# Every rank comes here by itself, before there is a process group. The first one to get the lock downloads; the
# others wait for the lock and then find the file. The lock ends with its process, so a killed download blocks no
# one. torch.hub renames the file to its final name only when it is whole and its hash is right.


def _advice() -> str:
    name = Path(SOURCE.url).name
    return (
        f"bring {SOURCE.url} as '{Path(torch.hub.get_dir(), 'checkpoints', name)}', or type --perceptual PATH "
        f"with the path of {name}, or --perceptual off to train without"
    )
