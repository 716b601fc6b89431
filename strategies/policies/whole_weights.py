"""The weights of a player between phases: whole on all ranks, or averaged."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import gt
from typing import Any

from gan.ema import Ema
from gan.files.errors import UserError
from gan.phase import Player
from strategies import private
from strategies.optimizers.averages import EvalWeights
from strategies.options.recompute import Recompute
from strategies.policies.belongings import Belongings
from strategies.policies.memory import PlayerMemory
from strategies.sharding.resharded_parameter import withheld
from strategies.sharding.storage import Storage
from strategies.sharding.unshard_on_read import UnshardOnRead
from strategies.world import World

LEFT = (
    "an error has left `averaged()` or `gathered()`, after which weights come back only when all ranks do something "
    "together; catch the error inside of that `with`, or read weights in another `with trainer.strategy.gathered():`"
)


class WholeWeights(PlayerMemory):
    """What a policy lets an author's code see: to save, validate or compare."""

    name: str

    def __init__(self, player: Player, world: World, options: Mapping[str, Any], belongings: Belongings) -> None:
        super().__init__(player, world, options, belongings)
        self.storage = Storage(self.weights)
        self.on_read: UnshardOnRead | None = None  # what gathers weights in a phase, where they are sharded
        self.ema: Ema | EvalWeights | None = None
        self.recompute: Recompute | None = None
        self.patches: list[AbstractContextManager[Any]] = []  # methods of modules that `plain` takes off
        self.withheld = ExitStack()  # weights that are out of date, after an error has left `averaged`
        self.released = False  # after training

    @contextmanager
    def gathered(self, exact: bool = True) -> Iterator[None]:
        """Inside the `with`, the author's parameters are whole on all ranks. After an error it waits for no rank.

        What is written into them is kept. After `release` this does nothing.
        """
        if self.released:
            yield
            return
        after = self.storage.unshard if self.storage.unsharded else self.storage.reshard
        with nullcontext() if self.on_read is None else self.on_read.resting():
            self.storage.unshard(exact)
            with self._ending(after):
                yield

    @contextmanager
    def lent(self, to: str) -> Iterator[None]:
        """`gathered` for code that has ended at the end of the `with`: what it keeps of the weights, it will read."""
        with self.gathered():
            wholes = [] if self.on_read is None else [each.whole for each in self.storage.buckets]
            memory = [each.untyped_storage() for each in wholes if each is not None]
            before = list(map(private.uses, memory))
            yield
            if any(map(gt, map(private.uses, memory), before)):
                gc.collect()  # what is dead may refer to itself
            if any(map(gt, map(private.uses, memory), before)):
                raise UserError(
                    f"player '{self.player.name}': {to} keeps the memory of a weight that was gathered, which is freed "
                    f"again; read the weight itself each time, or type .clone() if its values of now are meant"
                )

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside the `with`, modules have no methods of ours, which would keep some from being copied or pickled."""
        patches = [*(self.recompute.patches if self.recompute is not None else ()), *self.patches]
        for patch in reversed(patches):
            patch.__exit__(None, None, None)
        try:
            yield
        finally:
            for patch in patches:
                patch.__enter__()

    @contextmanager
    def _ending(self, after: Callable[[], None]) -> Iterator[None]:
        """At the end of the `with`, call `after`, which may communicate; after an error later. See `Owed`.

        Until then weights that are out of date may not be read.
        """
        try:
            yield
        except BaseException:
            if not self.storage.unsharded:
                self.withheld.enter_context(withheld(self.weights.values(), LEFT))
            self.world.owed.work += [self.withheld.close, after]
            raise
        after()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the `with`, the player has its averaged weights, if any. After an error it waits for no rank."""
        if self.ema is not None and self.released and self.storage.owns_part:
            raise UserError(
                f"player '{self.player.name}': under '{self.name}' each rank had a part of the average, and training "
                f"has ended; use averaged() in on_train_end of the game or a callback, or load a checkpoint"
            )
        if self.ema is None:
            with self.gathered(exact=False):
                yield
            return
        self.storage.keep_writes()
        with self._ending(self.storage.reshard):
            try:
                with self.ema.swapped():
                    self.storage.shards_changed()
                    self.storage.unshard()
                    try:
                        yield
                    finally:
                        self.storage.keep_writes()
            finally:
                self.storage.shards_changed()
