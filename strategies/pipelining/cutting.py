"""Where a pipeline cuts a network: into units, which are whole, and the units into stages."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import nn

from gan.files.errors import UserError
from gan.phase import Player
from strategies.advice import type_instead
from strategies.options.blocks import LISTS, has_forward, modules_of_blocks


@dataclass(frozen=True)
class Unit:
    """A module that one stage computes as a whole, and the parameters that live there."""

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    cuttable: bool  # whether a stage may begin with it
    stage: int = 0

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def networks_of(player: Player) -> dict[str, nn.Module]:
    """The networks that are called: the player's, or where that is a mere list or dict of networks, each of them."""

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if has_forward(module):
            yield name, module
            return
        if not isinstance(module, LISTS) or module._parameters:
            raise UserError(
                f"player '{player.name}': a pipeline needs a network that is called, and a {type(module).__name__} has "
                f"no forward; type {type_instead(player.name, 'zero3')}"
            )
        for inner, child in module.named_children():
            yield from walk(f"{name}.{inner}".lstrip("."), child)

    return dict(walk("", player.module))


def units_of(player: Player, path: str, network: nn.Module) -> list[Unit]:
    """The units of one of a player's networks, which has this path.

    [Note: what is a unit]
    A block is a unit (see [Note: what is a block] in options/blocks.py), and so is every module outside of blocks that
    has weights or running statistics. Another module with buffers alone, such as a quantizer, is a unit if the player
    names it. A Sequential or a list is not a unit, but each of its elements is; nor is the network itself. Their order
    is that in which the network has them. If the player names its blocks, a stage begins with one of them, and they
    come in the order in which they are named; otherwise a stage may begin with any unit that has weights.
    """
    blocks = set(modules_of_blocks(player))
    names = {id(parameter): name for name, parameter in player.module.named_parameters()}

    def walk(name: str, module: nn.Module) -> Iterator[Unit]:
        inside = [m for m in module.modules() if m in blocks]
        if module is network or (module not in blocks and (inside or isinstance(module, LISTS))):
            for inner, child in module.named_children():
                yield from walk(f"{name}.{inner}".lstrip("."), child)
            return
        parameters = {names[id(p)]: p for p in module.parameters()}
        if parameters or module in blocks or getattr(module, "track_running_stats", False):
            yield Unit(name, module, parameters, bool(parameters) if player.blocks is None else module in blocks)

    units = list(walk(path, network))
    _refuse_tied(player, units)
    return units if player.blocks is None else _as_named(units, list(dict.fromkeys(player.blocks)))


def layers_inside(units: Sequence[Unit]) -> list[str]:
    """The modules with weights of which units that only wrap them are made; of each unit none or several."""
    found = []
    for unit in units:
        inside = {unit.name: unit.module}
        while len(inside) == 1:
            [(path, module)] = inside.items()
            inside = {f"{path}.{name}": each for name, each in module.named_children() if [*each.parameters()]}
        found += inside
    return found


def _as_named(units: list[Unit], names: list[str]) -> list[Unit]:
    """The units, with blocks in the order of their names. A unit that is no block stays behind the one before it."""
    runs: dict[str, list[Unit]] = {"": []}
    for unit in units:
        if unit.name in names:
            runs[unit.name] = [unit]
        else:
            next(reversed(runs.values())).append(unit)
    return [unit for name in ["", *names] for unit in runs.get(name, [])]


def _refuse_tied(player: Player, units: Sequence[Unit]) -> None:
    seen: dict[int, str] = {}
    for unit in units:
        for name, parameter in unit.parameters.items():
            if (other := seen.setdefault(id(parameter), unit.name)) != unit.name:
                raise UserError(
                    f"player '{player.name}': weight '{name}' is in '{other}' and in '{unit.name}', which may be in "
                    f"two stages of a pipeline; type {type_instead(player.name, 'zero3')}, or name a block that has "
                    f"both: Player(..., blocks=[...])"
                )


def most_stages(units: Sequence[Unit]) -> int:
    return min(len(units), 1 + sum(unit.cuttable for unit in units[1:]))


def cut(units: Sequence[Unit], stages: int) -> list[Unit]:
    """The units with their stages. Stages are neighbours, and the largest has as few weights as can be."""
    runs: list[list[int]] = []  # units that no cut may part
    for number, unit in enumerate(units):
        if unit.cuttable or not runs:
            runs.append([])
        runs[-1].append(number)
    stages_of = share_out([1 + sum(units[number].elements for number in run) for run in runs], stages)
    return [replace(units[number], stage=s) for s, run in zip(stages_of, runs, strict=True) for number in run]


def share_out(sizes: Sequence[int], stages: int) -> list[int]:
    """The stage of each size. Stages are neighbours, and the largest is as small as can be: the sum of some sizes."""
    least = max(sizes)
    sums = sorted({total for first in range(len(sizes)) for total in accumulate(sizes[first:]) if total >= least})
    enough = bisect_left(sums, True, key=lambda limit: _filled(sizes, stages, limit)[-1] < stages)
    return _filled(sizes, stages, sums[enough])


def _filled(sizes: Sequence[int], stages: int, limit: int) -> list[int]:
    """The stage of each size, if no stage may be larger. So many stages, or more if the limit is too small."""
    found: list[int] = []
    stage, filled = 0, 0
    for position, size in enumerate(sizes):
        needed = len(sizes) - position == stages - 1 - stage  # each stage that is left needs one
        if filled and (filled + size > limit or needed):
            stage, filled = stage + 1, 0
        filled += size
        found.append(stage)
    return found
