"""Networks that judge patches. The games' tests load the published weights of PatchGANs, and compare their scores."""

import pytest
import torch

from gan.files.errors import UserError
from nets.discriminator import PatchGan, PixelGan


def test_a_score_sees_a_patch_whose_size_follows_from_the_layers():
    for layers, patch in ((1, 16), (2, 34), (3, 70)):
        x = torch.zeros(1, 1, 128, 128, requires_grad=True)
        scores = PatchGan(1, 4, layers).eval()(x)
        scores[0, 0, scores.shape[2] // 2, scores.shape[3] // 2].backward()
        seen = x.grad[0, 0].abs().sum(0).nonzero()
        assert seen.max() - seen.min() + 1 == patch


def test_the_judge_of_pixels_has_the_published_names_with_an_instance_norm_too():
    net = PixelGan(6, 4, "instance")
    assert net(torch.zeros(2, 6, 5, 7)).shape == (2, 1, 5, 7)
    assert [*net.state_dict()] == [f"net.{number}.{kind}" for number in (0, 2, 5) for kind in ("weight", "bias")]


def test_what_is_too_small_is_refused():
    assert PatchGan(3, 4, 2)(torch.zeros(1, 3, 12, 13)).shape == (1, 1, 1, 1)
    with pytest.raises(UserError, match="11 x 40 is too small for this PatchGAN, which needs 12"):
        PatchGan(3, 4, 2)(torch.zeros(1, 3, 11, 40))
    with pytest.raises(UserError, match="0 layers"):
        PatchGan(3, 4, 0)
