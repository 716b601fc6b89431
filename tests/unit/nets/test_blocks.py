"""The parts of the networks."""

import pytest
import torch

from gan import later, noise
from gan.files.errors import UserError
from nets.blocks import Dropout, NormedConvTranspose2d, conv, conv_doubling, onehot, resize_nearest


@pytest.mark.parametrize("kind", [conv, conv_doubling])
def test_a_convolution_before_a_norm_needs_no_bias(kind):
    layer = kind(3, 4, 3, bias=False, normed=True)
    assert layer.bias is None and layer(torch.zeros(1, 3, 8, 8)).shape[1] == 4


def test_onehot_is_one_where_the_label_is():
    label = torch.tensor([[[0, 2], [1, 1]]])
    planes = onehot(label, 4, torch.zeros((), dtype=torch.float64))
    assert planes.dtype == torch.float64
    assert planes.shape == (1, 4, 2, 2)
    assert torch.equal(planes.argmax(1), label)
    assert torch.equal(planes.sum(1), torch.ones(1, 2, 2, dtype=torch.float64))


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


def test_in_a_phase_a_label_out_of_range_is_refused_when_it_waits_for_the_device():
    with pytest.raises(UserError, match="holds label 4"), later.together():
        onehot(torch.tensor([[[4]]]), 4, torch.zeros(()))
        passed = True
    assert passed


def test_resized_planes_are_one_hot_still():
    planes = onehot(torch.randint(0, 4, (2, 9, 7)), 4, torch.zeros(()))
    assert torch.equal(resize_nearest(planes, (4, 5)).sum(1), torch.ones(2, 4, 5))
    assert resize_nearest(planes, (9, 7)) is planes


def test_dropout_keeps_the_mean_and_stays_on_in_evaluation():
    torch.manual_seed(0)
    x = torch.ones(4, 1000)
    y = Dropout(0.25).eval()(x)
    assert (y == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert y.mean().item() == pytest.approx(1, abs=0.03)


def test_dropout_follows_the_sample():
    x = torch.ones(4, 50)
    with noise.at(noise.Place((0, 0, "phase"), 0, 4, 4)):
        whole = Dropout()(x)
    with noise.at(noise.Place((0, 0, "phase"), 2, 2, 4)):
        half = Dropout()(x[2:])
    assert torch.equal(whole[2:], half)


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


def test_a_convolution_keeps_the_size_and_starts_at_its_gain():
    torch.manual_seed(0)
    layer = conv(64, 32, 3, gain=0.02)
    assert layer(torch.zeros(1, 64, 5, 6)).shape == (1, 32, 5, 6)
    assert layer.weight.std().item() == pytest.approx(0.02 * (2 / (9 * (64 + 32))) ** 0.5, rel=0.05)
    assert conv(4, 4, 3, bias=False).bias is None
