"""The thread that writes beside training, and how the threads of several ranks meet."""

import errno
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from gan.files.errors import DiskError, UserError
from strategies.checkpoint.writing import Background
from strategies.world import StoreWorld


class Slow:
    """Something to write, that waits until it may, and fails if it must."""

    def __init__(self, error=None):
        self.may, self.error, self.done = threading.Event(), error, False

    def __call__(self):
        assert self.may.wait(60)
        if self.error is not None:
            raise self.error
        self.done = True


@pytest.mark.parametrize("error", [DiskError("full"), UserError("a mistake"), OSError(errno.ENOSPC, "a mistake")])
def test_only_the_failure_of_a_disk_is_excused_and_another_is_raised_once(error):
    background, slow, seen = Background(), Slow(error), []
    background.start(slow, lambda: seen.append("failed"), seen.append)
    for _ in range(2):
        background.afterwards(lambda: seen.append("then"))
    slow.may.set()
    with nullcontext() if isinstance(error, DiskError) else pytest.raises(type(error), match="a mistake"):
        background.wait()
    assert seen == ([error] if isinstance(error, DiskError) else ["failed"])
    background.wait()
    background.close()
    pickle.loads(pickle.dumps(Background())).close()  # one that has saved nothing can be sent to a process


def test_beside_another_error_a_failure_is_a_warning():
    background, slow = Background(), Slow(OSError("disk"))
    slow.may.set()
    background.start(slow, lambda: None)
    with pytest.warns(UserWarning, match="disk"):
        background.settle()
    background.close()


# ---- ranks that meet through a store ----


def together(size, step, **options):
    """What `step` makes or raises on each of some ranks that are threads."""
    store = dist.HashStore()

    def one(rank):
        ranks = StoreWorld(size, rank, name="a save", store=store, **options)
        try:
            return step(ranks)
        except Exception as error:  # noqa: BLE001 - whatever it is
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size))), store.num_keys()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("options", "error"), [({"limit": 0.2}, "has waited 0.2 seconds"), ({"lost": lambda: True}, "a rank was lost")]
)
def test_no_rank_waits_for_ever(who, options, error):
    def step(ranks):
        if ranks.rank == who:
            ranks.each(lambda: None)

    found, _ = together(2, step, **options)
    assert isinstance(found[who], dist.DistError if "lost" in options else UserError)
    assert error in str(found[who])
