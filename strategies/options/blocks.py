"""Where the option recompute and the policies fsdp and pipeline divide a network into blocks."""

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TypeGuard

from torch import nn

from gan.files.errors import UserError
from gan.phase import Player
from strategies.advice import type_instead

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class LayerGroups:
    """A Sequential whose layers run in groups. Each group is a range of positions, and is a block."""

    def __init__(self, name: str, sequential: nn.Sequential, ranges: list[tuple[int, int]]) -> None:
        self.sequential, self.ranges = sequential, ranges
        self.names = [f"{name}[{begin}:{end}]" for begin, end in ranges]


Block = tuple[str, nn.Module | LayerGroups]


def find_blocks(player: Player) -> list[Block]:
    """The blocks that the player names. If it names none, those of [Note: what is a block].

    [Note: what is a block]
    A part of the network that consists of several layers is a block. But if the part contains a list of such parts,
    each of these is a block instead. Single layers in a Sequential are put into groups, and each group is a block: of n
    layers with weights, about sqrt(n) go into each group, which begins with one of them. A single layer is no block,
    because its backward needs only its input anyway.
    """
    if blocks := _blocks(player):
        return blocks
    raise UserError(
        f"player '{player.name}': recompute finds no block of several layers in its {type(player.module).__name__}; "
        f"leave the option out for it, {type_instead(player.name, without='recompute')}, or name modules that have a "
        f"forward: Player(..., blocks=[...])"
    )


def modules_of_blocks(player: Player) -> list[nn.Module]:
    """The blocks that are modules of their own, without the network itself. A network without blocks has none."""
    blocks = (block for _, block in _blocks(player) if not isinstance(block, LayerGroups))
    return [block for block in blocks if block is not player.module]


def _blocks(player: Player) -> list[Block]:
    return _of_network("", player.module) if player.blocks is None else _named(player, player.blocks)


def _named(player: Player, blocks: Sequence[str]) -> list[Block]:
    modules = dict(player.module.named_modules())
    inside = {id(m): name for name in blocks for m in modules[name].modules() if m is not modules[name]}
    for name in blocks:
        if not has_forward(modules[name]):
            raise UserError(
                f"player '{player.name}': block '{name}' is a {type(modules[name]).__name__}, which has no forward; "
                f"name its elements"
            )
        if id(modules[name]) in inside:
            raise UserError(f"player '{player.name}': block '{name}' is inside block '{inside[id(modules[name])]}'")
    return [(name, modules[name]) for name in dict.fromkeys(blocks)]


def _of_network(name: str, module: nn.Module) -> list[Block]:
    """The blocks of a whole network, which is not one block if it has parts. A mere wrapper of a network is skipped."""
    parts = [(inner, child) for inner, child in _children(name, module) if _has_layers(child)]
    if not parts or _is_sequential(module) or _holds_list(module):
        return _of_part(name, module)
    if len(parts) == 1:
        return _of_network(*parts[0])
    return [block for part in parts for block in _of_part(*part)]


def _of_part(name: str, module: nn.Module) -> list[Block]:
    if not _has_layers(module):
        return []
    if _is_sequential(module) or _holds_list(module):
        blocks = [block for part in _children(name, module) for block in _of_part(*part)]
        return blocks + (_groups(name, module) if _is_sequential(module) else [])
    return [(name, module)] if has_forward(module) else []


def _groups(name: str, sequential: nn.Sequential) -> list[Block]:
    layers, ranges = list(sequential), []
    for is_part, positions in groupby(range(len(layers)), lambda k: _has_layers(layers[k])):
        row = list(positions)
        weighted = [k for k in row if any(weight.dim() > 1 for weight in layers[k].parameters())]  # no mere norms
        if weighted and not is_part:
            each = math.ceil(len(weighted) / math.isqrt(len(weighted)))
            ranges += [(a, b) for a, b in pairwise([*weighted[::each], row[-1] + 1]) if b - a > 1]
    return [(name, LayerGroups(name, sequential, ranges))] if ranges else []


def _holds_list(module: nn.Module) -> bool:
    """Whether the module is, or contains somewhere, a list of parts with several layers."""
    return any(isinstance(m, LISTS) and any(_has_layers(c) for _, c in _children("", m)) for m in module.modules())


def _has_layers(module: nn.Module) -> bool:
    """Whether modules inside the module do some of its work."""
    children = [child for _, child in _children("", module)]
    return len(children) > 1 if _is_sequential(module) else any(True for c in children for _ in c.parameters())


def _children(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    # torch's parametrizations, such as a spectral norm, are modules too, but not layers.
    return [(f"{name}.{n}".lstrip("."), child) for n, child in module.named_children() if n != "parametrizations"]


def _is_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether the module does what Sequential does, and nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called. The class of what torch.jit.script makes has no forward to look at."""
    return getattr(type(module), "forward", None) is not nn.Module.forward
