"""SEAN's generator against a slow and plain computation of the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gan.errors import UserError
from nets.blocks import onehot
from nets.keys import generator_entries
from nets.published import export_generator
from nets.sean import ACE, SeanGenerator
from nets.style import StyleEncoder
from tests import sean_reference
from tests.oracle import BUFFERS, assert_same_gradients, distance, gradients, learning, scramble

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


def ace(style: int | None = STYLE) -> ACE:
    """An ACE whose every parameter matters."""
    torch.manual_seed(2)
    made = ACE(4, LABELS, 7, style, 1.0).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def plain_affine(net: ACE, mask: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SEAN's equations 1 to 3 word by word: loops over pictures and labels, and the whole style map."""
    pictures, labels, height, width = mask.shape
    mask_affine = net.mask_affine(F.relu(net.mask_features(mask)))
    if net.style_affine is None:
        return mask_affine.chunk(2, 1)
    spread = torch.zeros(pictures, STYLE, height, width, dtype=mask.dtype)
    for picture in range(pictures):
        for label in range(labels):
            code = F.relu(codes[picture, label] @ net.region_weight[label] + net.region_bias[label, 0])
            spread[picture] += code[:, None, None] * mask[picture, label]
    style_affine = net.style_affine(spread)
    shares = torch.sigmoid(net.blend)
    return tuple(
        share * style + (1 - share) * plain
        for share, style, plain in zip(shares, style_affine.chunk(2, 1), mask_affine.chunk(2, 1), strict=True)
    )


@pytest.mark.parametrize("style", [STYLE, None])
def test_the_folded_ace_is_the_plain_one(style, mask, codes):
    net = ace(style)
    x = torch.randn(2, 4, 8, 12, dtype=torch.float64)
    torch.manual_seed(3)
    found = net(x, mask, codes)
    torch.manual_seed(3)
    noisy = x + torch.randn(2, 1, 8, 12, dtype=torch.float64) * net.noise_scale
    centred = noisy - noisy.mean((0, 2, 3), keepdim=True)
    normal = centred / (noisy.var((0, 2, 3), correction=0, keepdim=True) + net.norm.eps).sqrt()
    scale, shift = plain_affine(net, mask, codes)
    torch.testing.assert_close(found, normal * (1 + scale) + shift, rtol=1e-11, atol=1e-11)


def test_the_folded_gradients_are_the_plain_ones(mask, codes):
    net = ace()
    codes.requires_grad_()
    wanted = [codes, *net.style_affine.parameters(), net.region_weight, net.region_bias, net.blend]
    weight = torch.randn(2, 8, 8, 12, dtype=torch.float64)
    folded = torch.autograd.grad((net.affine(mask, codes) * weight).sum(), wanted)
    plain = torch.autograd.grad((torch.cat(plain_affine(net, mask, codes), 1) * weight).sum(), wanted)
    for one, other in zip(folded, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_an_absent_region_has_a_zero_gradient_and_not_none(mask, codes):
    net = ace()
    net(torch.randn(2, 4, 8, 12, dtype=torch.float64), mask, codes).square().sum().backward()
    assert net.region_weight.grad[4].abs().sum() == 0
    assert net.region_weight.grad[3].abs().sum() > 0


def test_a_code_reaches_its_own_region_only(mask, codes):
    """Up to the one pixel that a 3x3 convolution sees around it."""
    net = ace()
    changed = codes.clone()
    changed[1, 3] += 1
    moved = (net.affine(mask, changed) - net.affine(mask, codes)).abs().sum(1) > 0
    near = F.max_pool2d(mask[:, 3:4], 3, 1, 1)[:, 0] > 0
    assert moved.any()
    assert not (moved & ~near).any()


@pytest.mark.parametrize("upsamplings", [2, 3, 6])
def test_any_size_comes_back(upsamplings):
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings)
    size = (2**upsamplings, 2 * 2**upsamplings)
    planes = onehot(torch.zeros(2, *size, dtype=torch.int64), LABELS, torch.zeros(()))
    image = net(planes, torch.zeros(2, LABELS, STYLE))
    assert image.shape == (2, 3, *size)
    assert image.abs().max() <= 1


def test_the_published_size_has_the_published_parts():
    with torch.device("meta"):
        net = SeanGenerator()
    aces = [module for module in net.modules() if isinstance(module, ACE)]
    assert len(aces) == 18
    assert sum(each.style_affine is not None for each in aces) == 15
    assert sum(each.region_weight.numel() for each in aces if each.style_affine is not None) == 15 * 19 * 512 * 512
    assert [block.conv_1.out_channels for block in (net.head, net.middle_0, net.middle_1, *net.ups)] == [
        1024, 1024, 1024, 512, 256, 128, 64,
    ]  # fmt: skip
    assert [block.learned_shortcut for block in (net.head, net.middle_0, net.middle_1, *net.ups)] == [False] * 3 + [
        True
    ] * 4


def cancelled(name: str) -> bool:
    """See [Note: biases that a norm cancels] in nets/blocks.py."""
    return name == "start.bias" or (name.endswith(("conv_0.bias", "conv_1.bias")) and name != "ups.0.conv_1.bias")


def test_every_parameter_learns_but_biases_that_a_norm_cancels(mask, codes):
    torch.manual_seed(0)
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings=2, gain=1.0).double()
    net(mask, codes).square().sum().backward()
    still = {name for name, parameter in net.named_parameters() if parameter.grad.count_nonzero() == 0}
    assert still == {name for name, _ in net.named_parameters() if cancelled(name)}


def test_a_norm_cancels_the_biases_in_training_and_not_in_evaluation(mask, codes):
    torch.manual_seed(0)
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings=2, gain=1.0).double()
    biases = [(name, parameter) for name, parameter in net.named_parameters() if name.endswith("bias")]

    @torch.no_grad()
    def moves(bias: nn.Parameter) -> bool:
        saved = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        before = net(mask, codes)
        net.load_state_dict(saved)
        bias += 0.5
        after = net(mask, codes)
        net.load_state_dict(saved)
        return bool((after - before).abs().max() > 1e-6)

    assert [name for name, bias in biases if not moves(bias)] == [name for name, _ in biases if cancelled(name)]
    net.eval()
    assert all(moves(bias) for _, bias in biases)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("upsampling", ["normal", "more"])
@pytest.mark.parametrize("seed", range(3))
def test_the_generator_is_the_plain_one(seed, upsampling, training):
    """Pictures, gradients and buffers, at random widths and sizes, with regions in no or in one picture only."""
    draw = torch.Generator().manual_seed(seed)
    labels, style, width, hidden, pictures, tall, wide = (
        int(torch.randint(low, high, (), generator=draw))
        for low, high in ((3, 7), (3, 8), (1, 4), (2, 6), (2, 4), (1, 3), (2, 4))
    )
    upsamplings = {"normal": 5, "more": 6}[upsampling]
    net = scramble(SeanGenerator(labels, style, width, hidden, upsamplings), seed).train(training)
    state = learning(export_generator(scramble(StyleEncoder(style, 1), seed), net))
    size = (tall * 2**upsamplings, wide * 2**upsamplings)
    label = torch.randint(0, labels - 2, (pictures, *size), generator=draw)
    label[0, : size[0] // 2] = labels - 2
    planes = onehot(label, labels, torch.zeros((), dtype=torch.float64))
    codes = torch.randn(pictures, labels, style, generator=draw, dtype=torch.float64)
    ours, plain = codes.clone().requires_grad_(), codes.clone().requires_grad_()

    torch.manual_seed(seed)
    found = net(planes, ours)
    torch.manual_seed(seed)
    wanted = sean_reference.generator(state, planes, plain, training, upsampling)
    assert distance(found, wanted) < 1e-12

    weight = torch.randn(found.shape, generator=draw, dtype=torch.float64) / found.numel() ** 0.5
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert distance(ours.grad, plain.grad) < 1e-12
    found = gradients(net, generator_entries(net))
    encoder = {key: tensor for key, tensor in state.items() if key.startswith("Zencoder.")}
    assert all(tensor.grad is None for tensor in encoder.values())
    assert_same_gradients(found, {key: tensor for key, tensor in state.items() if key not in encoder})

    after = export_generator(StyleEncoder(style, 1), net)
    for key in state:
        if key.endswith(BUFFERS):
            assert distance(after[key].double(), state[key].double()) < 1e-12, key


@pytest.mark.parametrize("training", [True, False])
def test_spectral_norm_iterates_once_a_forward_in_training_only(training, mask, codes):
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings=2).double().train(training)
    scramble(net, 0)
    layer = net.head.conv_0.parametrizations.weight
    u, matrix = layer[0]._u.clone(), layer.original.detach().flatten(1)
    net(mask, codes)
    once = F.normalize(matrix @ F.normalize(matrix.t() @ u, dim=0), dim=0)
    torch.testing.assert_close(layer[0]._u, once if training else u, rtol=1e-13, atol=1e-13)


def test_grain_differs_by_sample_and_only_where_it_is_wanted(mask, codes):
    net = ace()
    x = torch.zeros(2, 4, 8, 12, dtype=torch.float64)
    assert not torch.equal(net(x, mask, codes), net(x, mask, codes))
    nn.init.zeros_(net.noise_scale)
    assert torch.equal(net(x, mask, codes), net(x, mask, codes))


def test_a_size_that_cannot_be_halved_says_which_one_can(mask, codes):
    net = SeanGenerator(LABELS, STYLE, 2, 3, upsamplings=3).double()
    with pytest.raises(UserError, match="a mask of 8 x 12 cannot be halved 3 times; choose a size divisible by 8"):
        net(mask, codes)
    with pytest.raises(UserError, match="upsamplings=7 is not in 2 to 6"):
        SeanGenerator(upsamplings=7)
