"""Files written as a whole or not at all, and files of tensors."""

import os
import pickle
import re
import socket

import pytest
import torch

from gan.files.disk import load_plain, name_for, read_text, regular, whole_file
from gan.files.errors import UserError
from tests.support.posix import not_on_windows


@pytest.mark.parametrize(
    ("write", "read", "content"),
    [
        (lambda path: path.write_text("new"), lambda path: path.read_text(), "new"),
        (lambda path: path.write_bytes(b"new"), lambda path: path.read_bytes(), b"new"),
        (lambda path: torch.save({"a": 1}, path), torch.load, {"a": 1}),
    ],
)
@pytest.mark.parametrize("before", [None, "old"])
def test_the_file_appears_when_all_is_written_and_nothing_else_stays(before, write, read, content, tmp_path):
    path = tmp_path / "a.txt"
    if before is not None:
        path.write_text(before)
    with whole_file(path) as part:
        assert part.parent == tmp_path and part.name.startswith("a.txt.") and part.suffix == ".part"
        write(part)
        assert (path.read_text() if path.exists() else None) == before
    assert read(path) == content
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_flushed_to_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, named = tmp_path / "a.txt", []
    monkeypatch.setattr(os, "fsync", lambda _: named.append(path.exists()))
    with whole_file(path) as part:
        part.write_text("new")
    assert named == [False] and path.exists()


@pytest.mark.parametrize("before", [None, "old"])
def test_after_an_error_the_old_content_stays_and_the_half_is_removed(before, tmp_path):
    path = tmp_path / "a.txt"
    if before is not None:
        path.write_text(before)
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert [each.name for each in tmp_path.iterdir()] == ([] if before is None else ["a.txt"])
    assert before is None or path.read_text() == before


def test_a_place_that_cannot_be_written_fails_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    worked = False
    with pytest.raises(OSError), whole_file(tmp_path / "file" / "a.txt"):
        worked = True
    assert not worked


def test_two_processes_have_a_temporary_file_each(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    with whole_file(path) as one:
        one.write_text("one")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with whole_file(path) as other:
            other.write_text("other")
        assert path.read_text() == "other"
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"garbage", "it is not of torch.save, or holds more than tensors and plain values"),
        (pickle.dumps(re.compile), "it is not of torch.save, or holds more than tensors and plain values"),
        (b"", "it is not of torch.save, or holds more than tensors and plain values"),
    ],
)
def test_a_file_that_is_not_plain_is_named_without_advice_to_run_it(content, message, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(UserError, match=f"^{message}$"):
        load_plain(tmp_path / "x.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    assert load_plain(tmp_path / "x.pt") == {"a": torch.ones(1)}


@not_on_windows
def test_only_a_regular_file_is_read_and_only_a_small_one(tmp_path):
    file = tmp_path / "a"
    file.write_text("é" * 4)
    assert regular(file).st_size == 8 and read_text(file, 8) == "é" * 4
    with pytest.raises(OSError, match=f"it is larger than 7 bytes: '{file}'"):
        read_text(file, 7)
    with pytest.raises(FileNotFoundError):
        regular(tmp_path / "b")
    (tmp_path / "link").symlink_to(file)
    assert regular(tmp_path / "link") == regular(file)


@not_on_windows
def test_what_is_no_file_says_so(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    kinds = {"pipe": "a named pipe", "link": "a named pipe", "socket": "a socket", ".": "a folder"}
    for name, kind in {**kinds, "/dev/zero": "a device", "/dev/null": "a device"}.items():
        for read in (regular, lambda path: read_text(path, 9)):
            with pytest.raises(OSError, match=f"it is {kind}, and no file"):
                read(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "name"),
    [("G", "G"), ("train:3", "train_3"), ("a/b?", "a_b"), ("???", "picture"), ("aux", "_aux"), ("Con.x", "_Con.x")],
)
def test_a_files_name_is_one_that_every_system_takes(text, name):
    assert name_for(text) == name
