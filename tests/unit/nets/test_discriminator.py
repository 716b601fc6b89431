"""Patch discriminators: what comes out, and that samples keep to themselves."""

from itertools import chain

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from nets.discriminator import MultiScaleDiscriminator, PatchDiscriminator
from nets.published import export_discriminator
from nets.published.sean import discriminator_entries
from tests.support import sean_reference as reference
from tests.support.oracle import assert_same_gradients, distance, gradients, learning, scramble


def test_a_list_of_features_with_the_score_last():
    features = PatchDiscriminator(5, 4, 3)(torch.randn(2, 5, 16, 16))
    assert [tuple(each.shape) for each in features] == [(2, 4, 9, 9), (2, 8, 5, 5), (2, 16, 3, 3), (2, 1, 4, 4)]


def test_the_scales_see_the_picture_and_its_half():
    net = MultiScaleDiscriminator(3, 4, 2, scales=3).eval()
    x = torch.randn(2, 3, 16, 16)
    scales = net(x)
    half = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
    assert len(scales) == 3
    torch.testing.assert_close(scales[0][-1], net.scales[0](x)[-1])
    torch.testing.assert_close(scales[1][-1], net.scales[1](half)[-1])


def test_a_score_does_not_depend_on_the_rest_of_the_batch():
    net = MultiScaleDiscriminator(3, 4, 3).eval()
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(net(x)[0][-1][:2], net(x[:2])[0][-1])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_discriminator_is_the_plain_one(seed, training):
    """All features, gradients and singular vectors, at random widths, depths and sizes."""
    draw = torch.Generator().manual_seed(seed)
    inside, width, layers, scales, pictures, tall, wide = (
        int(torch.randint(low, high, (), generator=draw))
        for low, high in ((3, 8), (1, 5), (2, 5), (1, 4), (1, 4), (40, 60), (40, 60))
    )
    net = scramble(MultiScaleDiscriminator(inside, width, layers, scales), seed).train(training)
    state = learning(export_discriminator(net))
    x = torch.randn(pictures, inside, tall, wide, generator=draw, dtype=torch.float64)
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = net(ours), reference.discriminator(state, plain, training)
    assert [len(scale) for scale in found] == [len(scale) for scale in wanted] == [layers + 1] * scales
    losses = [torch.zeros((), dtype=torch.float64)] * 2
    for one, other in zip(chain(*found), chain(*wanted), strict=True):
        assert distance(one, other) < 1e-12
        weight = torch.randn(one.shape, generator=draw, dtype=torch.float64) / one.numel() ** 0.5
        losses = [losses[0] + (one * weight).sum(), losses[1] + (other * weight).sum()]
    for loss in losses:
        loss.backward()
    assert distance(ours.grad, plain.grad) < 1e-12
    assert_same_gradients(gradients(net, discriminator_entries(net)), state)
    for key, tensor in export_discriminator(net).items():
        if key.endswith(("weight_u", "weight_v")):
            assert distance(tensor, state[key]) < 1e-12, key


def test_channels_double_to_512_at_most():
    with torch.device("meta"):
        net = PatchDiscriminator(3, 16, 8)
    assert [stage[0].out_channels for stage in net.stages[:-1]] == [16, 32, 64, 128, 256, 512, 512, 512]


def test_spectral_norm_is_on_the_inner_layers_only():
    for spectral in (True, False):
        net = PatchDiscriminator(3, 4, 3, spectral=spectral)
        inner = [stage[0] for stage in net.stages[1:-1]]
        assert [is_parametrized(layer) for layer in inner] == [spectral, spectral]
        assert not is_parametrized(net.stages[0][0])
        assert not is_parametrized(net.stages[-1])


def test_spectral_norm_bounds_the_first_forward_already():
    net = PatchDiscriminator(3, 4, 2, spectral=True, gain=1e-3)
    assert torch.linalg.matrix_norm(net.stages[1][0].weight.detach().flatten(1), 2) == pytest.approx(1, abs=0.1)


def test_the_published_size_has_the_published_number_of_weights():
    with torch.device("meta"):
        net = MultiScaleDiscriminator(22, spectral=False)
    assert sum(parameter.numel() for parameter in net.parameters()) == pytest.approx(1.36e6, rel=5e-3)
