"""The style encoder: codes are means under masks."""

import pytest
import torch
from torch.nn import functional as F

from nets.blocks import onehot
from nets.style import StyleEncoder

LABELS = 4


@pytest.mark.parametrize("normalise", [True, False])
def test_codes_are_the_means_of_features_under_the_mask(normalise):
    torch.manual_seed(0)
    net = StyleEncoder(5, 2, normalise, gain=1.0).double()
    image = torch.rand(3, 3, 16, 12, dtype=torch.float64)
    label = torch.randint(0, 3, (3, 16, 12))
    codes = net(image, onehot(label, LABELS, image))
    assert codes.shape == (3, LABELS, 5)
    features = net.layers(image)
    assert features.shape == (3, 5, 8, 6)
    small = F.interpolate(label[:, None].double(), (8, 6), mode="nearest")[:, 0]
    for picture in range(3):
        for region in range(3):
            mean = features[picture, :, small[picture] == region].mean(1)
            torch.testing.assert_close(codes[picture, region], mean)


def test_an_absent_region_has_the_zero_code():
    net = StyleEncoder(5, 2, gain=1.0)
    image = torch.rand(2, 3, 8, 8)
    codes = net(image, onehot(torch.zeros(2, 8, 8, dtype=torch.int64), LABELS, image))
    assert (codes[:, 0] != 0).all()
    assert (codes[:, 1:] == 0).all()
    codes.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


def test_instance_norm_forgets_the_brightness_and_the_plain_encoder_does_not():
    image = torch.rand(1, 3, 8, 8)
    mask = onehot(torch.zeros(1, 8, 8, dtype=torch.int64), LABELS, image)
    for normalise in (True, False):
        torch.manual_seed(0)
        net = StyleEncoder(5, 2, normalise, gain=1.0)
        same = torch.allclose(net(image, mask), net(image - 0.5, mask), atol=1e-4)
        assert same is normalise


def test_the_published_size_has_the_published_number_of_weights():
    with torch.device("meta"):
        net = StyleEncoder()
    assert sum(parameter.numel() for parameter in net.parameters()) == pytest.approx(1.57e6, rel=5e-3)
