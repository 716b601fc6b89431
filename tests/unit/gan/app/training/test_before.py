"""What is refused before any process is started."""

import os
import tempfile

import pytest
from jsonargparse import Namespace

from gan.app.run import options
from gan.app.training import start
from gan.files.errors import UserError
from gan.files.system import resource
from strategies import PhaseStrategy
from tests.support.posix import not_on_windows


@pytest.fixture
def check(monkeypatch):
    """`check(*typed, devices=2)`: check a command for so many devices on each host."""
    for name in [*os.environ]:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(start, "cores", lambda: 2)

    def make(*typed, devices=2, on_cpu=True):
        settings = options.parse([*typed])[0]
        start.check_settings(settings, PhaseStrategy(settings.strategy), devices, on_cpu)

    return make


def test_what_can_be_trained_is_not_refused(check, tmp_path):
    check("wgan-gp-faces")
    check("wgan-gp-faces", "--batch-size", "64", devices=32)
    check("wgan-gp-faces", "--batch-size", "64", devices=64, on_cpu=False)
    check("wgan-gp-faces", "--strategy", "generator=zero3+hybrid:2,*=ddp", devices=4)
    check("wgan-gp-faces", "--strategy", "generator=pipeline+schedule:interleaved+stages:6,*=ddp", devices=4)
    check("wgan-gp-faces", "--strategy", "generator=zero3@2-3,*=ddp@0-1", "--batch-size", "6", devices=4)
    check("wgan-gp-faces", "--batch-size", "6", "--nodes", "2:4")  # two hosts may come, or three
    check("sean-folder", "--data", str(tmp_path), "--labels", "3")
    check("wgan-gp-faces", devices=3)  # nobody has typed the batch, so that it becomes one that they can share


@pytest.mark.promise(
    "what cannot be trained: a batch that does not divide, too many devices, ranks that are not there",
    "refused before the first process",
)
@pytest.mark.parametrize(
    ("typed", "devices", "words"),
    [
        ("", 1000, "1000 processes on 2 CPU cores; type --devices 2, and 32 at most"),
        ("--batch-size 16", 3, "batch 16 is not divisible by 3 ranks; try --batch-size 15 or --batch-size 18"),
        ("--batch-size 6 --nodes 2", 2, "batch 6 is not divisible by 4 ranks"),
        ("--batch-size 7 --strategy generator=zero3@2-3,*=ddp@0-1", 4, "batch 7 is not divisible by 2 ranks"),
        ("--strategy generator=zero3@2-3,*=ddp@0-1", 2, "--strategy does not place 2 ranks: "),
    ],
)
def test_what_cannot_be_is_refused(typed, devices, words, check):
    with pytest.raises(UserError, match=words):
        check("wgan-gp-faces", *typed.split(), devices=devices)


def test_an_own_run_may_mean_something_else_by_its_batch(check, here):
    text = "from gan.runs import Run\ndef own(batch_size: int = 3, data: str = 'x') -> Run:\n    '''A run.'''\n"
    (here / "own.py").write_text(text)
    check("own.py:own")


NO_LIMIT = None if resource is None else resource.RLIM_INFINITY


@pytest.fixture
def shell(monkeypatch):
    """`shell(soft, hard)`: what it allows; returns what is set then."""
    taken = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: taken.append(both))

    def allow(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        return taken

    return allow


@not_on_windows
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
    start.allow_files(Namespace(workers=4), 2)
    assert set_to == taken


@pytest.mark.promise("too few file handles, threads or processes", "one line with the `ulimit` to type")
@not_on_windows
def test_a_shell_that_forbids_it_is_refused(shell):
    shell(64, 64)
    with pytest.raises(UserError, match=r"a process 64, and a rank with 4 workers needs 512; type ulimit -n 4096$"):
        start.allow_files(Namespace(workers=4), 2)


@not_on_windows
def test_a_folder_for_temporary_files_whose_name_is_too_long_is_refused_where_loaders_have_workers(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + 75 * "a")
    start.allow_files(Namespace(workers=0), 2)
    with pytest.raises(UserError, match=r"a name of 76 letters, .*; type export TMPDIR=/tmp, or --workers 0$"):
        start.allow_files(Namespace(workers=1), 2)
