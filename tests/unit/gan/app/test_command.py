"""How every command ends."""

import errno

import pytest

from gan import evaluate, export, sample
from gan.app import command as command_module
from gan.app.painting import reopen
from gan.files.errors import UserError
from tests.support.posix import not_on_windows

COMMANDS = [evaluate, export, sample]


def ends(command, error, monkeypatch) -> int:
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(reopen, "open_run", fails)
    typed = ["--devices", "1", "--accelerator", "cpu"] if command is evaluate else []
    try:
        return command.main(typed)
    except KeyboardInterrupt:
        return pytest.fail("a traceback")


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_is_no_traceback(command, monkeypatch, capsys):
    assert ends(command, KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_too_few_file_handles_are_named_with_what_to_type(command, monkeypatch, capsys):
    assert ends(command, OSError(errno.EMFILE, "Too many open files"), monkeypatch) == 2
    assert "error: too many open files: this shell allows a process" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_one_line_and_another_error_is_raised(command, monkeypatch, capsys):
    assert ends(command, UserError("this is wrong"), monkeypatch) == 2
    assert capsys.readouterr().err == "error: this is wrong\n"
    with pytest.raises(KeyError):
        ends(command, KeyError("image"), monkeypatch)


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as found:
        return found


@not_on_windows
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
    assert isinstance(command_module._named(error), UserError)
    with pytest.raises(UserError, match=words):
        raise command_module._named(error)


def test_other_errors_stay_what_they_are():
    for error in (
        None,
        ValueError("x"),
        OSError(errno.ENOENT, "x"),
        raised(UserError("y"), OSError(errno.EMFILE, "z")),
    ):
        assert command_module._named(error) is None
