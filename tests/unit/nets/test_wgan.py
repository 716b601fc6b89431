"""WGAN-GP's networks."""

import torch
from torch import nn

from nets.norm import SyncBatchNorm
from nets.wgan import DownBlock, UpBlock, WganCritic, WganGenerator

WIDTHS = (8, 8, 4)


def test_the_critic_has_no_norm_and_samples_keep_to_themselves():
    torch.manual_seed(0)
    net = WganCritic(WIDTHS)
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]))
    kinds = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
    assert not any(isinstance(module, kinds) for module in net.modules())


def test_every_batch_norm_of_the_generator_is_one_over_all_ranks():
    norms = [m for m in WganGenerator(5, WIDTHS).modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    assert len(norms) == 5
    assert all(isinstance(norm, SyncBatchNorm) for norm in norms)


def test_no_bias_stands_where_a_norm_would_cancel_it():
    biases = {name for name, _ in WganGenerator(5, WIDTHS).named_parameters() if name.endswith("bias")}
    norms = {f"blocks.{block}.norms.{norm}.bias" for block in range(2) for norm in range(2)} | {"norm.bias"}
    assert biases == norms | {"start.bias", "paint.bias"}


def test_blocks_double_and_halve():
    x = torch.randn(2, 4, 8, 8)
    assert UpBlock(4, 6)(x).shape == (2, 6, 16, 16)
    assert DownBlock(4, 6)(x).shape == (2, 6, 4, 4)


def test_the_first_block_of_the_critic_sees_negative_pixels():
    torch.manual_seed(0)
    image = -torch.rand(1, 3, 8, 8)
    branches = []
    for first in (True, False):
        block = DownBlock(3, 4, first)
        nn.init.zeros_(block.shortcut.weight)
        branches.append(block(image))
    assert branches[0].abs().sum() > 0
    assert torch.equal(branches[1], torch.zeros(1, 4, 4, 4))
