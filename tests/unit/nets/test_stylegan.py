"""StyleGAN's networks; that they compute the published figures is in test_stylegan_golden.py."""

from functools import partial
from itertools import chain

import pytest
import torch

from gan.files.errors import UserError
from nets.stylegan import StyleDiscriminator, StyleGenerator
from nets.stylegan_layers import Conv, MinibatchDeviation, ModulatedConv

SMALL = dict(base=64, most=8)
Generator = partial(StyleGenerator, latent=5, style=6, mapping=2, **SMALL)
Discriminator = partial(StyleDiscriminator, **SMALL)


@pytest.mark.parametrize(("size", "channels"), [((16, 16), 1), ((12, 16), 4), ((16, 9), 3)])
def test_other_sizes_and_channels_are_the_middle_of_the_next_power_of_two(size, channels):
    torch.manual_seed(0)
    net, whole = Generator(size, channels=channels), Generator(16, channels=channels)
    whole.load_state_dict(net.state_dict())
    z, (down, right) = torch.randn(2, 5), [(16 - side) // 2 for side in size]
    picture = net.eval()(z)
    assert picture.shape == (2, channels, *size)
    assert torch.equal(picture, whole.eval()(z)[:, :, down : down + size[0], right : right + size[1]])
    judge, judge_whole = Discriminator(size, channels=channels), Discriminator(16, channels=channels)
    judge_whole.load_state_dict(judge.state_dict())
    padded = torch.zeros(2, channels, 16, 16)
    padded[:, :, down : down + size[0], right : right + size[1]] = picture
    assert torch.equal(judge(picture), judge_whole(padded))


def test_labels_are_asked_for():
    with pytest.raises(UserError, match="the network knows 3 classes; give it a label for each picture"):
        Generator(8, classes=3)(torch.randn(1, 5))


def test_activations_are_clamped():
    torch.manual_seed(0)
    x = 100 * torch.randn(2, 4, 8, 8)
    assert Conv(4, 4, 3, clamp=7.0)(x).max() == 7
    assert Conv(4, 4, 3, clamp=7.0)(x, gain=0.5).max() == 3.5
    layer = ModulatedConv(4, 4, 5, 8, up=True, clamp=0.5)
    assert layer(x[:, :, :4, :4], torch.randn(2, 5), "none").max() == 0.5


def test_under_autocast_the_high_resolutions_alone_are_in_half_precision():
    torch.manual_seed(0)
    generator, discriminator = Generator(32, half=2).eval(), Discriminator(32, half=2)
    half = set()

    def note(block, _, out):
        if (out if isinstance(out, torch.Tensor) else out[0]).dtype == torch.bfloat16:
            half.add(block)

    sides = {
        side: [net.get_submodule(f"b{side}") for net in (generator.synthesis, discriminator)] for side in (4, 8, 16, 32)
    }
    for block in chain(*sides.values()):
        block.register_forward_hook(note)
    z = torch.randn(2, 5)
    expected = generator(z), discriminator(generator(z))
    with torch.autocast("cpu", torch.bfloat16):
        picture = generator(z)
        scores = discriminator(picture)
    assert half == {*sides[16], *sides[32]}
    assert picture.dtype == scores.dtype == torch.float32
    torch.testing.assert_close((picture, scores), expected, rtol=0.05, atol=0.05)


def plain_deviation(x, group):
    """A figure for each sample, group by group: sample i is in group i mod (B / G)."""
    groups = len(x) // group
    found = []
    for number in range(len(x)):
        members = x[number % groups :: groups]
        found.append(((members - members.mean(0)).square().mean(0) + 1e-8).sqrt().mean())
    return torch.stack(found)


@pytest.mark.parametrize(("batch", "group", "taken"), [(8, 4, 4), (12, 4, 4), (2, 4, 2), (6, 4, 3), (5, 4, 1)])
def test_the_deviation_is_that_of_the_samples_group(batch, group, taken):
    x = torch.randn(batch, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = MinibatchDeviation(group)(x)
    assert torch.equal(found[:, :3], x)
    expected = plain_deviation(x, taken)[:, None, None].expand(-1, 4, 4)
    torch.testing.assert_close(found[:, 3], expected, rtol=1e-12, atol=0)
