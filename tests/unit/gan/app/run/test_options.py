"""What is typed for a run, and in its file of settings."""

import re
from pathlib import Path
from unittest import mock

import pytest
import yaml
from torch.distributed.run import get_args_parser

from gan import evaluate as evaluate
from gan import export as export
from gan import fit as fit
from gan import sample as sample
from gan import verify as verify
from gan.app.run import folder, options, settings_file
from gan.app.run.parser import OF_OTHER_TRAINERS
from gan.app.run.settings_file import MOST, read
from gan.files.errors import UserError
from gan.runs import RUNS, full_name, short_name
from gan.runs.run import Unchosen

pytestmark = pytest.mark.usefixtures("here")


def saved(here, *arguments):
    """A run with those settings and a checkpoint."""
    settings, _ = options.parse(list(arguments))
    run = folder.create(here / "runs", short_name(settings.run))
    run.settings.write_text(settings_file.dump(settings, settings.run))
    run.checkpoint(1).mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (["--batch_size=6"], ["--batch-size", "6"]),
        (["r3gan-faces", "--latent", "7"], ["--run", "r3gan-faces", "--latent", "7"]),
        (["--local-rank=1", "r3gan-faces"], ["r3gan-faces"]),  # torch's old launcher puts it first
    ],
)
def test_hyphens_and_underscores_are_the_same_and_the_run_may_be_the_first_word(typed, same):
    assert options.parse(typed) == options.parse(same)
    assert options.parse(["--out", "a-b_c"])[0].out == "a-b_c"  # a value may hold what looks like an option
    assert evaluate.parse(["--ignore-labels", ""]).ignore_labels == ()  # as it is by default


@pytest.mark.parametrize("typed", [["cyclegan", "--side-by-side", "true"], ["--run", "cyclegan", "--pixels", "2"]])
def test_an_unknown_option_is_answered_with_the_help_of_its_run(typed, capsys):
    with pytest.raises(SystemExit):
        options.parse(typed)
    tip, error = capsys.readouterr().err.splitlines()[-2:]
    assert tip.endswith("run: python -m gan.fit cyclegan --help") and error.startswith("error: unknown option --")


def test_a_yes_or_no_may_stand_alone():
    typed = ["sean-faces", "--check", "--save-in-background", "false", "--fake-once", "--max-steps", "3", "--check"]
    settings, _ = options.parse(typed)
    assert settings.check and settings.fake_once and not settings.save_in_background


def test_a_batch_that_nobody_typed_is_known_as_such(here):
    (here / "own.yaml").write_text("seed: 1\nrun: pix2pix\n")
    (here / "with.yaml").write_text("batch_size: 1\nrun: pix2pix\n")
    for kind, commands in (
        (Unchosen, ("pix2pix", "--config own.yaml", "--config own.yaml --seed 2")),
        (int, ("pix2pix --batch-size 1", "--config with.yaml", "--config own.yaml --batch-size=1")),
    ):
        for typed in commands:
            assert type(options.run_settings(options.parse(typed.split())[0])["batch_size"]) is kind, typed
    assert yaml.safe_load(settings_file.dump(options.parse(["pix2pix"])[0], "pix2pix"))["batch_size"] == 1


def test_what_a_run_hands_on_to_another_function_is_a_setting_of_it_too(here):
    typed = ["--run", "sean-facades", "--size", "512", "--style", "null", "--generator-rate", "3e-4", "--epochs", "7"]
    own = options.run_settings(options.parse(typed)[0])
    wanted = {"size": 512, "style": None, "generator_rate": 3e-4, "epochs": 7, "max_steps": None, "upsamplings": None}
    assert {name: own[name] for name in wanted} == wanted
    assert not own.keys() & {"run", "strategy", "shape", "open_splits", "layout", "settings"}
    run = saved(here, *typed)
    assert options.run_settings(options.parse(["--config", str(run.settings)])[0]) == own


def test_a_length_that_is_typed_in_another_unit_counts(here):
    run = saved(here, "biggan", "--kimg", "1", "--max-steps", "11")
    for typed, length in (("--kimg 3", None), ("--kimg 3 --max-steps 7", 7), ("--width 4", 11)):
        for file in (f"--resume {run.path}", f"--config {run.settings}"):
            assert options.parse(f"{file} {typed}".split())[0].max_steps == length


def test_auto_looks_for_the_run_that_was_named(here):
    saved(here, "--run", "r3gan-faces", "--devices", "0,2")
    newest = saved(here, "--run", "pix2pix-faces")
    folder.create(here / "runs", "r3gan-faces")  # which has no checkpoint yet
    assert options.parse(["--resume", "auto"])[1][0] == folder.RunFolder(newest.path.relative_to(here))
    for typed in (["--resume", "auto", "--run", "r3gan-faces"], ["r3gan-faces", "--resume", "auto"]):
        found = options.parse(typed)[0]
        assert (found.run, found.devices) == ("r3gan-faces", "0,2")
    assert options.parse(["--resume", "auto", "--run", "sean-faces"])[1] is None


def test_auto_begins_a_run_only_if_one_is_typed(here):
    """In a wrong folder, or with a mistyped --out, nobody means the built-in run."""
    with pytest.raises(UserError, match="no run with a checkpoint in 'nosuch'; type --resume and a run"):
        options.parse(["--resume", "auto", "--out", "nosuch"])
    run = saved(here, "--run", "pix2pix-faces")
    for typed in (["pix2pix-faces"], ["--config", str(run.settings)]):
        settings, resumed = options.parse([*typed, "--resume", "auto", "--out", "nosuch"])
        assert (settings.run, resumed) == ("pix2pix-faces", None)


def test_torchrun_takes_nothing_for_its_own_that_follows_a_run():
    """It refuses the beginning of several of its options, wherever that stands. Two of ours need `--` before them."""
    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    parsers = [options._parser(full_name(run)) for run in RUNS]
    ours = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    ours |= {option.replace("_", "-") for option in ours}
    begun = {each for each in ours - theirs if any(option.startswith(each) for option in theirs)}
    assert begun == {"--run", "--start"}  # the latter of vqgan-faces


@pytest.mark.parametrize("typed", [["--out", "x" * 300], [], ["--out", "runs/" + "y/" * 3000]])
def test_a_folder_that_cannot_be_searched_is_refused(typed, monkeypatch):
    if not typed:
        monkeypatch.setattr(Path, "iterdir", mock.Mock(side_effect=PermissionError(13, "Permission denied", "runs")))
        monkeypatch.setattr(Path, "is_dir", lambda _: True)
    with pytest.raises(UserError, match=r"^cannot look for a run to resume: (File name too long|Permission denied): "):
        options.parse(["--resume", "auto", *typed])


# ---- parser ----


def test_help_fits_into_the_terminal(monkeypatch):
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = options._parser(full_name("stylegan2")).format_help().partition("\nexamples:")[0]
        about = [len(line) for line in text.splitlines() if line.startswith(" " * 30)]
        assert columns - 10 < max(about) <= columns


def test_help_lists_options_once_as_they_are_typed_and_all_that_stand_for_those_of_other_trainers(here):
    helps = [options._parser(full_name(run)).format_help() for run in RUNS]
    for text in helps:
        assert not re.search(r"--[\w-]+-(?![\w-])", text) and "--from_" not in text
        assert len(re.findall(r"^  --config ", text, re.MULTILINE)) == 1
    assert "Or a YAML file of settings" in " ".join(options._parser(full_name("stylegan2")).format_help().split())
    helps = " ".join(helps) + sample._parser(None).format_help()
    assert [ours for ours in OF_OTHER_TRAINERS if not re.search(rf"{ours}\b", helps)] == []
    with pytest.raises(UserError, match=r"^--config is empty; type a value, or leave --config out$"):
        options.parse(["stylegan2", "--config="])


def test_a_published_configuration_is_no_file_of_settings(here):
    (here / "config.json").write_text('{"resblock": "2"}')
    (here / "cifar").mkdir()  # of pictures
    for typed in ("hifigan --config config.json", "hifigan --config=config.json", "stylegan2 --config cifar"):
        assert options.parse(typed.split())[0].config_ == typed.split()[-1].removeprefix("--config=")


# ---- settings file ----


SECRET = "hunter2"
LAUGHS = "a: &a [x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


FAULTS = {
    "aliases": (LAUGHS, "in line 2, an alias (*) is not read; write the value itself"),
    "mappings in mappings": ("a: " + "{b: " * 20_000, "nested more than 20 deep"),
    "digits": ("seed: " + "9" * 90_000, "in line 1, a value has more than 1,024 characters"),
    "a tab": ("seed: 1\n\tsize: 32", r"in line 2, found character '\t' that cannot start any token"),
    "no text": (b"\x7fELF\x00\x01", "it has characters that no text has"),
    "not UTF-8": (b"out: r\xe4n", "it is no text in UTF-8"),
    "passwords": (f"root:${SECRET}:20228:0:99999:7::\nbin:*:20228:0:99999:7::\n", "it does not consist of lines"),
    "a list as a key": (f"? [{SECRET}]\n: 1\n", "in line 1, it is no YAML of plain values"),
    "a date that is none": ("out: 2026-13-45\n", "it has a value that cannot be read"),
    "a tag of Python": (f"a: !!python/object/apply:os.system [touch {SECRET}]\n", "a tag (!) is not read"),
    "too much": ("a: 1\n" + "#" * MOST, "it is larger than 100,000 bytes"),
    "no run": ("run: null", "its run is no text; see --list-runs, or FILE.py:FUNCTION"),
    "an empty run": ("run: ''", "its run is no text"),
}


@pytest.mark.promise(
    "a file of settings that is none, has no end, or names another file", "one line; nothing of another file is shown"
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_has_no_settings_is_refused_in_one_line(fault, here):
    content, message = FAULTS[fault]
    (here / "mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"^cannot read settings from 'mine.yaml': .*{re.escape(message)}") as error:
        options.parse(["--config", "mine.yaml"])
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    assert SECRET not in str(error.value) and not (here / SECRET).exists()


@pytest.mark.promise("a file of settings that is none, has no end, or names another file")
def test_a_file_of_settings_names_no_other(here):
    (here / "other.txt").write_text(SECRET)
    (here / "mine.yaml").write_text("config: other.txt\n")
    words = r"'mine.yaml' names another file of settings \(config\); type --config for each"
    with pytest.raises(UserError, match=words):
        options.parse(["--config", "mine.yaml"])


# jsonargparse reads text as YAML where a setting is no text; aliases in it are not unfolded.
FLOW = f"[&a [x, x], {', '.join(line[3:] for line in LAUGHS.splitlines()[1:])}]"


@pytest.mark.promise("a file of settings that is none, has no end, or names another file")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: null", "seed is null; it needs a value"),
        ("debug: 3", "debug is 3; it must be true or false"),
        ("out: 2026-01-01", "says out: '2026-01-01'; write text"),
        ("strategy: [ddp]", """says strategy: "['ddp']"; write text"""),
        ("max_steps: {a: 1}", """says max_steps: "{'a': 1}"; write a whole number above 0"""),
        (f"devices: '{'[' * 500}'", f"says devices: '{'[' * 100}'; write a whole number above 0, auto or numbers of"),
        (f'devices: "{FLOW}"', "says devices: "),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_settings_of_the_wrong_kind_are_refused_in_one_line(line, message, again, here):
    """Also those of a run that is resumed, whose settings.yaml a person has edited."""
    run = here / "runs/001-r3gan-faces"
    (run / "checkpoints/step-000001.ckpt").mkdir(parents=True)
    (run / "settings.yaml").write_text(f"run: r3gan-faces\n{line}\n")
    typed = ["--resume", "auto"] if again else ["--config", str(run / "settings.yaml")]
    words = rf"settings.yaml' (and run r3gan-faces do not fit .*)?{re.escape(message)}"
    with pytest.raises(UserError, match=words) as error:
        options.parse(typed)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_an_error_in_a_file_does_not_name_what_was_typed_before(here):
    parser = options._parser("sean-faces")
    parser.parse_args(["--size", "32"])
    (here / "mine.yaml").write_text("size: -32\n")
    with pytest.raises(UserError, match=r"'mine\.yaml' says size: '-32'; write a whole number above 0"):
        options._settings_in(Path("mine.yaml"), parser, "sean-faces")


def test_several_files_count_in_their_order_and_what_is_typed_counts_last(here):
    (here / "one.yaml").write_text("run: r3gan-faces\nlatent: 1\nseed: 1\nmax_steps: 1\n")
    (here / "two.yaml").write_text("latent: 2\nseed: 2\n")
    settings, _ = options.parse(["--latent", "3", "--config", "one.yaml", "--config=two.yaml"])
    assert (settings.run, settings.latent, settings.seed, settings.max_steps) == ("r3gan-faces", 3, 2, 1)


@pytest.mark.parametrize(
    ("out", "rate", "seed"),
    [
        (" \\ # 'a': \"b\"", 1e-300, 0),
        ("null", 1e300, 2**31),
        ("\x00\x1b\x85\u2028\ufeff", 0.1 + 0.2, 7),
        ("1e-4\n- [日本 \U0001f600]\t", 5e-5, 1),
    ],
)
def test_settings_are_read_as_they_were_written(out, rate, seed, here):
    settings = options.parse(["r3gan-faces"])[0]
    settings.out, settings.rate, settings.seed = out, rate, seed
    (here / "mine.yaml").write_text(settings_file.dump(settings, "r3gan-faces"), "utf-8")
    found = options.load(here / "mine.yaml")
    assert (found.out, found.rate, found.seed) == (out, rate, seed)


def test_what_two_settings_share_is_written_twice(here):
    settings = options.parse(["r3gan-faces"])[0]
    settings.one = settings.two = [1, 2]
    (here / "mine.yaml").write_text(settings_file.dump(settings, "r3gan-faces"))
    assert read(here / "mine.yaml")["two"] == [1, 2]
