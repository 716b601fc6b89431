"""pipeline: each rank has some of the player's layers, and all samples of a group of ranks go through them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import groupby
from types import MethodType
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gan.files.errors import UserError
from gan.phase import Phase
from strategies import private
from strategies.advice import type_instead
from strategies.options.compile import refuse_compiled_by_author
from strategies.options.recompute import Recompute
from strategies.pipelining import cutting
from strategies.pipelining.call import call as call_in_stages
from strategies.pipelining.cutting import Unit
from strategies.pipelining.pipe import Pipe
from strategies.pipelining.stage_storage import StageReduction, StageStorage
from strategies.policies.amounts import size_of
from strategies.policies.policy import Policy
from strategies.sharding.reduction import Reduction
from strategies.sharding.storage import Storage

FITS = 2**30  # bytes of weights that every rank has room for in a trial as one device


class Pipeline(Policy):
    """The network is cut into stages of whole layers, one for each rank of a group; each group has a copy.

    Communication, in order, in each call of the network: 24 bytes to compare the calls; one all-gather of the inputs;
    the tensors that go from stage to stage, chunk by chunk; one scatter of the outputs. In its backward: one
    all-reduce of 4 bytes an output, which says whether some rank has a gradient of it; one gather of these gradients;
    the gradients of what went from stage to stage; if inputs learn, the same 4 bytes each, and one all-reduce of their
    gradients. After the phase's last backward one all-reduce of the gradients over the groups, if there are several,
    and norms and zero gradients as in zero2. Nothing in the update. `averaged` broadcasts the weights twice. A network
    whose forward writes buffers, or assigns attributes of blocks, broadcasts them after each call.

    Held on each rank: weights, gradients, optimizer state and average of its stages; in a phase what backward needs of
    its stages, for the samples of all ranks of its group.

    Options: `stages` is the size of a group, or with `schedule:interleaved` the number of stages. `chunks` is in how
    many parts the samples of a group go through the stages. See [Note: a call through a pipeline] in
    pipelining/pipe.py, and [Note: one forward on many ranks] in pipelining/program.py.
    """

    name = "pipeline"
    max_ranks = None
    runs_everywhere, in_stages = False, True
    keep = False
    takes = frozenset({"recompute", "stages", "chunks", "schedule"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipes: list[Pipe] = []  # one for each network

    def adopt(self, training: bool) -> None:
        super().adopt(training)
        for pipe in self.pipes:
            self._take_calls(pipe)

    # ---- stages ----

    @cached_property
    def networks(self) -> list[tuple[nn.Module, list[Unit]]]:
        """The player's networks, each with its units, which do not know their stages yet."""
        found = cutting.networks_of(self.player)
        return [(network, cutting.units_of(self.player, path, network)) for path, network in found.items()]

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The ranks of a group, and its stages."""
        stages = [cutting.most_stages(units) for _, units in self.networks]
        ranks, most = self.world.size, min(stages, default=0)
        if most < 2:
            paths = [path for path, count in zip(cutting.networks_of(self.player), stages, strict=True) if count < 2]
            what = f"'{paths[0]}'" if len(stages) > 1 else type(self.player.module).__name__
            apart = f" for all, or make {what} a player of its own" if len(stages) > 1 else ""
            short = [units for (_, units), count in zip(self.networks, stages, strict=True) if count < 2]
            inside = cutting.layers_inside(short[0]) if short else []
            if inside and self.player.blocks is None:
                apart += f", or name layers that its forward calls: Player(..., blocks={inside[:2]})"
            raise UserError(
                f"player '{self.player.name}': its {what} has no two layers between which a pipeline could cut it; "
                f"type {type_instead(self.player.name, 'ddp')}{apart}"
            )
        each = 2 if self.options.get("schedule") == "interleaved" else 1  # stages of a rank, by default
        typed, name = self.options.get("stages"), self.player.name
        sizes = [n for n in range(2, ranks + 1) if ranks % n == 0]  # of a group
        if typed is None:
            fitting = [n for n in sizes if n * each <= most]
        else:
            fitting = [n for n in sizes if (typed == n if each == 1 else typed % n == 0 and typed > n)]
        if (typed or 0) > most or not fitting:
            possible = ", ".join(str(n * each) for n in sizes if n * each <= most)
            advice = f"{name}={self.name}+stages:N with an N of {possible}" if possible else type_instead(name, "ddp")
            share = f"{'several' if each > 1 else 'one'}{f' of {typed}' if typed else ''}"
            raise UserError(
                f"player '{name}': its {type(self.player.module).__name__} can be cut into {most} stages, and there "
                f"are {ranks} ranks, so '{self.name}' cannot give each rank of a group {share}; type "
                f"{advice}"
            )
        size = max(fitting)
        return size, typed or size * each

    @cached_property
    def staged(self) -> list[tuple[nn.Module, list[Unit]]]:
        """The networks with their units, which know their stages."""
        return [(network, cutting.cut(units, self.shape[1])) for network, units in self.networks]

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """A row of ranks is a pipeline; a column of ranks has the same stages. None if all ranks are one pipeline."""
        ranks, _ = self.shape
        if ranks == self.world.size:
            return None
        return self.world.groups.mesh(self.world.device.type, (self.world.size // ranks, ranks), ("data", "stages"))

    # ---- what it costs ----

    @cached_property
    def parts(self) -> list[dict[str, nn.Parameter]]:
        """The parameters of each rank of a group. One outside of units is in the first stage."""
        stages = {name: unit.stage for _, units in self.staged for unit in units for name in unit.parameters}
        found: list[dict[str, nn.Parameter]] = [{} for _ in range(self.shape[0])]
        for name, parameter in self.belongings.parameters.items():
            found[stages.get(name, 0) % len(found)][name] = parameter
        return found

    def of_largest(self) -> dict[str, nn.Parameter]:
        """The parameters of the rank that has most."""
        return max(self.parts, key=lambda part: size_of(part.values()))

    @property
    def whole_bytes(self) -> float:
        return size_of(self.of_largest().values()) if self.divided else super().whole_bytes

    @property
    def owned_bytes(self) -> float:
        mine = self.of_largest() if self.divided else self.weights
        return size_of(self.weights[name] for name in mine if name in self.weights)

    def adopt_dry(self) -> None:
        """A plan counts its stages: see strategies/cost/stages.py."""

    # ---- storage ----

    def make_storage(self) -> Storage:
        self._refuse()
        group, copies = self.group, None
        if self.mesh is not None:
            group, copies = self.mesh.get_group("stages"), self.mesh.get_group("data")
        overlaps, chunks = self.options.get("schedule") == "1f1b", self.options.get("chunks")
        for network, units in self.staged:
            pipe = Pipe(self.player.name, network, units, group, copies, self.world.device, chunks, overlaps=overlaps)
            self.pipes.append(pipe)
            self._tell(units)
        return StageStorage(self.weights, self.parts, group)

    def _refuse(self) -> None:
        name, module = self.player.name, self.player.module
        refuse_compiled_by_author(self.player, self.belongings.readers, self.name)
        for phase in self.world.groups.phases:
            if phase.second_order and name in phase.learners:
                raise UserError(
                    f"player '{name}': phase '{phase.name}' differentiates its gradient (second_order=True), which "
                    f"does not go through a pipeline; type {type_instead(name, 'zero3')}"
                )
        self.check_apart()
        own = set(map(id, self.belongings.parameters.values()))
        if any(id(parameter) not in own for parameter in module.parameters()):
            raise UserError(
                f"player '{name}' has parameters that another player has too, and a pipeline has them on one rank "
                f"only; type {type_instead(name, 'zero3')}"
            )

    def _tell(self, units: Sequence[Unit]) -> None:
        total = max(1, sum(unit.elements for unit in units))
        parts = []
        for _, its in groupby(units, lambda unit: unit.stage):
            own = list(its)
            names = own[0].name if len(own) == 1 else f"{own[0].name} to {own[-1].name}"
            parts.append(f"{names} ({100 * sum(unit.elements for unit in own) / total:.0f} % of the weights)")
        private.say(f"player '{self.player.name}' in stages: {'; '.join(parts)}")

    def make_reduction(self) -> Reduction:
        assert isinstance(self.storage, StageStorage)
        return StageReduction(self.storage, self.world.device, self.group, self.pipes)

    def make_recompute(self) -> Recompute:
        """Each unit computes again by itself, because a block may not reach over two stages."""
        if not self.pipes:
            return super().make_recompute()
        units = [(unit.name, unit.module) for _, units in self.networks for unit in units]
        return Recompute(self.player, units, readers=self.belongings.readers)

    def during(self, phase: Phase, trying: bool = False) -> AbstractContextManager[Any]:
        for pipe in self.pipes:
            pipe.trying = trying
        return super().during(phase)

    @contextmanager
    def as_one_device(self) -> Iterator[None]:
        """Calls go through the network as its author wrote it, so that a trial does not compare stages with stages."""
        if size_of(self.belongings.parameters.values()) <= FITS:
            self.storage.unshard()
        try:
            with super().as_one_device():
                yield
        finally:
            self.storage.reshard()

    # ---- calls of the network and of its units ----

    def _take_calls(self, pipe: Pipe) -> None:
        """Calls of the network go through the pipeline, and those of its units to their stage, while weights are apart.

        A unit is taken over with its hooks (`_call_impl`), as these may read its weights.
        """
        storage, network = self.storage, pipe.network
        forward = network.forward

        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if storage.unsharded or pipe.program is not None:
                return forward(*args, **kwargs)
            return call_in_stages(pipe, forward, args, kwargs)

        self._take(network, "forward", call)
        for unit in pipe.units:
            self._take_unit(pipe, unit)

    def _take_unit(self, pipe: Pipe, unit: Unit) -> None:
        storage, plain = self.storage, unit.module._call_impl

        def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if pipe.program is not None and not pipe.program.running:
                return pipe.program.call(unit, plain, args, kwargs)
            if pipe.program is None and not storage.unsharded:
                raise UserError(
                    f"player '{self.player.name}': '{unit.name}' is called by itself, not by the forward of its "
                    f"{type(pipe.network).__name__}, and under policy '{self.name}' its weights are on one rank; type "
                    f"{type_instead(self.player.name, 'zero3')}"
                )
            return plain(*args, **kwargs)

        self._take(unit.module, "_call_impl", call)

    def _take(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self.patches.append(mock.patch.object(module, name, MethodType(call, module)))
        self.taken.enter_context(self.patches[-1])

    def release(self) -> None:
        self.pipes, self.patches = [], []
        super().release()
