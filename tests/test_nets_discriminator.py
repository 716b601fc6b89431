"""Patch discriminators: what comes out, and that samples keep to themselves."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from nets.discriminator import MultiScaleDiscriminator, PatchDiscriminator


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
