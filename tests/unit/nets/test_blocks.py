"""Blocks, and the small networks that are made of them."""

import pytest
import torch
from torch import nn

from gan import later
from gan.files.errors import UserError
from nets.blocks import Dropout, NormedConvTranspose2d, conv, onehot
from nets.lora import adapted
from nets.resnet import UNet, UNetBlock


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (4, "holds label 4 and the network knows 0 to 3; build it with labels=5"),
        (-1, "holds label -1 and the network knows 0 to 3; give pixels without a label"),
    ],
)
def test_a_label_out_of_range_is_refused_in_words(wrong, message):
    with pytest.raises(UserError, match=message):
        onehot(torch.tensor([[[0, wrong]]]), 4, torch.zeros(()))
    passed = False
    with pytest.raises(UserError, match=message), later.together():  # in a phase, when it waits for the device
        onehot(torch.tensor([[[0, wrong]]]), 4, torch.zeros(()))
        passed = True
    assert passed


@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_that_a_norm_cancels_has_a_gradient_of_exactly_zero_in_training(transposed):
    torch.manual_seed(0)
    layer = NormedConvTranspose2d(3, 4, 3, 2, 1, output_padding=1) if transposed else conv(3, 4, 3, 2, normed=True)
    torch.nn.init.normal_(layer.bias)
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    x = torch.randn(2, 3, 9, 7)
    expected = kind.forward(layer, x)
    for training in (True, False):
        layer.train(training)
        found = layer(x)
        assert torch.equal(found, expected)
        layer.bias.grad = None
        found.sum().backward()
        assert bool(layer.bias.grad.any()) is not training


# ---- unet ----


def test_the_innermost_steps_up_drop_out():
    def drops(*shape):
        blocks = [each for each in UNet(5, 3, 2, *shape).modules() if isinstance(each, UNetBlock)]
        return [isinstance(each.model[-1], Dropout) for each in blocks]

    assert drops(5, 2) == [False, True, True, False]
    assert drops(8) == [False, False, False, True, True, True, False]  # published
    assert not any(drops(8, 0)) and not any(drops(5))
    with pytest.raises(UserError, match="depth=1"):
        UNet(5, 3, 2, depth=1)


# ---- lora ----


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
    )


@pytest.mark.parametrize("place", ["0", "3.1"])
def test_an_adapter_is_an_addition_of_low_rank_to_the_weight(place):
    own, rank = adapted(network().double(), 2), 2
    layer = own.get_submodule(place)
    nn.init.normal_(layer.up.weight)
    change = layer.up.weight.flatten(1) @ layer.down.weight.flatten(1)
    assert torch.linalg.matrix_rank(change) == rank
    x = torch.randn(5, 3, 6, 6) if place == "0" else torch.randn(5, 4)
    x, found = x.double(), layer(x.double())
    with torch.no_grad():
        layer.layer.weight += change.view_as(layer.layer.weight)
    torch.testing.assert_close(found, layer.layer(x))
