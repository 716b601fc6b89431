"""Files and their names, messages, what systems differ in, and late imports."""

import gc
import os
import pickle
import re
import socket
import sys
import warnings

import pytest
import torch

from gan.app.outputs import quiet, say
from gan.app.run import options
from gan.files import errors, system
from gan.files.disk import load_plain, name_for, read_text, regular, remove_parts, whole_file
from gan.files.errors import UserError, printable, refuse, this_rank
from gan.files.loading import LIGHTNINGS_RANKS, loading
from gan.files.system import check_ranks
from tests.support.posix import not_on_windows


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("before", [{}, {"a.txt": "old"}])
def test_the_file_appears_when_all_is_written_and_flushed_and_the_old_content_stays_after_an_error(
    before, tmp_path, monkeypatch
):
    path, flushed = tmp_path / "a.txt", []
    for text in before.values():
        path.write_text(text)
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert texts(tmp_path) == before
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append(texts(tmp_path)))
    with whole_file(path) as part:
        assert part.parent == tmp_path and part.name.startswith("a.txt.") and part.suffix == ".part"
        part.write_text("new")
        part.chmod(0o600)  # as safetensors leaves its file
    assert flushed == [{**before, part.name: "new"}] and texts(tmp_path) == {"a.txt": "new"}
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode, "it may be read by who may read others"
    with pytest.raises(OSError), whole_file(path / "in a file"):
        pytest.fail("a place that cannot be written fails before the work")


def test_who_ends_in_the_midst_leaves_no_temporary_file(tmp_path):
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "a.txt") as part:
        part.write_text("half")
        remove_parts()
        assert not any(tmp_path.iterdir())
    with whole_file(tmp_path / "a.txt"):
        pass
    remove_parts()
    assert (tmp_path / "a.txt").exists()


@pytest.mark.parametrize("content", [b"garbage", pickle.dumps(re.compile), b""])
def test_a_file_that_is_not_plain_is_named_without_advice_to_run_it(content, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"^it is not of torch.save, or holds more than tensors and plain values$"):
        load_plain(tmp_path / "x.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    assert load_plain(tmp_path / "x.pt") == {"a": torch.ones(1)}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_changed_weight_is_found_by_the_checksums_of_torchs_zip(zipped, tmp_path):
    torch.save({"a": torch.ones(64)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    one = torch.ones(1).numpy().tobytes()
    (tmp_path / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes().replace(64 * one, 63 * one + b"\0\0\1\0"))
    if zipped:
        with pytest.raises(UserError, match=r"^it is damaged: x/data/0 in it has another checksum$"):
            load_plain(tmp_path / "x.pt")
    else:  # the form of before has none
        assert load_plain(tmp_path / "x.pt")["a"][-1] != 1


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


@pytest.mark.promise("a named pipe, a device, a socket or a folder in place of a file", "named, and not waited for")
@not_on_windows
def test_what_is_no_file_says_so(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    kinds = {"pipe": "a named pipe", "link": "a named pipe", "socket": "a socket", ".": "a folder"}
    for name, kind in {**kinds, "/dev/zero": "a device"}.items():
        with pytest.raises(OSError, match=f"it is {kind}, and no file"):
            read_text(tmp_path / name, 9)


@pytest.mark.parametrize(
    ("text", "name"),
    [("G", "G"), ("train:3", "train_3"), ("a/b?", "a_b"), ("???", "picture"), ("aux", "_aux"), ("Con.x", "_Con.x")],
)
def test_a_files_name_is_one_that_every_system_takes(text, name):
    assert name_for(text) == name


# ---- errors ----


NASTY = "a\x1b[2J\r\x07\x9b\u202eb\udcff.png"
SHOWN = r"a\x1b[2J\r\x07\x9b\u202eb\udcff.png"


def test_what_a_terminal_would_obey_is_escaped_and_the_rest_is_not():
    assert printable(NASTY) == printable(SHOWN) == SHOWN
    plain = "Fréchet 日本語 é 'x' \\ \n\tlines"
    assert printable(plain) == plain


@pytest.mark.promise("control characters in file names", "escaped wherever they are shown")
def test_a_message_is_printable_wherever_it_is_shown(capsys):
    error = UserError(f"there is no file {NASTY}")
    assert str(error) == f"there is no file {SHOWN}" and SHOWN in error._render_traceback_()[0]
    assert refuse(error) == 2
    assert refuse(RuntimeError(f"Traceback\ngan.files.errors.UserError: no {NASTY}")) == 2
    assert capsys.readouterr().err == f"error: there is no file {SHOWN}\nerror: no {SHOWN}\n"


def test_so_are_warnings_and_what_commands_print(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    errors.escape_warnings.cache_clear()
    quiet()
    assert SHOWN in warnings.formatwarning(f"no {NASTY}", UserWarning, "file.py", 1)
    assert warnings.formatwarning(f"no {NASTY}", UserWarning, errors.__file__, 1) == f"warning: no {SHOWN}\n"
    say(f"everything goes to {NASTY}")
    assert capsys.readouterr().out == f"everything goes to {SHOWN}\n"
    for typed in ([f"--{NASTY}", "3"], ["--max-steps", NASTY]):
        with pytest.raises(SystemExit):
            options.parse(typed)
    said = capsys.readouterr().err
    assert r"unknown option --a\x1b[2J; see --help" in said and SHOWN in said and "\x1b" not in said


def test_without_a_terminal_a_bar_is_lines(capsys):
    with errors.progress(total=2, desc="reading", delay=0) as bar:
        bar.update()
        bar.refresh()
    assert [line.split("|")[0] for line in capsys.readouterr().err.split("\n")] == [
        "reading:   0%",
        "reading:  50%",
        "reading:  50%",
        "",
    ]


# ---- system ----


def test_several_ranks_are_refused_where_they_cannot_be_connected(monkeypatch):
    monkeypatch.setattr(system, "LINUX", True)
    monkeypatch.setattr(system, "WINDOWS", False)
    check_ranks(8, hosts=2)
    monkeypatch.setattr(system, "LINUX", False)
    check_ranks(8)
    with pytest.raises(UserError, match=r"^2 hosts are connected under Linux only; type --nodes 1 or"):
        check_ranks(8, hosts=2)
    monkeypatch.setattr(system, "WINDOWS", True)
    check_ranks(1)
    with pytest.raises(UserError, match=r"^8 devices are trained by processes that need .*; type --devices 1 or"):
        check_ranks(8)


# ---- loading ----


def test_lightning_does_not_see_a_rank_that_is_no_number(monkeypatch):
    monkeypatch.setenv("RANK", "banana")
    with loading():
        assert "RANK" not in os.environ and not gc.isenabled()
    assert os.environ["RANK"] == "banana" and gc.isenabled()


@pytest.mark.parametrize(("variables", "rank"), [({}, 0), ({"RANK": "banana", "SLURM_PROCID": "3"}, 3)])
def test_before_lightning_is_there_the_environment_says_the_rank(variables, rank, monkeypatch):
    for name in LIGHTNINGS_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    known = sys.modules["gan.files.errors"].rank_zero_only
    monkeypatch.delattr(known, "rank", raising=False)
    assert this_rank() == rank
    known.rank = 5
    assert this_rank() == 5
