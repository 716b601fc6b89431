"""Synchronised batch norm: what one device computes, values, gradients and second gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nets.norm import SyncBatchNorm, convert_sync_batchnorm


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 3, 4, 5, generator=generator, dtype=torch.float64) * 2 + 10


def layers(kind, **kwargs):
    torch.manual_seed(1)
    layer = kind(3, **kwargs).double()
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def outcome(layer, x, second):
    """Output, gradients and, where asked for, the gradient of a gradient penalty."""
    x = x.clone().requires_grad_()
    y = layer(x)
    loss = (y.tanh() * torch.linspace(0, 1, y[0].numel(), dtype=y.dtype).view_as(y[0])).sum()
    if second:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = slope.square().sum()
    wanted = [x, *layer.parameters()] if not second else [x, *[p for p in layer.parameters() if p is not layer.bias]]
    gradients = torch.autograd.grad(loss, wanted)
    return y.detach(), gradients[0], [g.detach() for g in gradients[1:]]


def on_rank(kwargs, second, parts):
    rank = dist.get_rank()
    layer = layers(SyncBatchNorm, **kwargs)
    mine = inputs().split(parts)[rank]
    y, dx, dw = outcome(layer, mine, second)
    for gradient in dw:
        dist.all_reduce(gradient)
    return y, dx, dw, {name: buffer.clone() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}])
@pytest.mark.parametrize("parts", [[3, 3], [1, 5]])
def test_ranks_together_equal_one_device(kwargs, second, parts, ranks):
    reference = layers(nn.BatchNorm2d, **kwargs)
    y, dx, dw = outcome(reference, inputs(), second)
    results = ranks(2).run(on_rank, kwargs, second, parts)
    assert (torch.cat([result[0] for result in results]) - y).abs().max() < 1e-12
    if not second:  # one loss over all samples, so each rank's input gradient is its part of the whole
        assert (torch.cat([result[1] for result in results]) - dx).abs().max() < 1e-12
        for ours, theirs in zip(results[0][2], dw, strict=True):
            assert (ours - theirs).abs().max() < 1e-11
    for name, buffer in reference.named_buffers():
        assert (results[0][3][name] - buffer).abs().max() < 1e-12


def penalty_on_rank(parts):
    rank = dist.get_rank()
    layer = layers(SyncBatchNorm)
    x = inputs().split(parts)[rank].clone().requires_grad_()
    loss = layer(x).tanh().square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (dw,) = torch.autograd.grad(slope.square().sum(), layer.weight)
    dist.all_reduce(dw)
    return slope.detach(), dw


@pytest.mark.parametrize("parts", [[3, 3], [2, 4]])
def test_a_gradient_penalty_through_it_equals_one_device(parts, ranks):
    reference = layers(nn.BatchNorm2d)
    x = inputs().requires_grad_()
    (slope,) = torch.autograd.grad(reference(x).tanh().square().sum(), x, create_graph=True)
    (dw,) = torch.autograd.grad(slope.square().sum(), reference.weight)
    results = ranks(2).run(penalty_on_rank, parts)
    assert (torch.cat([result[0] for result in results]) - slope).abs().max() < 1e-10
    assert (results[0][1] - dw).abs().max() < 1e-9 * dw.abs().max()


def far_from_zero():
    layer = SyncBatchNorm(1, affine=False)
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(2)) + 3000
    return layer(x.split(32)[dist.get_rank()]).std().item()


def test_variance_survives_a_mean_far_from_zero_in_float32(ranks):
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(2)) + 3000
    halves = [part.std().item() for part in nn.BatchNorm1d(1, affine=False)(x).split(32)]
    assert ranks(2).run(far_from_zero) == pytest.approx(halves, rel=1e-3)


def count_collectives():
    from tests.support.watch import Trace

    layer = SyncBatchNorm(3)
    x = torch.randn(4, 3, requires_grad=True)
    with Trace() as forward:
        y = layer(x)
    with Trace() as backward:
        y.square().sum().backward()
    layer.eval()
    with Trace() as evaluation:
        layer(x)
    return [len(trace.collectives) for trace in (forward, backward, evaluation)]


def test_one_collective_a_direction_and_none_in_evaluation(ranks):
    assert ranks(2).run(count_collectives) == [[1, 1, 0]] * 2


def test_conversion_is_in_place():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm2d(4)))
    before = [id(module) for module in net.modules()], list(net.state_dict()), [id(p) for p in net.parameters()]
    convert_sync_batchnorm(net)
    assert before == (
        [id(module) for module in net.modules()],
        list(net.state_dict()),
        [id(p) for p in net.parameters()],
    )
    assert [type(m).__name__ for m in net.modules() if "Norm" in type(m).__name__] == [
        "SyncBatchNorm",
        "SyncBatchNorm",
        "InstanceNorm2d",
    ]


def test_alone_it_is_torchs_own_batch_norm():
    ours, theirs = layers(SyncBatchNorm), layers(nn.BatchNorm2d)
    assert torch.equal(ours(inputs()), theirs(inputs()))
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        ours(torch.zeros(3))
