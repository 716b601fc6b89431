"""SEAN's operations beside what they compute, which test_generator.py compares with the plain ones."""

import pytest
import torch

from gan import ranks
from nets.norm import SyncBatchNorm
from nets.sean.normconv import Settings, mask_conv, norm_conv
from tests.support.rehearsal.threads import device_threads

CHANNELS, KINDS = 3, 5
WAYS = pytest.mark.parametrize("tables", [True, False], ids=["tables", "maps"])


def settings_of(tables: bool, keep: bool = False) -> Settings:
    torch.manual_seed(1)
    norm = SyncBatchNorm(CHANNELS, affine=False).double()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    draw = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, KINDS, (4, 1, 6 * 7), generator=draw) if tables else None
    return Settings(norm, True, pixels, 0.2, 1, keep)


def tensors(tables: bool) -> list[torch.Tensor]:
    """x, grain, noise scale, scale, shift, weight, bias."""
    draw = torch.Generator().manual_seed(0)
    affine = (4, CHANNELS, KINDS) if tables else (4, CHANNELS, 6, 7)
    shapes = [(4, CHANNELS, 6, 7), (4, 1, 6, 7), (CHANNELS, 1, 1), affine, affine, (2, CHANNELS, 3, 3), (2,)]
    made = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [part.requires_grad_(number != 1) for number, part in enumerate(made)]


@WAYS
def test_gradients_are_added_up_among_the_ranks_of_its_forward(tables):
    """Wherever backward runs: for a GPU in a thread of autograd's own."""
    settings, parts = settings_of(tables), tensors(tables)

    def forward() -> torch.Tensor:
        with ranks.summed_by(lambda values: values + 1, 0, 2):
            return norm_conv(settings, *parts).tanh().sum()

    with ranks.summed_by(lambda values: values + 1, 0, 2):
        wanted = torch.autograd.grad(forward(), parts[0])
    with device_threads():
        found = torch.autograd.grad(forward(), parts[0])
    assert torch.equal(*found, *wanted)


def test_a_gradient_of_its_gradient_is_refused():
    given = tensors(False)
    out = norm_conv(settings_of(False), *given)
    (slope,) = torch.autograd.grad(out.tanh().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()


def kept(tables: bool, keep: bool) -> int:
    storages = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parts = tensors(tables)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = norm_conv(settings_of(tables, keep=keep), *parts)
    assert out.requires_grad
    return sum(storages.values()) - sum(part.untyped_storage().nbytes() for part in parts)


@WAYS
def test_beyond_its_inputs_it_keeps_only_two_numbers_a_channel_unless_asked_for_more(tables):
    picture = 4 * CHANNELS * 6 * 7 * 8
    indices = 4 * 6 * 7 * 8 if tables else 0
    assert kept(tables, keep=False) <= 2 * CHANNELS * 8 + indices
    assert kept(tables, keep=True) >= 2 * picture


def test_a_mask_conv_keeps_nothing_but_what_comes_in():
    shapes = [(2, 3, 6, 5), (4, 3, 3, 3), (4,), (6, 4, 3, 3), (6,)]
    parts, saved = [torch.randn(shape).requires_grad_(shape != (2, 3, 6, 5)) for shape in shapes], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mask_conv(*parts)
    known = {part.untyped_storage().data_ptr() for part in parts}
    assert {tensor.untyped_storage().data_ptr() for tensor in saved if tensor.numel()} == known
