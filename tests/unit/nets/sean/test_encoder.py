"""The style encoder: codes are means under masks."""

import pytest
import torch
from torch.nn import functional as F

from nets.blocks import onehot
from nets.published import export_generator
from nets.published.sean import encoder_entries
from nets.sean.encoder import StyleEncoder
from nets.sean.generator import SeanGenerator
from tests.support import sean_reference as reference
from tests.support.oracle import assert_same_gradients, distance, gradients, learning, scramble

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


@pytest.mark.parametrize("seed", range(3))
def test_the_encoder_is_the_plain_one(seed):
    """Codes and gradients, that of the picture too."""
    draw = torch.Generator().manual_seed(seed)
    style, width, pictures, tall, wide = (
        int(torch.randint(low, high, (), generator=draw)) for low, high in ((3, 8), (1, 4), (1, 4), (3, 6), (3, 6))
    )
    net = scramble(StyleEncoder(style, width), seed)
    made = export_generator(net, SeanGenerator(LABELS, style, 1, 2))
    state = learning({key: tensor for key, tensor in made.items() if key.startswith("Zencoder.")})
    image = torch.rand(pictures, 3, 4 * tall, 4 * wide, generator=draw, dtype=torch.float64)
    label = torch.randint(0, LABELS - 1, (pictures, 4 * tall, 4 * wide), generator=draw)
    mask = onehot(label, LABELS, image)
    ours, plain = image.clone().requires_grad_(), image.clone().requires_grad_()
    found, wanted = net(ours, mask), reference.encoder(state, plain, mask)
    assert distance(found, wanted) < 1e-12
    weight = torch.randn(found.shape, generator=draw, dtype=torch.float64) / found.numel() ** 0.5
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert distance(ours.grad, plain.grad) < 1e-12
    assert_same_gradients(gradients(net, encoder_entries(net)), state)


@pytest.mark.parametrize("normalise", [True, False])
def test_a_bias_learns_unless_instance_norm_cancels_it(normalise):
    net = StyleEncoder(5, 2, normalise, gain=1.0)
    image = torch.rand(2, 3, 16, 16)
    net(image, onehot(torch.zeros(2, 16, 16, dtype=torch.int64), LABELS, image)).square().sum().backward()
    biases = [parameter.grad for name, parameter in net.named_parameters() if name.endswith("bias")]
    assert [bool(bias.any()) for bias in biases] == [not normalise] * 4 + [True]


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
