"""The ResNet generator, which the tests of CycleGAN and CUT compare with the published one; and judges of patches."""

import pytest
import torch

from gan.files.errors import UserError
from nets.discriminator import PatchGan, PixelGan
from nets.resnet import ResnetGenerator


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("size", "inside", "outside"), [((16, 12), 1, 4), ((9, 14), 4, 1)])
def test_any_size_and_channels(smooth, size, inside, outside):
    net = ResnetGenerator(inside, outside, 4, 1, smooth=smooth)
    image = net(torch.randn(2, inside, *size))
    assert image.shape == (2, outside, *size) and image.abs().max() <= 1


def test_a_tiny_picture_is_refused():
    with pytest.raises(UserError, match="too small"):
        ResnetGenerator(width=2, blocks=1)(torch.zeros(1, 3, 16, 7))


# ---- patches: the games' tests load published weights of PatchGANs, and compare their scores ----


def test_the_judge_of_pixels_has_the_published_names_with_an_instance_norm_too():
    net = PixelGan(6, 4, "instance")
    assert net(torch.zeros(2, 6, 5, 7)).shape == (2, 1, 5, 7)
    assert [*net.state_dict()] == [f"net.{number}.{kind}" for number in (0, 2, 5) for kind in ("weight", "bias")]


def test_what_is_too_small_is_refused():
    assert PatchGan(3, 4, 2)(torch.zeros(1, 3, 12, 13)).shape == (1, 1, 1, 1)
    with pytest.raises(UserError, match="40x11 is too small for this PatchGAN, which needs 12"):
        PatchGan(3, 4, 2)(torch.zeros(1, 3, 11, 40))
    with pytest.raises(UserError, match="0 layers"):
        PatchGan(3, 4, 0)
