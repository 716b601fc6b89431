"""A file of settings may be any file: one line says what is wrong, soon, and shows nothing of another file."""

import os
import re
import socket

import pytest

from gan.app.run import options
from gan.app.run.settings_file import MOST, read
from gan.files.errors import UserError
from tests.support.posix import not_on_windows

SECRET = "hunter2"
LAUGHS = "a: &a [x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


FAULTS = {
    "aliases": (LAUGHS, "in line 2, an alias (*) is not read; write the value itself"),
    "an endless list": ("a: &a [*a]\n", "an alias (*) is not read"),
    "lists in lists": ("a: " + "[" * 50_000, "nested more than 20 deep"),
    "mappings in mappings": ("a: " + "{b: " * 20_000, "nested more than 20 deep"),
    "lines in lines": ("a:\n  " + "- " * 40_000, "nested more than 20 deep"),
    "digits": ("seed: " + "9" * 90_000, "in line 1, a number is too large"),
    "hexadecimal digits": ("seed: 0x" + "f" * 90_000, "a number is too large"),
    "digits of base 60": ("seed: 1" + ":1" * 40_000, "a number is too large"),
    "a large number": ("seed: 9223372036854775808", "a number is too large"),
    "a tab": ("seed: 1\n\tsize: 32", r"in line 2, found character '\t' that cannot start any token"),
    "no text": (b"\x7fELF\x00\x01", "it has characters that no text has"),
    "not UTF-8": (b"out: r\xe4n", "it is no text in UTF-8"),
    "a key twice": ("seed: 1\nsize: 32\nseed: 2\n", "in line 3, a name is there twice"),
    "a list": (f"- {SECRET}\n", "it does not consist of lines such as batch_size: 16"),
    "a text": (f"{SECRET}\n", "it does not consist of lines such as"),
    "nothing": ("", "it does not consist of lines such as"),
    "passwords": (f"root:${SECRET}:20228:0:99999:7::\nbin:*:20228:0:99999:7::\n", "it does not consist of lines"),
    "a list as a key": (f"? [{SECRET}]\n: 1\n", "it has a value that cannot be read"),
    "a tag of Python": (f"a: !!python/object/apply:os.system [touch {SECRET}]\n", "in line 1, it is no YAML of plain"),
    "a tag": (f"a: !{SECRET} 1\n", "it is no YAML of plain values"),
    "an open bracket": (f"a: [1, {SECRET}\n", "it is no YAML of plain values"),
    "two documents": ("a: 1\n---\nb: 2\n", "it is no YAML of plain values"),
    "too much": ("a: 1\n" + "#" * MOST, "it is larger than 100,000 bytes"),
    "a list of runs": ("run: [a]", "its run is no text; see --list-runs, or FILE.py:FUNCTION"),
    "no run": ("run: null", "its run is no text"),
    "a number as run": ("run: 3", "its run is no text"),
    "an empty run": ("run: ''", "its run is no text"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_has_no_settings_is_refused_in_one_line(fault, here):
    content, message = FAULTS[fault]
    (here / "mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"^cannot read settings from 'mine.yaml': .*{re.escape(message)}") as error:
        options.parse(["--config", "mine.yaml"])
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    assert SECRET not in str(error.value) and not (here / SECRET).exists()


@not_on_windows
def test_what_is_no_file_is_refused_and_not_waited_for(here):
    os.mkfifo(here / "pipe.yaml")
    (here / "folder.yaml").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.yaml")
    named = {"pipe.yaml": "a named pipe", "folder.yaml": "a folder", "socket.yaml": "a socket"}
    for name, kind in {**named, "/dev/zero": "a device", "/dev/random": "a device"}.items():
        with pytest.raises(UserError, match=f"cannot read settings from '{name}': it is {kind}, and no file"):
            options.parse(["--config", name])


def test_a_file_of_settings_names_no_other(here):
    (here / "other.txt").write_text(SECRET)
    (here / "mine.yaml").write_text("config: other.txt\n")
    with pytest.raises(
        UserError, match=r"'mine.yaml' names another file of settings \(config\); type --config for each"
    ):
        options.parse(["--config", "mine.yaml"])


def test_a_date_is_text_and_so_is_what_is_no_value_in_the_command_line(here):
    (here / "mine.yaml").write_text("out: 2026-01-01\nrate: 1e-4\n")
    assert read(here / "mine.yaml") == {"out": "2026-01-01", "rate": "1e-4"}
    settings, _ = options.parse(["r3gan-faces", "--config", "mine.yaml", "--strategy", "*=ddp"])
    assert (settings.out, settings.rate, settings.strategy) == ("2026-01-01", 1e-4, "*=ddp")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("out: null", "out is null; it needs a value"),
        ("seed: null", "seed is null; it needs a value"),
        ("debug: 3", "debug is 3; it must be true or false"),
        ("strategy: [ddp]", "Expected a <class 'str'>. Got value: ['ddp']"),
        ("max_steps: {a: 1}", "not 'dict'"),
        ("nodes: [1]", "Given value: [1]"),
        ("colour: red", "Option 'colour' is not accepted"),
        (f"devices: '{'[' * 500}'", 'Parser key "devices"'),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_settings_of_the_wrong_kind_are_refused_in_one_line(line, message, again, here):
    """Also those of a run that is resumed, whose settings.yaml a person has edited."""
    run = here / "runs/001-r3gan-faces"
    (run / "checkpoints/step-000001.ckpt").mkdir(parents=True)
    (run / "settings.yaml").write_text(f"run: r3gan-faces\n{line}\n")
    typed = ["--resume", "auto"] if again else ["--config", str(run / "settings.yaml")]
    with pytest.raises(
        UserError, match=rf"settings.yaml' and run r3gan-faces do not fit .*{re.escape(message)}"
    ) as error:
        options.parse(typed)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_aliases_in_a_value_are_not_unfolded(here):
    """jsonargparse reads text as YAML where a setting is no text."""
    flow = "[&a [x, x], " + ", ".join(
        f"&{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    (here / "mine.yaml").write_text(f'devices: "{flow}]"\n')
    with pytest.raises(UserError, match="do not fit together") as error:
        options.parse(["--config", "mine.yaml"])
    assert len(str(error.value)) < 700


def test_several_files_count_in_their_order_and_what_is_typed_counts_last(here):
    (here / "one.yaml").write_text("run: r3gan-faces\nlatent: 1\nseed: 1\nmax_steps: 1\n")
    (here / "two.yaml").write_text("latent: 2\nseed: 2\n")
    settings, _ = options.parse(["--latent", "3", "--config", "one.yaml", "--config=two.yaml"])
    assert (settings.run, settings.latent, settings.seed, settings.max_steps) == ("r3gan-faces", 3, 2, 1)


def test_a_value_that_two_settings_share_is_written_twice(here):
    shared = [1, 2]
    settings = options.parse(["r3gan-faces"])[0]
    settings.one = settings.two = shared
    (here / "mine.yaml").write_text(options.dump(settings, "r3gan-faces"))
    assert read(here / "mine.yaml")["two"] == shared
