"""Scores of pictures against their truth, compared with figures computed by hand."""

import math

import pytest
import torch
from torch import nn
from torchvision.models.segmentation import LRASPP, lraspp_mobilenet_v3_large

from gan.app.scoring import pixels
from gan.files.errors import UserError


def flat(value, size=16):
    """A picture of one value in 0..1, scaled as the networks' pictures are."""
    return torch.full((1, 3, size, size), 2.0 * value - 1)


@pytest.mark.parametrize(("name", "data_range"), [("ssim", 1), ("ssim_range_2", 2)])
def test_ssim_of_flat_pictures_is_the_quotient_of_their_means(name, data_range):
    constant = (0.01 * data_range) ** 2
    expected = (2 * 0.1 * 0.2 + constant) / (0.1**2 + 0.2**2 + constant)
    assert pixels.ssim(flat(0.1), flat(0.2))[name].item() == pytest.approx(expected, rel=1e-4)


def test_rmse_psnr_and_the_masked_error_by_hand():
    assert pixels.rmse(flat(0.25), flat(0.75)).item() == pytest.approx(0.5)
    assert pixels.psnr(flat(0.25), flat(0.75)).item() == pytest.approx(-20 * math.log10(0.5))
    assert pixels.rmse(flat(1.5), flat(1.0)).item() == 0, "clipped as when they are saved"
    assert pixels.ssim(flat(-0.3), flat(0.0))["ssim"].item() == pytest.approx(1)
    # The masked error is a sum over known pixels, and their number.
    known = torch.zeros(1, 16, 16)
    known[0, 2:4, 5:8] = 1
    made = flat(0.5)
    made[..., 10:, :] = 1  # where nothing is known
    assert pixels.masked_error(made, flat(0.75), known).tolist() == [[pytest.approx(0.25 * 6), 6]]


def test_the_error_and_the_spill_of_one_region_by_hand():
    region = torch.zeros(2, 16, 16, dtype=torch.bool)
    region[:, :4] = True
    before, after = flat(0.5).repeat(2, 1, 1, 1), flat(0.5).repeat(2, 1, 1, 1)
    after[:, :, :4] += 0.4  # 0.2 of 0..1
    after[1, :, 4:] -= 0.1
    truth = flat(0.8).repeat(2, 1, 1, 1)
    assert pixels.region_error(after, truth, region).tolist() == pytest.approx([0.1, 0.1])
    assert pixels.region_spill(after, before, region).tolist() == pytest.approx([0, 0.25])
    assert pixels.region_spill(before, before, region).tolist() == [0, 0]


# ---- labels ----


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


def test_confusion_counts_what_each_label_was_taken_for_where_it_is_not_ignored():
    counts = pixels.confusion(BySeries(), painted(FOUND), LABEL, 4)
    assert counts.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert pixels.intersection_over_union(counts).tolist()[:3] == pytest.approx([1 / 3, 2 / 3, 1 / 2])
    assert math.isnan(pixels.intersection_over_union(counts)[3])  # neither painted nor found
    assert pixels.accuracy(counts) == pytest.approx(4 / 6)
    counts = pixels.confusion(BySeries(), painted(FOUND), LABEL, 4, ignore=(2,))
    assert counts.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


KNOWN = ["deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"]  # two of six: to make each takes a while


def test_the_network_is_known_by_its_weights_and_refused_for_other_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(pixels.models, "list_models", lambda module: KNOWN)
    weights = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4).state_dict()
    torch.save(weights, tmp_path / "net.pth")
    network = pixels.segmenter(tmp_path / "net.pth", 4)
    assert isinstance(network, LRASPP) and not network.training
    assert torch.equal(network.classifier.low_classifier.weight, weights["classifier.low_classifier.weight"])
    assert pixels.confusion(network, torch.zeros(1, 3, 32, 32), torch.zeros(1, 32, 32).long(), 4).sum() == 32 * 32
    words = r"low_classifier.weight of shape \[4, 40, 1, 1\] in place of \[19, 40, 1, 1\]; bring .* 19 labels"
    with pytest.raises(UserError, match=f"net.pth has classifier.{words}"):
        pixels.segmenter(tmp_path / "net.pth", 19)


def test_no_network_no_file_and_another_file_say_what_to_bring(tmp_path, monkeypatch):
    monkeypatch.setattr(pixels.models, "list_models", lambda module: KNOWN)
    with pytest.raises(UserError, match=r"type --segmenter and the path of a state dict .* for 5 labels"):
        pixels.segmenter(None, 5)
    with pytest.raises(UserError, match=r"no file .*net.pth; bring a state dict .* for 5 labels"):
        pixels.segmenter(tmp_path / "net.pth", 5)
    (tmp_path / "net.pth").write_text("nothing")
    with pytest.raises(UserError, match=r"net.pth' cannot be read as a segmentation network"):
        pixels.segmenter(tmp_path / "net.pth", 5)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "net.pth")
    with pytest.raises(UserError, match=r"net.pth is not of a segmentation network of torchvision; bring"):
        pixels.segmenter(tmp_path / "net.pth", 5)
