"""Batch norms over all ranks, and spectral norms."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gan.files.errors import UserError
from nets.norm import ActNorm, SyncBatchNorm, in_groups
from nets.spectral import spectral_norm
from tests.scenes.losses import Gained, Stored
from tests.support.watch import Trace

NEAR = dict(rtol=0, atol=1e-12)


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 3, 20, generator=generator, dtype=torch.float64) * 2 + 10


def layers(kind, **kwargs):
    torch.manual_seed(1)
    layer = kind(3, **kwargs).double()
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def far_from_zero():
    layer = SyncBatchNorm(1, affine=False)
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(2)) + 3000
    return layer(x.split(32)[dist.get_rank()]).std().item()


def begun_on_rank(parts):
    """The weights of an ActNorm after its first batch, of which a rank has one part."""
    norm, rank = ActNorm(3).double(), dist.get_rank() if len(parts) > 1 else 0
    norm(inputs().split(parts)[rank][..., None])
    published = norm.published_state()
    return torch.cat([published["loc"], published["scale"]]).detach()


def test_an_actnorm_begins_with_the_batch_of_all_ranks(ranks):
    for found in ranks(2).run(begun_on_rank, [2, 4]):
        torch.testing.assert_close(found, begun_on_rank([6]), rtol=1e-12, atol=1e-12)


def test_variance_survives_a_mean_far_from_zero_in_float32(ranks):
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(2)) + 3000
    halves = [part.std().item() for part in nn.BatchNorm1d(1, affine=False)(x).split(32)]
    assert ranks(2).run(far_from_zero) == pytest.approx(halves, rel=1e-3)


def count_collectives():
    layer, x = SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    with Trace() as forward:
        y = layer(x)
    with Trace() as backward:
        y.square().sum().backward()
    with Trace() as evaluation:
        layer.eval()(x)
    return [len(trace.collectives) for trace in (forward, backward, evaluation)]


def test_one_collective_a_direction_and_none_in_evaluation(ranks):
    assert ranks(2).run(count_collectives) == [[1, 1, 0]] * 2


@pytest.mark.parametrize("how", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str)
def test_ours_is_torchs_for_one_rank(how):
    """That all are synchronised, and those in groups, is in tests/scenes/losses.py."""
    ours, theirs = (layers(kind, **how) for kind in (SyncBatchNorm, nn.BatchNorm1d))
    for training in (True, True, False):
        found, wanted = (norm.train(training)(inputs()) for norm in (ours, theirs))
        torch.testing.assert_close(found, wanted, **NEAR)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), **NEAR)


@pytest.mark.parametrize("training", [True, False])
def test_weights_may_be_of_another_type_as_with_bf16(training):
    """torch's own refuses that. What they give is what they give in full precision."""
    norm, x = layers(SyncBatchNorm).float().train(training), inputs().float()
    for weight in norm.parameters():
        weight.data = weight.data.bfloat16()
    found = norm(x)
    torch.testing.assert_close(found, layers(SyncBatchNorm).float().train(training)(x), rtol=0, atol=0.05)
    assert norm.weight.dtype == torch.bfloat16 and found.dtype == torch.float32


def test_what_cannot_be_in_groups_is_refused_with_what_to_type():
    with pytest.raises(UserError, match=r"groups of 4 samples gets a tensor of shape \(6, 3, 20\)"):
        in_groups(layers(nn.BatchNorm1d), 4)(inputs())
    with pytest.raises(UserError, match=r"Sequential .* torch's own \(0\); call nets.norm.batch_norm\(..., group=4\)"):
        in_groups(nn.Sequential(Gained(3)), 4)
    with pytest.raises(UserError, match=r"not torch's own \(no modules\)"):
        in_groups(Stored(3), 4)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        layers(SyncBatchNorm)(torch.zeros(3))


# ---- spectral ----


@pytest.fixture
def layer() -> nn.Conv2d:
    torch.manual_seed(0)
    made = spectral_norm(nn.Conv2d(3, 5, 3, dtype=torch.float64))
    parametrization = made.parametrizations.weight[0]
    for vector in (parametrization._u, parametrization._v):
        vector.copy_(torch.nn.functional.normalize(torch.randn_like(vector), dim=0))
    return made


def test_the_largest_singular_value_is_taken_in_full_precision_under_autocast(layer):
    layer.float().eval()
    plain = layer.weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.weight, plain)
        layer.train()
        layer(torch.randn(1, 3, 6, 6))
    parametrization = layer.parametrizations.weight[0]
    assert parametrization._u.norm().item() == pytest.approx(1, abs=1e-6)


def test_gradients_of_gradients_are_the_plain_divisions(layer):
    """A gradient penalty goes through the division twice."""
    layer.eval()
    ours = layer.parametrizations.weight
    u, v, weight = ours[0]._u, ours[0]._v, ours.original
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)

    def penalty(divided: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = torch.nn.functional.conv2d(x, divided, layer.bias).tanh().sum()
        slopes = torch.autograd.grad(out, (x, weight), create_graph=True)
        return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), (x, weight))

    wanted = penalty(weight / torch.dot(u, weight.flatten(1) @ v))
    torch.testing.assert_close(penalty(layer.weight), wanted, rtol=1e-11, atol=1e-11)
