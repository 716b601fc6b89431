"""zero3, also called fsdp: everything of the player shared out, put together for the phases that use it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch import nn

from gan.phase import Phase, Player
from strategies.bucket import Bucket, buckets
from strategies.policy import World
from strategies.zero2 import Zero2


class Zero3(Zero2):
    """Each rank keeps its own equal share of the weights too, also those of a frozen player.

    Communication, in order: before a phase one all-gather a bucket for each learner, and the same for another player
    when the phase's loss first calls it (a forward of any module in it, or a method of the author's own); in the last
    backward one reduce-scatter a bucket, afterwards norms and questions as in zero2; nothing in the update. What the
    phase gathered it lets go: a player that no phase uses moves nothing. `averaged` gathers once.

    Held on each rank between phases: everything / ranks. During a phase that uses it a player's weights are whole, and
    its gradients while backward makes them: the phase that uses most must fit.

    [Note: whole for the phase]
    Weights could be gathered module by module instead, twice for each forward and backward. But a gradient penalty
    needs all of them at once (FSDP2 fails there, pytorch #172543), ranks whose samples take different branches
    would gather different modules, and a network's own methods would run where no module is entered. Whole for the
    phase, each weight moves once however often the loss uses it, and all of these are exact.

    [Note: a graph that outlives its phase]
    What `GanModule.shared` made in one phase may be differentiated in the next, and its backward reads weights. While
    there is any, players stay gathered to the end of the step, except a learner, whose update makes new weights.
    """

    name = "zero3"
    keep = False

    def __init__(self, player: Player, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(player, world, options)
        self.everything: list[Bucket] = []
        self.methods: list[tuple[nn.Module, str]] = []

    # ---- the verbs ----

    def cut(self) -> None:
        """Also the parameters that do not learn; and be told when the player is used."""
        super().cut()
        if self.alone:
            return
        others = {name: p for name, p in self.player.module.named_parameters() if name not in self.weights}
        self.everything = [
            *self.buckets,
            *buckets(others, self.world.size, self.world.rank, self.group, keep=False),
        ]
        for module in self.player.module.modules():
            self.hooks.append(module.register_forward_pre_hook(self._used, prepend=True))
            for name in _own_methods(module):
                setattr(module, name, self._gathering(getattr(module, name)))
                self.methods.append((module, name))

    def _used(self, *_: Any) -> None:
        self.gather()

    def _gathering(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def gathers_first(*args: Any, **kwargs: Any) -> Any:
            self.gather()
            return method(*args, **kwargs)

        return gathers_first

    def gather(self) -> None:
        """The player's weights are whole until it rests."""
        for bucket in self.everything:
            if not bucket.gathered:
                bucket.gather()

    def hold(self, phase: Phase) -> AbstractContextManager[Any]:
        """See [Note: whole for the phase]."""
        self.gather()
        return super().hold(phase)

    def spread(self) -> None:
        """The shares have changed: what was gathered from the old ones is of no use."""
        for bucket in self.buckets:
            bucket.let_go()

    def rest(self) -> None:
        """Keep the shares alone."""
        for bucket in self.everything:
            if bucket.gathered:
                bucket.let_go()

    def settle(self) -> None:
        """Gather for good."""
        self.gather()

    def release(self) -> None:
        """The author's methods are the author's again."""
        for module, name in self.methods:
            delattr(module, name)
        self.methods = []
        for bucket in self.everything[len(self.buckets) :]:
            bucket.release()
        super().release()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the shares and gather."""
        if self.ema is None or not self.buckets:
            with self.gathered():
                yield
            return
        try:
            with self.ema.swapped():
                self.spread()
                self.gather()
                yield
        finally:
            self.rest()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole for a while; afterwards as before."""
        before = all(bucket.gathered for bucket in self.everything)
        self.gather()
        yield
        if not before:
            self.rest()

    @property
    def dealt(self) -> list[Bucket]:
        """Frozen parameters, too."""
        return self.everything

    def loaded(self) -> None:
        """What was gathered from the old shares is of no use."""
        self.rest()


def _own_methods(module: nn.Module) -> list[str]:
    """The public methods that a network's author gave it."""
    kind = type(module)
    if kind.__module__.startswith("torch."):
        return []
    return [
        name
        for name in dir(kind)
        if not name.startswith("_") and not hasattr(nn.Module, name) and _is_function(kind, name)
    ]


def _is_function(kind: type, name: str) -> bool:
    return inspect.isfunction(inspect.getattr_static(kind, name))
