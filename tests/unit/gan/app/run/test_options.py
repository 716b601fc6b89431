"""Options: hyphens, settings of the run, and what overrides what."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml
from torch.distributed.run import get_args_parser

from gan.app.run import folder, options
from gan.app.training.callbacks import WriteSettings
from gan.app.verifying import options as verifying
from gan.files.errors import UserError
from gan.runs import RUNS, full_name
from tests.support.posix import not_on_windows


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(here, *arguments):
    """A run with those settings and a checkpoint."""
    settings, _ = options.parse(list(arguments))
    run = folder.create(here / "runs", settings.run)
    run.settings.write_text(options.dump(settings, settings.run))
    run.checkpoints.mkdir()
    (run.checkpoints / "step-000001.ckpt").mkdir()
    return run


@pytest.mark.parametrize("argument", ["--batch-size=6", "--batch_size=6"])
def test_hyphens_and_underscores_are_the_same(argument):
    assert options.parse([argument])[0].batch_size == 6


def test_a_value_may_hold_what_looks_like_an_option():
    assert options.parse(["--out", "a-b_c"])[0].out == "a-b_c"


def test_the_settings_are_those_of_the_run():
    settings, resumed = options.parse(["--run", "r3gan-faces", "--latent", "7"])
    assert resumed is None
    own = options.run_settings(settings)
    assert own["latent"] == 7
    assert not own.keys() & {"run", "strategy", "devices", "out"}


def test_what_a_run_hands_on_to_another_function_is_a_setting_of_it_too(here):
    typed = ["--run", "sean-facades", "--size", "512", "--style", "null", "--generator-rate", "3e-4", "--epochs", "7"]
    own = options.run_settings(options.parse(typed)[0])
    wanted = {"size": 512, "style": None, "generator_rate": 3e-4, "epochs": 7, "max_steps": None, "upsamplings": None}
    assert {name: own[name] for name in wanted} == wanted
    assert not own.keys() & {"run", "strategy", "shape", "open_splits", "layout", "settings"}
    run = saved(here, *typed)
    assert options.run_settings(options.parse(["--config", str(run.settings)])[0]) == own


@pytest.mark.parametrize(("run", "typed"), [("spade", "--style"), ("wgan-gp-faces", "--ada")])
def test_what_a_run_decides_itself_is_no_setting(run, typed, capsys):
    with pytest.raises(SystemExit):
        options.parse(["--run", run, typed, "3"])
    assert typed.strip("-") in capsys.readouterr().err


def test_what_is_typed_overrides_what_was_saved(here):
    run = saved(here, "--run", "r3gan-faces", "--latent", "7", "--max-steps", "11", "--strategy", "single")
    settings, resumed = options.parse(["--resume", str(run.path), "--max-steps", "22"])
    assert (settings.run, settings.latent, settings.max_steps, settings.strategy) == ("r3gan-faces", 7, 22, "single")
    assert resumed == (run, run.checkpoints / "step-000001.ckpt")
    settings, _ = options.parse(["--config", str(run.settings), "--latent=8"])
    assert (settings.run, settings.latent, settings.max_steps) == ("r3gan-faces", 8, 11)


def test_auto_looks_for_the_run_that_was_named(here):
    saved(here, "--run", "r3gan-faces")
    newest = saved(here, "--run", "pix2pix-faces")
    assert options.parse(["--resume", "auto"])[1][0] == folder.RunFolder(newest.path.relative_to(here))
    assert options.parse(["--resume", "auto", "--run", "r3gan-faces"])[0].run == "r3gan-faces"
    assert options.parse(["--resume", "auto", "--run", "sean-faces"])[1] is None


@not_on_windows
def test_a_reader_of_settings_that_are_written_again_reads_them_whole(here):
    """The other ranks of a resumed run read them."""
    run = saved(here, "--run", "r3gan-faces", "--latent", "7")
    settings, before = options.parse(["--resume", str(run.path), "--max-steps", "99"])[0], run.settings.read_text()
    with run.settings.open() as reading:
        texts = {run.settings: options.dump(settings, settings.run)}
        WriteSettings(texts).on_train_start(SimpleNamespace(is_global_zero=True), None)
        assert run.settings.read_text() == texts[run.settings]
        assert before and reading.read() == before
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "samples", "settings.yaml"]


def test_saved_settings_are_plain_yaml_without_what_belongs_to_one_call(here):
    run = saved(here, "--run", "r3gan-faces", "--sample-every", "5", "--debug")
    settings = yaml.safe_load(run.settings.read_text())
    assert settings["sample_every"] == 5
    assert settings["run"] == "r3gan-faces"
    assert not settings.keys() & set(options.PASSING)


def test_settings_that_cannot_be_read_are_refused(here):
    (here / "list.yaml").write_text("- 1\n")
    for name in ("list.yaml", "absent.yaml"):
        with pytest.raises(UserError, match=f"cannot read settings from '{name}'"):
            options.parse(["--config", name])


@pytest.mark.parametrize("parse", [lambda argv: options.parse(argv)[0], verifying.parse])
def test_the_run_may_be_the_first_word(parse):
    assert parse(["r3gan-faces", "--latent", "7"]) == parse(["--run", "r3gan-faces", "--latent", "7"])
    with pytest.raises(UserError, match="the run is named twice, by 'r3gan-faces' and by --run; leave --run out"):
        parse(["r3gan-faces", "--run=pix2pix-faces"])
    with pytest.raises(UserError, match=r"unknown run ''|--run is empty"):
        parse(["", "--latent", "7"])


def test_the_first_word_is_the_run_of_what_is_resumed_too(here):
    saved(here, "r3gan-faces")
    saved(here, "pix2pix-faces")
    assert options.parse(["r3gan-faces", "--resume", "auto"])[0].run == "r3gan-faces"


@pytest.mark.parametrize("typed", ["--local-rank=1", "--local_rank=1"])
def test_the_local_rank_of_torchs_old_launcher_is_no_option_of_ours(typed):
    assert options.parse([typed, "r3gan-faces", "--latent=7"]) == options.parse(["r3gan-faces", "--latent=7"])
    with pytest.raises(SystemExit):
        options.parse(["r3gan-faces", typed])


def test_torchrun_takes_nothing_for_its_own_that_follows_a_run():
    """It refuses the beginning of several of its options, wherever that stands. Two of ours need `--` before them."""
    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    ours = {
        option
        for run in RUNS
        for action in options._parser(full_name(run))._actions
        for option in action.option_strings
    }
    ours |= {option.replace("_", "-") for option in ours}
    assert {each for each in ours if each not in theirs and any(option.startswith(each) for option in theirs)} == {
        "--run",
        "--start",  # of vqgan-faces
    }


def test_chosen_gpus_are_saved_as_they_were_typed(here):
    run = saved(here, "r3gan-faces", "--devices", "0,2")
    assert options.load(run.settings).devices == options.parse(["--devices", "0,2"])[0].devices == "0,2"


@pytest.mark.parametrize("typed", [["--out", "x" * 300], [], ["--out", "runs/" + "y/" * 3000]])
def test_a_folder_that_cannot_be_searched_is_refused(typed, monkeypatch):
    if not typed:
        monkeypatch.setattr(Path, "iterdir", mock.Mock(side_effect=PermissionError(13, "Permission denied", "runs")))
        monkeypatch.setattr(Path, "is_dir", lambda _: True)
    with pytest.raises(UserError, match=r"^cannot look for a run to resume: (File name too long|Permission denied): "):
        options.parse(["--resume", "auto", *typed])
