"""SEAN's encoder and generator."""

import inspect

import pytest
import torch

from gan.files.errors import UserError
from nets.blocks import onehot
from nets.published import export_generator
from nets.sean import neighbourhood
from nets.sean.generator import SeanGenerator, StyleEncoder
from tests.support import sean_reference as reference
from tests.support.oracle import BUFFERS, assert_same_gradients, distance, gradients, learning, scramble

# ---- generator ----


LABELS, STYLE = 5, 6


@pytest.fixture
def mask() -> torch.Tensor:
    """Two masks of 8 x 12; label 4 is in none, label 3 only in the second."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 3, (2, 8, 12), generator=generator)
    label[1, :3, :3] = 3
    return onehot(label, LABELS, torch.zeros((), dtype=torch.float64))


@pytest.fixture
def codes() -> torch.Tensor:
    return torch.randn(2, LABELS, STYLE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("upsamplings", [2, 3, 6])
def test_any_size_comes_back_or_is_answered_with_one_that_can(upsamplings):
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings)
    size = (2**upsamplings, 2 * 2**upsamplings)
    planes = onehot(torch.zeros(2, *size, dtype=torch.int64), LABELS, torch.zeros(()))
    image = net(planes, torch.zeros(2, LABELS, STYLE))
    assert image.shape == (2, 3, *size)
    assert image.abs().max() <= 1
    words = f"cannot be halved {upsamplings} times; choose a size divisible by {size[0]}"
    with pytest.raises(UserError, match=f"a mask of {size[0]} x {size[1] - 1} {words}"):
        net(planes[..., :-1], torch.zeros(2, LABELS, STYLE))
    with pytest.raises(UserError, match="upsamplings=7 is not in 2 to 6"):
        SeanGenerator(upsamplings=7)


def test_one_picture_whose_smallest_map_is_one_pixel_cannot_be_trained_on(codes):
    net, planes = SeanGenerator(LABELS, STYLE, 2, 3, 2), torch.zeros(1, LABELS, 4, 4)
    with pytest.raises(UserError, match=r"one picture of one pixel, .*; take more samples a step \(--batch-size 2\)"):
        net(planes, codes[:1].float())
    assert net.eval()(planes, codes[:1].float()).shape == (1, 3, 4, 4)


def test_the_defaults_are_the_published_sizes():
    """What such networks are made of is in the golden names: see test_published.py."""
    generator, encoder = (inspect.signature(each).parameters for each in (SeanGenerator, StyleEncoder))
    names = ("labels", "style", "width", "hidden", "upsamplings")
    assert [generator[name].default for name in names] == [19, 512, 64, 128, 5]
    assert [encoder[name].default for name in ("style", "width")] == [512, 32]


def cancelled(name: str) -> bool:
    """See [Note: biases that a norm cancels] in nets/blocks.py."""
    return name == "fc.bias" or (name.endswith(("conv_0.bias", "conv_1.bias")) and name != "up_0.conv_1.bias")


def test_every_parameter_learns_but_biases_that_a_norm_cancels_in_training(mask, codes):
    torch.manual_seed(0)
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings=2, gain=1.0).double()
    biases = {name: parameter for name, parameter in net.named_parameters() if cancelled(name)}
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    image = net(mask, codes)
    image.square().sum().backward()
    still = {name for name, parameter in net.named_parameters() if parameter.grad.count_nonzero() == 0}
    assert still == biases.keys()
    net.load_state_dict(before)
    with torch.no_grad():
        for bias in biases.values():
            bias += 0.5
        assert (net(mask, codes) - image).abs().max() < 1e-6
    net.zero_grad()
    net.eval()(mask, codes).square().sum().backward()
    assert all(parameter.grad.count_nonzero() for parameter in net.parameters())


@pytest.mark.parametrize(
    ("seed", "upsampling", "training", "way"),
    [
        (0, "normal", True, "tables"),
        pytest.param(1, "more", False, "maps", marks=pytest.mark.slow),
    ],
)
def test_the_generator_is_the_plain_one(seed, upsampling, training, way, monkeypatch):
    """Pictures, gradients and buffers, at random widths and sizes, with regions in no or in one picture only."""
    if way == "maps":
        monkeypatch.setattr(neighbourhood, "find_neighbourhoods", lambda *_: None)
    draw = torch.Generator().manual_seed(seed)
    labels, style, width, hidden, pictures, tall, wide = (
        int(torch.randint(low, high, (), generator=draw))
        for low, high in ((3, 7), (3, 8), (1, 4), (2, 6), (2, 4), (1, 3), (2, 4))
    )
    upsamplings = {"normal": 5, "more": 6}[upsampling]
    net = scramble(SeanGenerator(labels, style, width, hidden, upsamplings, recompute=seed % 2 == 0), seed)
    net.train(training)
    state = learning(export_generator(scramble(StyleEncoder(style, 1), seed), net))
    size = (tall * 2**upsamplings, wide * 2**upsamplings)
    label = torch.randint(0, labels - 2, (pictures, size[0] // 8, size[1] // 8), generator=draw)
    label = label.repeat_interleave(8, 1).repeat_interleave(8, 2)
    label[:, :5, :7] = torch.randint(0, labels - 2, (pictures, 5, 7), generator=draw)
    label[0, : size[0] // 2] = labels - 2
    planes = onehot(label, labels, torch.zeros((), dtype=torch.float64))
    assert (neighbourhood.find_neighbourhoods(planes, labels) is None) == (way == "maps")
    codes = torch.randn(pictures, labels, style, generator=draw, dtype=torch.float64)
    ours, plain = codes.clone().requires_grad_(), codes.clone().requires_grad_()

    torch.manual_seed(seed)
    found = net(planes, ours)
    torch.manual_seed(seed)
    wanted = reference.generator(state, planes, plain, training, upsampling)
    assert distance(found, wanted) < 1e-12

    weight = torch.randn(found.shape, generator=draw, dtype=torch.float64) / found.numel() ** 0.5
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert distance(ours.grad, plain.grad) < 1e-12
    found = gradients(net)
    encoder = {key: tensor for key, tensor in state.items() if key.startswith("Zencoder.")}
    assert all(tensor.grad is None for tensor in encoder.values())
    assert_same_gradients(found, {key: tensor for key, tensor in state.items() if key not in encoder})

    after = export_generator(StyleEncoder(style, 1), net)
    for key in state:
        if key.endswith(BUFFERS):
            assert distance(after[key].double(), state[key].double()) < 1e-12, key


# ---- encoder ----


FOUR = 4


def test_the_encoder_is_the_plain_one(seed=0):
    """Codes and gradients, that of the picture too."""
    draw = torch.Generator().manual_seed(seed)
    style, width, pictures, tall, wide = (
        int(torch.randint(low, high, (), generator=draw)) for low, high in ((3, 8), (1, 4), (1, 4), (3, 6), (3, 6))
    )
    net = scramble(StyleEncoder(style, width), seed)
    made = export_generator(net, SeanGenerator(FOUR, style, 1, 2))
    state = learning({key: tensor for key, tensor in made.items() if key.startswith("Zencoder.")})
    image = torch.rand(pictures, 3, 4 * tall, 4 * wide, generator=draw, dtype=torch.float64)
    label = torch.randint(0, FOUR - 1, (pictures, 4 * tall, 4 * wide), generator=draw)
    mask = onehot(label, FOUR, image)
    ours, plain = image.clone().requires_grad_(), image.clone().requires_grad_()
    found, wanted = net(ours, mask), reference.encoder(state, plain, mask)
    assert distance(found, wanted) < 1e-12
    weight = torch.randn(found.shape, generator=draw, dtype=torch.float64) / found.numel() ** 0.5
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert distance(ours.grad, plain.grad) < 1e-12
    assert_same_gradients(gradients(net, "Zencoder."), state)


@pytest.mark.parametrize("normalise", [True, False])
def test_a_bias_learns_unless_instance_norm_cancels_it_and_the_brightness(normalise):
    torch.manual_seed(0)
    net, image = StyleEncoder(5, 2, normalise, gain=1.0), torch.rand(2, 3, 16, 16)
    mask = onehot(torch.zeros(2, 16, 16, dtype=torch.int64), FOUR, image)
    codes = net(image, mask)
    codes.square().sum().backward()
    biases = [parameter.grad for name, parameter in net.named_parameters() if name.endswith("bias")]
    assert [bool(bias.any()) for bias in biases] == [not normalise] * 4 + [True]
    assert torch.allclose(codes, net(image - 0.5, mask), atol=1e-4) is normalise
