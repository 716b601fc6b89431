"""Messages: once, in one form, and without what a terminal would obey."""

import warnings

import pytest

from gan.app.outputs import quiet, say
from gan.app.run import options
from gan.files import errors
from gan.files.errors import UserError, printable, refuse

NASTY = "a\x1b[2J\r\x07\x9b\u202eb\udcff.png"
SHOWN = r"a\x1b[2J\r\x07\x9b\u202eb\udcff.png"


def test_what_a_terminal_would_obey_is_escaped_and_the_rest_is_not():
    assert printable(NASTY) == printable(SHOWN) == SHOWN
    plain = "Fréchet 日本語 é 'x' \\ \n\tlines"
    assert printable(plain) == plain


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
    say(f"everything goes to {NASTY}")
    assert capsys.readouterr().out == f"everything goes to {SHOWN}\n"
    with pytest.raises(SystemExit):
        options.parse([f"--{NASTY}", "3"])
    with pytest.raises(SystemExit):
        options.parse(["--max-steps", NASTY])
    said = capsys.readouterr().err
    assert said.count(SHOWN) == 2 and "\x1b" not in said
