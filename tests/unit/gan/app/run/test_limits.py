"""Too few file handles, processes or threads are refused or named."""

import errno
import resource

import pytest

from gan.app.run import limits
from gan.files.errors import UserError

NO_LIMIT = resource.RLIM_INFINITY


@pytest.fixture
def shell(monkeypatch):
    """`shell(soft, hard)`: what it allows; returns what is set then."""
    taken = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: taken.append(both))

    def allow(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        return taken

    return allow


@pytest.mark.parametrize(
    ("soft", "hard", "taken"),
    [
        (64, 4096, [(544, 4096)]),
        (64, NO_LIMIT, [(544, NO_LIMIT)]),
        (64, 520, [(520, 520)]),  # enough for a rank alone, and ranks may need less
        (1024, 4096, []),
        (NO_LIMIT, NO_LIMIT, []),
    ],
)
def test_a_process_takes_what_it_may(soft, hard, taken, shell):
    set_to = shell(soft, hard)
    limits.allow_files(workers=4, ranks=2)
    assert set_to == taken


def test_a_shell_that_forbids_it_is_refused(shell):
    shell(64, 64)
    with pytest.raises(UserError, match=r"a process 64, and a rank with 4 workers needs 512; type ulimit -n 4096$"):
        limits.allow_files(workers=4, ranks=2)


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as found:
        return found


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), r"allows a process \d+; type ulimit -n \d+$"),
        (RuntimeError("Too many open files. Communication with the workers is"), "type ulimit -n"),
        (raised(RuntimeError("DataLoader"), OSError(errno.EMFILE, "Too many open files")), "type ulimit -n"),
        (RuntimeError("can't start new thread"), r"\(can't start new thread\); type ulimit -u"),
        (RuntimeError("Resource temporarily unavailable"), "no more processes .* type ulimit -u"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no more processes .* type ulimit -u"),
    ],
)
def test_what_a_shell_forbids_is_named(error, words):
    assert isinstance(limits.named(error), UserError)
    with pytest.raises(UserError, match=words):
        raise limits.named(error)


def test_other_errors_stay_what_they_are():
    for error in (
        None,
        ValueError("x"),
        OSError(errno.ENOENT, "x"),
        raised(UserError("y"), OSError(errno.EMFILE, "z")),
    ):
        assert limits.named(error) is None
