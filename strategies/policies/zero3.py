"""zero3: everything of the player sharded, and unsharded where a phase reads it."""

from functools import cached_property

from strategies.options.compile import refuse_compiled_by_author
from strategies.policies.zero2 import Zero2
from strategies.sharding.storage import Buckets, Storage
from strategies.sharding.unshard_on_read import UnshardOnRead

FEW = 2  # with so few buckets, gathering them one by one saves no memory


class Zero3(Zero2):
    """Each rank keeps its own equal share of the weights too, also those of a frozen player.

    Communication, in order: when a phase's loss first reads a weight, one all-gather of its bucket; at the same time
    the bucket that came next when this phase was last played is gathered ahead; when the forward that read it has
    ended, the bucket is resharded; when backward needs it, it is gathered again, and then its gradients are
    reduce-scattered; after the last backward, only if buckets were gathered one by one, 16 bytes to check that all
    ranks used the same order; norms and zero gradients as in zero2; nothing in the update. A player that no phase
    reads moves nothing. `averaged` gathers once.

    Held on each rank between phases: everything / ranks. During a phase that reads the player: the weights of the
    buckets that running forwards have read, and of two more; and whole gradients of the buckets that backward is
    working on.

    [Note: whole for the phase]
    A gradient penalty reads every weight several times. So in a phase of second order a learner is unsharded before
    the phase, and another player when it is first read. Both stay whole until the phase ends, so each weight moves
    once. (FSDP2 fails there, pytorch #172543.) The same is done for a compiled player, for a player of a few buckets,
    which would save no memory, and with the option `whole`. That option is for networks in which the sample decides
    which layers run, so that ranks read different weights. Without `whole` that is an error: the first time that a
    phase is played, ranks agree on each gather. If they go different ways only later, the error comes at the end of the
    phase, or they wait for each other until the process group's timeout.
    """

    name = "zero3"
    takes = Zero2.takes | {"whole"}
    keep = False
    communicates_only_in_its_turn = False

    @cached_property
    def always_whole(self) -> bool:
        """Whether the player is whole in every phase that reads it."""
        few = sum(len(list(self.parts(each))) for each in self.weights_and_others()) <= FEW
        return few or bool(self.options.keys() & {"whole", "compile"})

    def make_storage(self) -> Storage:
        weights, others = self.weights_and_others()
        readers = self.belongings.readers
        refuse_compiled_by_author(self.player, readers, self.name)
        storage = Buckets(weights, self.sharing, self.buckets(weights), self.buckets(others))
        self.on_read = UnshardOnRead(readers, storage, self.name, self.always_whole)
        return storage
