"""What is typed for gan.verify."""

import pytest

from gan.app.run.options import run_settings
from gan.app.verifying import options
from gan.files.errors import UserError


def test_the_options_of_the_run_are_options():
    typed = ["--run", "r3gan-faces", "--latent", "7", "--strategy", "ddp", "zero3", "--devices", "2,4", "--steps=3"]
    settings = options.parse(typed)
    assert (settings.run, settings.strategy, settings.devices, settings.steps) == (
        "r3gan-faces",
        ["ddp", "zero3"],
        [2, 4],
        3,
    )
    assert run_settings(settings)["latent"] == 7
    assert options.parse([]).strategy == ["ddp", "zero1", "zero2", "zero3"]


def test_help_says_how_strategies_are_typed(capsys):
    with pytest.raises(SystemExit):
        options.parse(["--run", "r3gan-faces", "--help"])
    said = capsys.readouterr().out
    assert "Pairs player=policy in one word are one strategy." in said and "Length of the noise vector." in said


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--devices", "2;4"], "cannot read --devices '2;4'; type numbers with commas, such as --devices 2,4"),
        (["--devices", "0"], "cannot read --devices '0'"),
        (["--strategy", "ddp,,zero3"], "cannot read strategy 'ddp,,zero3'"),
        (["--run", "nothing"], "unknown run 'nothing'"),
    ],
)
def test_what_cannot_be_read_is_refused(typed, words):
    with pytest.raises(UserError, match=words):
        options.parse(typed)
