"""Scores by a segmentation network: does it find the labels that a picture was painted from?"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix
from torchvision import models
from torchvision.transforms.v2 import functional

from gan.errors import UserError
from gan.evaluate.scores.features import read_weights

BRING = "a state dict of one of torchvision's segmentation networks, such as deeplabv3_resnet101, for {} labels"

MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which torchvision's networks expect


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
    counted = torch.ones_like(label, dtype=torch.bool)
    for each in ignore:
        counted &= label != each
    return multiclass_confusion_matrix(found[counted], label[counted], labels).cpu()


def intersection_over_union(confusion: Tensor) -> Tensor:
    """The IoU of each label; NaN for a label that was neither painted nor found."""
    # Everingham et al. 2010: true positives / (true positives + false positives + false negatives).
    hits = confusion.diagonal().double()
    return hits / (confusion.sum(0) + confusion.sum(1) - hits)


def accuracy(confusion: Tensor) -> float:
    """The share of pixels whose label was found."""
    return float(confusion.diagonal().sum() / confusion.sum())
