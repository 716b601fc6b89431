"""What tests of SEAN's networks share: weights that all matter, gradients under published names, a strict measure."""

from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn

from nets.published.files import published_state

ROUNDING = 1e-12
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "weight_u", "weight_v")


@torch.no_grad()
def scramble(net: nn.Module, seed: int) -> nn.Module:
    """The network in float64, with random values also in what starts at zero or one."""
    net.double()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in chain(net.named_parameters(), net.named_buffers()):
        if not tensor.is_floating_point():
            continue
        x = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if name.endswith("running_var"):
            x = 0.5 + x.abs()
        elif name.endswith(("._u", "._v")):
            x /= x.norm()
        elif x.dim() == 4:
            x /= x[0].numel() ** 0.5
        tensor.copy_(x)
    return net


def learning(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A published state dict whose parameters ask for gradients."""
    for key, tensor in state.items():
        tensor.requires_grad_(not key.endswith(BUFFERS))
    return state


def gradients(net: nn.Module, start: str = "") -> dict[str, Tensor]:
    """The gradients of a network's parameters under the published key names."""
    found = deepcopy(net, {id(parameter): nn.Parameter(parameter.grad) for parameter in net.parameters()})
    return {start + key: part for key, part in published_state(found).items() if not key.endswith(BUFFERS)}


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value, or to 1e-2: one gradient may cancel to less than that.

    A gradient that is zero up to rounding, as of a bias before a norm, is compared with 1.
    """
    assert found.shape == wanted.shape
    largest = wanted.abs().max().item()
    return (found - wanted).abs().max().item() / (max(largest, 1e-2) if largest > ROUNDING else 1.0)


def assert_same_gradients(found: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """That they are the oracle's; where the plain loops never use a parameter, ours are zero."""
    wanted = {key: tensor for key, tensor in state.items() if tensor.requires_grad}
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        assert distance(found[key], gradient) < 1e-12, key
