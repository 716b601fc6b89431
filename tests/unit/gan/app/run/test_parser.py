"""Options are typed in full, and are not empty, in every command."""

import pytest

from gan import evaluate as evaluate
from gan import export as export
from gan import fit as fit
from gan import sample as sample
from gan import verify as verify
from gan.app.run import folder, options
from gan.bench import command as bench
from gan.files.errors import UserError
from tests.support.posix import only_on_linux

COMMANDS = {"fit": fit, "sample": sample, "evaluate": evaluate, "export": export, "bench": bench, "verify": verify}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "arguments", "meant"),
    [
        ("fit", ["--resum", "auto"], "unknown option --resum; did you mean --resume?"),
        ("fit", ["--res=auto"], "unknown option --res; did you mean --restarts or --resume?"),
        ("fit", ["--max-step", "3"], "unknown option --max-step; did you mean --max-steps?"),
        ("fit", ["--max_step=3"], "unknown option --max-step; did you mean --max-steps?"),
        ("fit", ["--lats", "3"], "--lats"),
        (
            "fit",
            ["--devices", "1", "byol-faces"],
            "'byol-faces' belongs to no option; a run is named by the first word",
        ),
        ("verify", ["--steps", "1", "pix2pix-faces"], "'pix2pix-faces' belongs to no option; a run is named by the"),
        ("evaluate", ["auto", "pix2pix-faces"], "unrecognized arguments: pix2pix-faces"),
        ("fit", ["--resmue", "auto"], "unknown option --resmue; did you mean --resume?"),
        ("sample", ["--sing"], "unknown option --sing; did you mean --singles?"),
        ("sample", ["auto", "transfer", "--mean", "3"], "unknown option --mean; did you mean --mean-of?"),
        ("evaluate", ["--seg", "net.pth"], "unknown option --seg; did you mean --segmenter?"),
        ("evaluate", ["--ignore-label", "3"], "unknown option --ignore-label; did you mean --ignore-labels?"),
        ("export", ["--publish"], "unknown option --publish; did you mean --published?"),
        pytest.param(
            "bench", ["peers", "--rank", "2"], "unknown option --rank; did you mean --ranks?", marks=only_on_linux
        ),
        pytest.param(
            "bench",
            ["loading", "--picture", "2"],
            "unknown option --picture; did you mean --pictures?",
            marks=only_on_linux,
        ),
        pytest.param(
            "bench", ["sean", "--mask", "faces"], "unknown option --mask; did you mean --masks?", marks=only_on_linux
        ),
    ],
)
def test_an_abbreviation_is_refused_with_what_may_have_been_meant(command, arguments, meant, here, capsys):
    with pytest.raises(SystemExit) as ended:
        COMMANDS[command].main(arguments)
    assert ended.value.code == 2
    assert meant in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("fit", ["--resume", ""], "--resume is empty; type a value, or leave --resume out (continue: auto (the newest"),
        ("fit", ["--resume="], "--resume is empty; type a value"),
        ("fit", ["--resume", "", "--devices", "1"], "--resume is empty; type a value"),
        (
            "fit",
            ["--config", ""],
            "--config is empty; type a value, or leave --config out (take settings from",
        ),
        (
            "fit",
            ["--out="],
            "--out is empty; type a value, or leave --out out (folder in which the run's folder is",
        ),
        ("fit", ["--run", ""], "--run is empty; type a value, or leave --run out (what to train: see --list-runs"),
        ("fit", ["--run", "sean-folder", "--data", ""], "--data is empty; type a value, or leave --data out ("),
        (
            "sample",
            [""],
            "RUN is empty; type a value, or leave RUN out (a run's folder, a checkpoint",
        ),
        ("sample", ["--data", ""], "--data is empty"),
        ("sample", ["-o", ""], "-o is empty; type a value, or leave -o out (where to write;"),
        ("evaluate", [""], "RUN is empty"),
        (
            "evaluate",
            ["auto", "--inception", ""],
            "--inception is empty; type a value, or leave --inception out (weights",
        ),
        ("export", ["auto", "--to", ""], "--to is empty; type a value, or leave --to out (a folder to write to;"),
        pytest.param("bench", ["peers", "--only", ""], "--only is empty; type a value", marks=only_on_linux),
    ],
)
def test_an_empty_path_is_refused_with_what_to_type(command, arguments, message, here, capsys):
    assert COMMANDS[command].main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said
    assert not list(here.iterdir())


def test_what_is_empty_by_default_may_be_typed_so():
    assert evaluate.parse(["--ignore-labels", ""]).ignore_labels == ()


def test_what_to_resume_is_not_taken_from_a_file(here):
    (here / "mine.yaml").write_text("run: r3gan-faces\nresume: auto\n")
    with pytest.raises(UserError, match=r"'mine.yaml' says resume: auto, and what to resume is typed: --resume auto"):
        options.parse(["--config", "mine.yaml"])


def test_a_run_whose_path_has_blanks_or_an_equals_sign_is_no_empty_one(here):
    run = folder.create(here / "a =", "r3gan-faces")
    settings, _ = options.parse(["--run", "r3gan-faces"])
    run.settings.write_text(options.dump(settings, settings.run))
    run.checkpoint(1).mkdir(parents=True)
    for argument in (["--resume", str(run.path)], [f"--resume={run.path}"]):
        assert options.parse(argument)[1] == (run, run.checkpoint(1))
