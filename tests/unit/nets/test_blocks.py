"""Blocks, and the small networks that are made of them."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gan import later, noise
from gan.files.errors import UserError
from nets import byol
from nets.blocks import Dropout, NormedConvTranspose2d, conv, conv_doubling, onehot
from nets.byol import Online, ResnetEncoder, perceptron
from nets.discriminator import MultiScaleDiscriminator, PatchDiscriminator
from nets.lora import LowRank, adapted, adapters
from nets.resnet import UNet, UNetBlock


def test_onehot_is_one_where_the_label_is():
    label = torch.tensor([[[0, 2], [1, 1]]])
    planes = onehot(label, 4, torch.zeros((), dtype=torch.float64))
    assert torch.equal(planes, nn.functional.one_hot(label, 4).movedim(3, 1).double()) and planes.dtype == torch.float64


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


def test_dropout_keeps_the_mean_and_stays_on_in_evaluation():
    torch.manual_seed(0)
    x = torch.ones(4, 1000)
    y = Dropout(0.25).eval()(x)
    assert (y == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert y.mean().item() == pytest.approx(1, abs=0.03)


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
    for kind in (conv, conv_doubling):
        bare = kind(3, 4, 3, bias=False, normed=True)
        assert bare.bias is None and bare(torch.zeros(1, 3, 8, 8)).shape[1] == 4


# ---- discriminator ----


def convolutions(net: nn.Module) -> list[nn.Module]:
    return [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]


def test_channels_double_to_512_and_spectral_norm_is_on_the_inner_layers_only():
    with torch.device("meta"):
        net = PatchDiscriminator(3, 16, 8)
    assert [layer.out_channels for layer in convolutions(net)] == [16, 32, 64, 128, 256, 512, 512, 512, 1]
    layers = convolutions(PatchDiscriminator(3, 4, 3, gain=1e-3))
    assert [is_parametrized(layer) for layer in layers] == [False, True, True, False]
    bound = torch.linalg.matrix_norm(layers[1].weight.detach().flatten(1), 2)
    assert bound == pytest.approx(1, abs=0.1)  # already in the first forward
    scales = MultiScaleDiscriminator(3, 2, 2, scales=3)(torch.randn(1, 3, 64, 64))
    assert [tuple(scale[-1].shape) for scale in scales] == [(1, 1, side, side) for side in (18, 10, 6)]
    features = PatchDiscriminator(5, 4, 3)(torch.randn(2, 5, 16, 16))
    assert [tuple(each.shape) for each in features] == [(2, 4, 9, 9), (2, 8, 5, 5), (2, 16, 3, 3), (2, 1, 4, 4)]


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


def test_it_begins_as_the_network_and_shares_its_parameters():
    base = network()
    own, x = adapted(base, 2), torch.randn(5, 3, 6, 6)
    torch.testing.assert_close(own(x), base(x))
    shared = {id(weight) for weight in base.parameters()}
    assert [weight for weight in own.parameters() if id(weight) not in shared] == list(adapters(own))
    assert shared <= {id(weight) for weight in own.parameters()}
    assert [type(layer) for layer in own] == [LowRank, nn.Tanh, nn.Conv2d, nn.Sequential]
    assert [type(layer) for layer in base] == [nn.Conv2d, nn.Tanh, nn.Conv2d, nn.Sequential]
    assert own[2] is not base[2]


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


# ---- byol ----


def test_a_picture_of_any_size_becomes_one_vector():
    net, smallest = ResnetEncoder((4, 8, 12)), []
    net.stages.register_forward_hook(lambda module, given, found: smallest.append(found.shape[-1]))
    for size in (16, 32):
        assert net(torch.rand(3, 3, size, size)).shape == (3, 12)
    assert smallest == [2, 4]


def test_every_weight_has_a_gradient_that_is_no_rounding_noise():
    """A bias before a batch norm would have such a gradient."""
    torch.manual_seed(0)
    online, predictor = Online(ResnetEncoder((4, 8)), perceptron(8, 16, 6)).double(), perceptron(6, 16, 6).double()
    found = torch.nn.functional.normalize(predictor(online(torch.rand(8, 3, 16, 16).double())))
    (found * torch.rand(8, 6).double()).sum().backward()
    for name, weight in [*online.named_parameters(), *predictor.named_parameters()]:
        assert weight.grad.abs().max() > 1e-9, name


def pictures(count: int = 64, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, size, size, generator=generator, dtype=torch.float64) * 2 - 1


def at(first: int, rows: int, total: int = 64):
    return noise.at(noise.Place(("test",), first, rows, total))


def test_two_views_differ_and_stay_in_range():
    given = pictures()
    with at(0, 64):
        one, other = byol.random_view(given), byol.random_view(given)
    assert one.shape == other.shape == given.shape
    assert (one - other).flatten(1).abs().amax(1).min() > 0.01
    assert one.min() >= -1 and one.max() <= 1


def test_a_part_is_a_window_of_the_picture_that_may_be_mirrored():
    """A picture of its own coordinates tells where the part was."""
    size = 64
    row = (torch.arange(size, dtype=torch.float64) + 0.5) / size * 2 - 1
    given = torch.stack([row.expand(size, size), row[:, None].expand(size, size), torch.zeros(size, size)])
    with at(0, 200, 200):
        found = byol.cropped(given.expand(200, -1, -1, -1))
    across, down = found[:, 0, :, 1:-1].mean(1), found[:, 1, 1:-1].mean(2)
    steps = [each.diff(dim=1) for each in (across, down)]
    for each in steps:
        torch.testing.assert_close(each, each[:, :1].expand_as(each))  # evenly enlarged
    width, height = (each[:, 0] * size / 2 for each in steps)
    assert 0.35 < (width < 0).double().mean() < 0.65
    assert (height > 0).all()
    area = width.abs() * height
    assert byol.SMALLEST - 0.01 < area.min() < byol.SMALLEST + 0.1 and 0.9 < area.max() <= 1 + 1e-9


def test_colours_change_in_most_views_and_some_are_grey():
    given = pictures(400, 2).clamp(-0.5, 0.5)
    with at(0, 400, 400):
        found = byol.recoloured(given)
    same = (found - given).abs().flatten(1).amax(1) < 1e-9
    grey = (found - found.mean(1, keepdim=True)).abs().flatten(1).amax(1) < 1e-9
    assert same.double().mean() == pytest.approx((1 - byol.JITTER) * (1 - byol.GREY), abs=0.06)
    assert grey.double().mean() == pytest.approx(byol.GREY, abs=0.06)


def test_a_turned_hue_keeps_the_grey_and_a_third_turn_exchanges_the_colours():
    colours = pictures(4, 2)
    colours = colours - colours.mean(1, keepdim=True)
    third = byol.turned(colours, torch.tensor(2 * math.pi / 3))
    torch.testing.assert_close(third, colours.roll(1, 1))
    torch.testing.assert_close(byol.turned(colours, torch.tensor(0.3)).mean(1), torch.zeros(4, 2, 2).double())
