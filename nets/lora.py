"""LoRA, Hu et al. 2021: a frozen network learns by additions of low rank to its layers."""

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

N = TypeVar("N", bound=nn.Module)


class LowRank(nn.Module):
    """A linear layer or a convolution with an addition of low rank, which is zero at first. The layer is frozen."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.layer = layer
        if isinstance(layer, nn.Linear):
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        else:
            place: tuple[Any, ...] = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
            self.down = nn.Conv2d(layer.in_channels, rank, *place, bias=False, padding_mode=layer.padding_mode)
            self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted(network: N, rank: int) -> N:
    """The network with adapters: its modules are copies, and its parameters are those of `network`, the same objects.

    Every linear layer and every convolution without groups gets an adapter. At first it computes what `network` does.
    """
    own = copy.deepcopy(network, {id(parameter): parameter for parameter in network.parameters()})
    for module in list(own.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1):
                setattr(module, name, LowRank(layer, rank).to(layer.weight))
    return own


def adapters(network: nn.Module) -> nn.ParameterList:
    """The parameters of all adapters in a network, as a player: `Player("student", adapters(student), ...)`."""
    added = [layer for layer in network.modules() if isinstance(layer, LowRank)]
    return nn.ParameterList(each.weight for layer in added for each in (layer.down, layer.up))
