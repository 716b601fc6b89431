"""VGG-19's features against a plain reading of the paper."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import vgg19

from gan.files.errors import UserError
from nets.vgg import Vgg19
from tests.support import narrow_vgg


def plain(state, image):
    """relu1_1, relu2_1, ... of Simonyan and Zisserman 2014, configuration E, layer by layer."""
    found, place, x = [], 0, image
    for stage, convolutions in enumerate(narrow_vgg.LAYERS):
        for number in range(convolutions):
            x = F.conv2d(x, state[f"features.{place}.weight"], state[f"features.{place}.bias"], padding=1)
            x = torch.where(x > 0, x, torch.zeros_like(x))
            if number == 0:
                found.append(x)
            place += 2
        if stage < 4:
            x = x.unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
        place += 1
    return found


@pytest.mark.parametrize("normalise", [False, True])
def test_the_features_are_those_of_the_paper(normalise):
    state = {name: tensor.double() for name, tensor in narrow_vgg.state(width=3).items()}
    image = torch.rand(2, 3, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    seen = image
    if normalise:
        mean, spread = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        seen = ((image + 1) / 2 - mean.view(3, 1, 1)) / spread.view(3, 1, 1)
    found = Vgg19(state, normalise).double()(image)
    for ours, wanted in zip(found, plain(state, seen), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-7)


def test_the_names_and_shapes_are_torchvisions():
    with torch.device("meta"):
        theirs = {name: tensor.shape for name, tensor in vgg19().features.state_dict(prefix="features.").items()}
    assert {name: tensor.shape for name, tensor in narrow_vgg.state(64, classifier=False).items()} == theirs


def test_gradient_flows_through_it_and_it_never_learns():
    random = torch.get_rng_state()
    net = Vgg19(narrow_vgg.state())
    assert torch.equal(random, torch.get_rng_state())
    image = torch.zeros(1, 3, 16, 16, requires_grad=True)
    sum(features.sum() for features in net(image)).backward()
    assert image.grad.abs().sum() > 0
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert not net.training


def test_a_picture_too_small_to_be_halved_four_times_is_refused():
    with pytest.raises(UserError, match=r"VGG-19 cannot see pictures of 15 x 64: .* a size of 16 or more"):
        Vgg19(narrow_vgg.state())(torch.zeros(1, 3, 15, 64))


def test_state_dicts_leave_it_out_and_leave_it_alone():
    game = nn.ModuleDict({"vgg": Vgg19(narrow_vgg.state()), "other": nn.Linear(2, 2)})
    before = {name: parameter.clone() for name, parameter in game.named_parameters()}
    saved = copy.deepcopy(game.state_dict())
    assert list(saved) == ["other.weight", "other.bias"]
    game["other"].weight.data.zero_()
    assert not any(game.load_state_dict(saved))
    assert all(torch.equal(parameter, before[name]) for name, parameter in game.named_parameters())
    # The control: what is missing elsewhere is still missed.
    with pytest.raises(RuntimeError, match=r"other\.bias"):
        game.load_state_dict({"other.weight": saved["other.weight"]})
