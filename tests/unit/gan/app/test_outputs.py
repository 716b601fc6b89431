"""What nobody reads is left out, and nothing fails."""

import errno
import multiprocessing
import os
import sys

from gan.app.outputs import Output, outputs
from tests.support.posix import not_on_windows


class Broken:
    encoding, closed = "utf-8", False

    def write(self, *_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    flush = write


def test_output_that_nobody_reads_is_left_out_and_said_on_the_other_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Broken())
    with outputs():
        for _ in range(2):
            print("hello")
        assert sys.stdout.encoding == "utf-8"
    assert type(sys.stdout) is Broken
    assert (
        capsys.readouterr().err == "\nwarning: standard output cannot be written (Broken pipe); the command goes on\n"
    )


def test_where_nobody_reads_either_nothing_fails(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Broken())
    with outputs():
        print("hello", flush=True)
        print("hello", file=sys.stderr, flush=True)


def test_text_that_cannot_be_encoded_is_shown_as_an_escape_and_a_stream_that_was_closed_is_left_out(tmp_path):
    with (tmp_path / "x").open("w", encoding="ascii") as file:
        Output("standard output", file).write("ä")
    assert (tmp_path / "x").read_text() == "\\xe4"
    Output("standard output", file).write("closed")


def closed(path):
    """As a process begins whose standard files are closed."""
    for number in (0, 1, 2):
        os.close(number)
    sys.stdout = sys.stderr = None
    with outputs(), path.open("w"):
        for number in (1, 2):
            os.write(number, b"said")
        print("said", flush=True)
        print("said", file=sys.stderr, flush=True)
        assert not sys.stderr.isatty()
    os._exit(0)


@not_on_windows
def test_what_is_printed_gets_into_no_file_where_output_was_closed(tmp_path):
    """The system gives the number of standard output to the next file that is opened."""
    process = multiprocessing.get_context("fork").Process(target=closed, args=(tmp_path / "file",))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "file").read_text() == ""
