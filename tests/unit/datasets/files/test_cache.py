"""Files that were good are not read again: until they change, across kills, and among processes."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from datasets import FolderPairs
from datasets.files import cache
from datasets.files.cache import all_files, cache_folder, remember
from gan.files.disk import lockable
from gan.files.errors import UserError
from gan.files.system import lock
from tests.support.layouts import labels, pairs, put
from tests.support.posix import not_on_windows

KEYS = ["a", "b", "ü", "d"]


def named(*keys):
    return np.array([key.encode() for key in keys])


def done(file, keys=KEYS, at=(1, 2, 3, 4), bad=(), **options):
    """What was done, and the problems, which are the keys in `bad`."""
    did = []

    def work(entry):
        did.append(KEYS[entry])
        if KEYS[entry] in bad:
            raise UserError(f"{KEYS[entry]} is bad")
        return KEYS[entry]

    stamps = np.array(at, np.int64).reshape(len(keys), -1)
    texts, problems = remember(file, named(*keys), stamps, work, "working", **options)
    assert [text is None for text in texts] == [key in bad for key in keys]
    return did, problems


def test_work_is_done_once(tmp_path):
    file = tmp_path / "known.jsonl"
    assert done(file) == (KEYS, [])
    assert done(file) == ([], [])
    assert done(file, at=(1, 9, 3, 4)) == (["b"], []), "changed"
    assert done(file, at=(1, 9, 3, 4)) == ([], [])
    assert done(file, keys=KEYS[:3], at=(1, 9, 3)) == ([], []), "one fewer"
    assert done(file, keys=[*KEYS[:3], "d"], at=(1, 9, 3, 5)) == (["d"], []), "new"
    assert done(file, at=(1, 9, 3, 5), good=lambda text: text != "b") == (["b"], []), "its result is lost"
    assert done(file, at=np.ones((4, 2), np.int64)) == (KEYS, []), "another kind of stamp"


def test_a_problem_is_looked_at_again(tmp_path):
    file = tmp_path / "known.jsonl"
    assert done(file, bad="bd") == (KEYS, ["b is bad", "d is bad"])
    assert done(file, bad="d") == (["b", "d"], ["d is bad"])
    assert done(file) == (["d"], [])


@pytest.mark.promise("a damaged cache of a data set", "it is made again")
def test_a_damaged_file_is_made_again(tmp_path):
    file = tmp_path / "known.jsonl"
    for damage in (b"", b"PK\x03\x04 nothing", b"text", b'00000000 ["a", 1, "a"]\n'):
        done(file)
        file.write_bytes(damage)
        assert done(file) == (KEYS, []) and done(file) == ([], [])


class Elsewhere:
    """Work that leaves a file which says who did it; it can be sent to a process however that starts."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, entry):
        with (self.folder / f"{entry}").open("x") as file:
            file.write(str(os.getpid()))
        if entry % 50 == 0:
            raise UserError(f"{entry} is bad")
        return ""


def many(file, count, work):
    keys, at = named(*map(str, range(count))), np.zeros((count, 1), np.int64)
    return remember(file, keys, at, work, "working")


def test_many_entries_are_worked_on_by_processes(tmp_path):
    (tmp_path / "made").mkdir()
    before, work = torch.get_rng_state(), Elsewhere(tmp_path / "made")
    _, problems = many(tmp_path / "known.jsonl", 200, work)
    assert problems == ["0 is bad", "50 is bad", "100 is bad", "150 is bad"]
    who = [path.read_text() for path in (tmp_path / "made").iterdir()]
    assert len(who) == 200 and str(os.getpid()) not in who, "every entry once, and none of them here"
    assert torch.equal(torch.get_rng_state(), before)


def _slowly(folder, number):
    """Work that says it was done, for a process of its own."""

    def work(entry):
        time.sleep(0.01)
        (folder / f"{entry}-{number}-{time.monotonic_ns()}").touch()
        return ""

    many(folder / "cache" / "known.jsonl", 60, work)


def _start(folder, number):
    process = multiprocessing.get_context("fork").Process(target=_slowly, args=(folder, number))
    process.start()
    return process


def did(folder):
    return sorted(int(path.name.split("-")[0]) for path in folder.iterdir() if "-" in path.name)


@not_on_windows
def test_processes_that_start_together_share_the_work(tmp_path):
    for process in [_start(tmp_path, number) for number in range(3)]:
        process.join()
        assert process.exitcode == 0
    assert did(tmp_path) == list(range(60))
    assert len({path.name.split("-")[1] for path in tmp_path.iterdir() if "-" in path.name}) == 1


@not_on_windows
def test_a_kill_costs_little_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "NOTE_EVERY", 0)
    process = _start(tmp_path, 0)
    while len(did(tmp_path)) < 40:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with (tmp_path / "cache" / "known.jsonl").open("ab") as file:
        file.write(b"12345678 [half")
    second = _start(tmp_path, 1)
    second.join()
    assert second.exitcode == 0, "the lock went with the killed process"
    assert set(did(tmp_path)) == set(range(60)) and len(did(tmp_path)) < 60 + 40, "some of it was not done again"


def test_the_cache_lies_beside_the_data_or_where_it_may(tmp_path, monkeypatch):
    """Not inside, where torchvision's ImageFolder takes each folder for a class."""
    monkeypatch.delenv("GAN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    root = tmp_path / "set"
    root.mkdir()
    beside = tmp_path / "set.gan-cache"
    monkeypatch.chdir(root)
    assert cache_folder(root) == cache_folder(Path()) == beside
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    home = cache_folder(root)
    assert home.parent == tmp_path / "home" / "gan" and home.name.startswith("set-")
    (tmp_path / "other" / "set").mkdir(parents=True)
    assert cache_folder(tmp_path / "other" / "set") != home, "sets of one name"
    beside.mkdir()
    assert cache_folder(root) == beside, "which its owner has made"
    monkeypatch.setenv("GAN_CACHE", str(tmp_path / "chosen"))
    assert cache_folder(root).parent == tmp_path / "chosen"


def test_a_folder_in_place_of_a_file_or_the_reverse_and_a_disk_that_is_full_are_named(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").touch()
    for name, why in (("folder.jsonl", "Is a directory"), ("file/x.jsonl", "(Not a directory|File exists)")):
        with pytest.raises(UserError, match=rf"cannot write to .*: {why}; set the environment variable GAN_CACHE"):
            done(tmp_path / name)
    full = 28, "No space left on device"
    with pytest.raises(UserError, match=r"cannot write to .*: No space left on device; set the environment variable"):
        done(tmp_path / "known.jsonl", saving=mock.Mock(side_effect=OSError(*full)))
    _, problems = many(tmp_path / "known.jsonl", 1, mock.Mock(side_effect=OSError(*full, "0.png")))
    assert problems == ["[Errno 28] No space left on device: '0.png'"]


def test_who_waits_is_told_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache, "SILENT_WAIT", 0.01)
    held = threading.Event()

    def hold():
        with lockable(tmp_path / "known.lock", os.O_RDWR | os.O_CREAT) as handle:
            lock(handle)
            held.set()
            time.sleep(0.2)

    threading.Thread(target=hold).start()
    held.wait()
    assert done(tmp_path / "known.jsonl") == (KEYS, [])
    assert f"that reads the data into {tmp_path}" in capsys.readouterr().err


@pytest.fixture
def root(tmp_path):
    return pairs(tmp_path, *"abc")


def read(root, monkeypatch, labels=4):
    """The pictures that opening the set reads."""
    seen, whole = [], FolderPairs._check
    with monkeypatch.context() as patch:
        patch.setattr(FolderPairs, "_check", lambda self, k: seen.append(self.paths(k)[0].stem) or whole(self, k))
        FolderPairs(root, labels, 8)
    return seen


def test_a_set_that_moves_is_known_and_what_has_changed_or_another_number_of_labels_is_noticed(root, monkeypatch):
    assert read(root, monkeypatch) == ["a", "b", "c"]
    cache_folder(root).rename(root.with_name("moved.gan-cache"))
    root = root.rename(root.with_name("moved"))
    assert read(root, monkeypatch) == []
    state = (root / "images" / "c.png").stat()
    os.utime(root / "images" / "c.png", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    put(root / "labels" / "b.png", labels(top=3))
    pairs(root, "aa")
    assert read(root, monkeypatch) == ["aa", "b", "c"]
    for folder in ("images", "labels"):
        (root / folder / "a.png").unlink()
    assert read(root, monkeypatch) == [], "removed"
    with pytest.raises(UserError, match=r"the allowed range is 0\.\.2"):
        read(root, monkeypatch, labels=3)
    assert read(root, monkeypatch) == [], "and spoils nothing"


def test_hidden_files_and_caches_are_no_data(tmp_path):
    for name in ("a", ".a", "b/c", ".git/d", "b.gan-cache/e", "b/gan-cache/f"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(entry.name for entry in all_files(tmp_path)) == ["a", "c"]


@pytest.mark.promise("links that loop, names that differ in case, pictures that are none", "named in one line")
@not_on_windows
def test_links_may_lead_out_but_not_round(tmp_path):
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "b").touch()
    (tmp_path / "set" / "one").symlink_to(tmp_path / "far")
    (tmp_path / "set" / "two").symlink_to(tmp_path / "far")
    (tmp_path / "set" / "itself").symlink_to("itself")
    assert sorted(entry.name for entry in all_files(tmp_path / "set")) == ["b", "b", "itself"]
    (tmp_path / "far" / "back").symlink_to(tmp_path / "set")
    with pytest.raises(UserError, match=r"set/(one|two)/back links to a folder that it is in; remove the link"):
        list(all_files(tmp_path / "set"))


@not_on_windows
def test_a_cache_that_is_no_file_is_made_again(tmp_path):
    pipe, device = tmp_path / "pipe.jsonl", tmp_path / "device.jsonl"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for file in (pipe, device):
        assert done(file) == (KEYS, []) and done(file) == ([], [])
