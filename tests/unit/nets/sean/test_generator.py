"""SEAN's encoder and generator."""

import pytest
import torch

from gan.files.errors import UserError
from nets.blocks import onehot
from nets.norm import SyncBatchNorm
from nets.published import export_generator
from nets.sean.generator import SeanGenerator, StyleEncoder
from nets.sean.neighbourhood import find_neighbourhoods
from tests.support import sean_reference as reference
from tests.support.oracle import BUFFERS, assert_same_gradients, distance, gradients, learning, scramble

LABELS, STYLE = 5, 6


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
    with pytest.raises(UserError, match=f"a mask of {size[1] - 1}x{size[0]} {words}"):
        net(planes[..., :-1], torch.zeros(2, LABELS, STYLE))
    with pytest.raises(UserError, match="upsamplings=7 is not in 2 to 6"):
        SeanGenerator(upsamplings=7)


def test_one_picture_whose_smallest_map_is_one_pixel_cannot_be_trained_on(codes):
    net, planes = SeanGenerator(LABELS, STYLE, 2, 3, 2), torch.zeros(1, LABELS, 4, 4)
    with pytest.raises(UserError, match=r"one picture of one pixel, .*; take more samples a step \(--batch-size 2\)"):
        net(planes, codes[:1].float())
    assert net.eval()(planes, codes[:1].float()).shape == (1, 3, 4, 4)


@pytest.mark.parametrize(
    ("by", "edges", "training", "recompute"),
    [("tables", 0, True, True), ("maps", 1, True, False), ("tables", 1, False, False), ("maps", 0, False, True)],
)
def test_a_generator_is_the_plain_one(by, edges, training, recompute, codes):
    """Pictures, gradients and buffers. Planes that learn are convolved; others are looked up in tables.

    Region 3 is in the first picture only, region 4 in none. The last block has no styles.
    """
    net = scramble(SeanGenerator(LABELS, STYLE, 2, 3, 6, edges=bool(edges), recompute=recompute), 1)
    draw = torch.Generator().manual_seed(1)
    label = torch.randint(0, 3, (2, 8, 16), generator=draw).repeat_interleave(8, 1).repeat_interleave(8, 2)
    label[:, :5, :7] = torch.randint(0, 3, (2, 5, 7), generator=draw)
    label[0, :32] = 3
    planes = torch.cat([onehot(label, LABELS, codes), (label[:, None] == 1).to(codes)[:, :edges]], 1)
    assert find_neighbourhoods(planes, LABELS) is not None
    for norm in (layer for layer in net.modules() if not training and isinstance(layer, SyncBatchNorm)):
        norm.momentum = 1.0  # so that an evaluation has the statistics of these pictures, and no pixel is at an end
    net(planes, codes)
    net.train(training)
    state = learning(export_generator(scramble(StyleEncoder(STYLE, 1), 1), net))
    given = [[planes.clone().requires_grad_(by == "maps"), codes.clone().requires_grad_()] for _ in range(2)]

    torch.manual_seed(1)
    found = net(*given[0])
    torch.manual_seed(1)
    wanted = reference.generator(state, *given[1], training, "more")
    assert distance(found, wanted) < 1e-12

    weight = torch.randn(found.shape, generator=draw, dtype=torch.float64) / found.numel() ** 0.5
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert distance(given[0][1].grad, given[1][1].grad) < 1e-12
    drawers = {key: tensor for key, tensor in state.items() if not key.startswith("Zencoder.")}
    assert_same_gradients(gradients(net), drawers)

    after = export_generator(StyleEncoder(STYLE, 1), net)
    for key in state:
        if key.endswith(BUFFERS):
            assert distance(after[key].double(), state[key].double()) < 1e-12, key
