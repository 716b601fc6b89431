"""Label scores: confusion, IoU and accuracy by hand, and the segmentation network from a file."""

import math

import pytest
import torch
from torch import nn
from torchvision.models.segmentation import LRASPP, lraspp_mobilenet_v3_large

from gan.app.scoring import pixels
from gan.files.errors import UserError


class BySeries(nn.Module):
    """Finds the label that a picture's red values stand for: 4 labels, from -1 to 1."""

    def forward(self, pictures):
        red = pictures[:, 0] * pixels.SPREAD[0] + pixels.MEAN[0]
        found = (red * 3).round().long()
        return {"out": nn.functional.one_hot(found, 4).permute(0, 3, 1, 2).float()}


def painted(label):
    return (label.float() / 3 * 2 - 1).unsqueeze(1).expand(-1, 3, -1, -1)


LABEL = torch.tensor([[[0, 0, 1], [1, 2, 2]]])
FOUND = torch.tensor([[[0, 1, 1], [1, 2, 0]]])


def test_confusion_counts_what_each_label_was_taken_for():
    counts = pixels.confusion(BySeries(), painted(FOUND), LABEL, 4)
    assert counts.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert pixels.intersection_over_union(counts).tolist()[:3] == pytest.approx([1 / 3, 2 / 3, 1 / 2])
    assert math.isnan(pixels.intersection_over_union(counts)[3])  # neither painted nor found
    assert pixels.accuracy(counts) == pytest.approx(4 / 6)


def test_pixels_of_ignored_labels_count_nowhere():
    counts = pixels.confusion(BySeries(), painted(FOUND), LABEL, 4, ignore=(2,))
    assert counts.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4).state_dict()


def test_the_network_is_known_by_its_weights(weights, tmp_path):
    torch.save(weights, tmp_path / "net.pth")
    network = pixels.segmenter(tmp_path / "net.pth", 4)
    assert isinstance(network, LRASPP) and not network.training
    assert torch.equal(network.classifier.low_classifier.weight, weights["classifier.low_classifier.weight"])
    assert pixels.confusion(network, torch.zeros(1, 3, 32, 32), torch.zeros(1, 32, 32).long(), 4).sum() == 32 * 32


@pytest.mark.parametrize("aux", [False, True])
def test_its_auxiliary_head_may_be_there_or_not(aux, tmp_path, monkeypatch):
    made = {}

    def build(name, num_classes, aux_loss=None, **_):
        made[name] = aux_loss
        network = nn.Module()
        network.classifier = nn.Conv2d(2, num_classes, 1)
        network.aux_classifier = nn.Conv2d(2, num_classes, 1) if aux_loss else None
        return network

    monkeypatch.setattr(pixels.models, "get_model", build)
    torch.save(build("mine", 4, aux).state_dict(), tmp_path / "net.pth")
    assert pixels.segmenter(tmp_path / "net.pth", 4).classifier.out_channels == 4
    assert made["deeplabv3_mobilenet_v3_large"] is aux


def test_a_network_for_other_labels_is_refused(weights, tmp_path):
    torch.save(weights, tmp_path / "net.pth")
    shapes = r"shape \[4, 40, 1, 1\] in place of \[19, 40, 1, 1\]"
    with pytest.raises(
        UserError, match=rf"net.pth has classifier.low_classifier.weight of {shapes}; bring .* 19 labels"
    ):
        pixels.segmenter(tmp_path / "net.pth", 19)


def test_no_network_no_file_and_another_file_say_what_to_bring(tmp_path):
    with pytest.raises(UserError, match=r"type --segmenter and the path of a state dict .* for 5 labels"):
        pixels.segmenter(None, 5)
    with pytest.raises(UserError, match=r"no file .*net.pth; bring a state dict .* for 5 labels"):
        pixels.segmenter(tmp_path / "net.pth", 5)
    (tmp_path / "net.pth").write_text("nothing")
    with pytest.raises(UserError, match=r"net.pth cannot be read as a segmentation network"):
        pixels.segmenter(tmp_path / "net.pth", 5)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "net.pth")
    with pytest.raises(UserError, match=r"net.pth is not of a segmentation network of torchvision; bring"):
        pixels.segmenter(tmp_path / "net.pth", 5)
