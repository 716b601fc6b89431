"""The command, as it is typed: what it leaves, how it stops and resumes, and what it says to mistakes."""

import contextlib
import errno
import operator
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from PIL import Image
from torch.utils._pytree import keystr, tree_flatten_with_path

from datasets import FolderPairs
from gan import fit as fit
from gan.app.fitting import metrics
from gan.app.fitting.pace import Bar
from gan.app.run import folder
from gan.app.run.folder import RunFolder
from gan.files.errors import UserError
from gan.runs import RUNS, build
from strategies.checkpoint import writing
from tests.support import commands, narrow_vgg, opening
from tests.support.parity import often
from tests.support.saved import read_checkpoint
from tests.support.trained_on import ON_GPUS

TINY = {
    "sean-faces": dict(size=32, width=4, hidden=8, style=8),
    "spade-faces": dict(size=32, width=4, hidden=8, fake_once=True),
    "pix2pix-faces": dict(size=32, width=4),
    "cyclegan-faces": dict(size=16, width=4, blocks=1, pool=4),
    "cut-faces": dict(size=16, width=4, patches=20),
    "r3gan-faces": dict(size=16, width=4, latent=4),
    "stylegan-faces": dict(size=16, width=4, latent=4, style=4, mapping=1),
    "vqgan-faces": dict(size=16, width=4, codes=8, start=2),
    "byol-faces": dict(size=16, width=4, hidden=4, projection=4),
}
ROOT = Path(__file__).parents[2]
SMALL = dict(faces=12, held_out=4, batch_size=4)
DETERMINISTIC = ["--debug"] if ON_GPUS else []
pytestmark = pytest.mark.usefixtures("here")


def options(name, **more):
    return opening.typed({"run": name, "devices": 1, "log-every": 1, **SMALL, **TINY[name], **more})


def same(one, other):
    """Assert that two checkpoints hold the same, bit for bit."""
    (left, form), (right, other_form) = tree_flatten_with_path(one), tree_flatten_with_path(other)
    assert form == other_form, "checkpoint"
    for (path, mine), (_, theirs) in zip(left, right, strict=True):
        equal = torch.equal if isinstance(mine, torch.Tensor) else operator.eq
        assert type(mine) is type(theirs) and equal(mine, theirs), f"checkpoint{keystr(path)}"


def final(run):
    checkpoint = read_checkpoint(max(Path(run).glob("checkpoints/*")))
    del checkpoint["callbacks"]["Keep"]  # which steps were saved
    # Lightning's own count of epochs is off by one after a resume at an epoch's end; nothing of ours depends on it.
    del checkpoint["loops"]["fit_loop"]["epoch_progress"], checkpoint["epoch"]
    return checkpoint


def interrupting(step, number):
    """Inside the `with`, this process gets a signal after some step, as from a person or a cluster."""
    original = Bar.on_train_batch_end

    def hook(bar, trainer, *rest):
        original(bar, trainer, *rest)
        if trainer.global_step == step:
            os.kill(os.getpid(), number)

    return mock.patch.object(Bar, "on_train_batch_end", hook)


@pytest.mark.promise("Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, to one process or to all")
@pytest.mark.parametrize(
    ("name", "step", "number"),
    often(
        [(name, 2 + place % 4, (signal.SIGTERM, signal.SIGINT)[place % 2]) for place, name in enumerate(TINY)],
        ["r3gan-faces"],
    ),
)
def test_every_game_resumes_bit_for_bit_after_a_signal(name, step, number, capsys):
    """Three batches an epoch: the steps lie inside an epoch and at its end."""
    arguments = [*options(name, max_steps=7, sample_every=3), *DETERMINISTIC]
    assert fit.main([*arguments, "--out", "unbroken"]) == 0
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupting(step, number):
        assert fit.main(arguments) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    said = capsys.readouterr().out
    (resume,) = re.findall(rf"stopped at step {step}, all saved; go on with\n  python -m gan.fit (--res.* .*)", said)
    assert resume == f"--resume runs/001-{name}"
    assert fit.main([*resume.split(), *DETERMINISTIC]) == 0
    same(final(f"runs/001-{name}"), final(f"unbroken/001-{name}"))
    rows, unbroken = (metrics.read(Path(f"{out}/001-{name}/metrics.csv")) for out in ("runs", "unbroken"))
    for row in (*rows.values(), *unbroken.values()):
        row.pop("seconds", None)
    assert rows == unbroken
    assert "at the start" in capsys.readouterr().out


# ---- what a run leaves ----


def test_a_run_leaves_settings_metrics_curves_pictures_and_checkpoints(here, capsys):
    """The last step is scored and drawn wherever it falls. Curves are drawn in test_callbacks.py of gan/app/fitting."""
    assert fit.main(options("r3gan-faces", max_steps=5, sample_every=3, strategy="single")) == 0
    run = here / "runs" / "001-r3gan-faces"
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    assert settings["run"] == "r3gan-faces"
    assert settings["batch_size"] == 4
    assert "resume" not in settings
    assert "discriminator: teaches discriminator" in (run / "game.txt").read_text()
    rows = metrics.read(run / "metrics.csv")
    assert {"generator/relativistic", "generator/generator_grad_norm"} <= rows[4].keys() - rows[5].keys()  # in turns
    assert "discriminator/r1" in rows[5].keys() - rows[4].keys()
    assert [step for step, row in rows.items() if "val/distance" in row] == [0, 3, 5]
    pictures = sorted(path.name for path in (run / "samples").iterdir())
    assert pictures == ["reals.png", "step-000000.png", "step-000003.png", "step-000005.png"]
    assert (run / "curves.png").stat().st_mtime_ns > (run / "samples" / "step-000005.png").stat().st_mtime_ns
    for path in (run / "samples").iterdir():
        with Image.open(path) as image:
            assert len(image.getcolors(1 << 24)) > 20
    rows_of_page = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/how/checkpoints.md").read_text(), re.MULTILINE)
    table = {key for row in rows_of_page for key in re.findall(r"`(\w[\w-]+)`", row)} - {"hyper_parameters"}
    assert read_checkpoint(run / "checkpoints" / "step-000005.ckpt").keys() == table  # the game has no hyper_parameters
    said = capsys.readouterr().out
    for name, words in build("r3gan-faces").scores.items():
        found = re.search(rf"^{words}: (\S+) at the start, (\S+) now( \(\d+ % of the start\))?$", said, re.MULTILINE)
        first, last, share = found.groups()
        assert [float(first), float(last)] == pytest.approx([rows[0][name], rows[5][name]], abs=1e-4)
        assert (share is not None) == (last < first)
    for path in ("samples/step-000005.png", "curves.png", "metrics.csv", "checkpoints/step-000005.ckpt"):
        assert f"runs/001-r3gan-faces/{path}" in said


def test_saved_settings_make_the_same_run_again_another_seed_another_and_debug_one_alike(here):
    assert fit.main(options("r3gan-faces", max_steps=1)) == 0
    assert fit.main(["--config", "runs/001-r3gan-faces/settings.yaml"]) == 0
    same(final("runs/001-r3gan-faces"), final("runs/002-r3gan-faces"))
    # The control of all that compares checkpoints.
    assert fit.main(options("r3gan-faces", max_steps=1, seed=1)) == 0
    with pytest.raises(AssertionError, match="checkpoint"):
        same(final("runs/001-r3gan-faces"), final("runs/003-r3gan-faces"))
    assert fit.main([*options("r3gan-faces", max_steps=1), "--debug"]) == 0
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    one, other = (final(f"runs/00{number}-r3gan-faces")["state_dict"] for number in (1, 4))
    assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one)


def test_going_on_from_an_earlier_step_leaves_the_later_one_and_names_its_own(here, capsys):
    checkpoints = here / "runs" / "001-r3gan-faces" / "checkpoints"
    assert fit.main([*options("r3gan-faces", max_steps=4, save_every=2), "--resume", "auto"]) == 0
    assert "no run with a checkpoint in 'runs' yet; starting a new one" in capsys.readouterr().out
    (checkpoints / "step-000004.ckpt").rename(checkpoints / "step-000100.ckpt")
    assert fit.main(["--resume", str(checkpoints / "step-000002.ckpt"), "--max-steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "would go on from step 100" in said
    assert re.search(rf"train on +python -m gan.fit --resume {checkpoints}/step-000003.ckpt --max-steps", said)
    found = sorted(path.name for path in checkpoints.iterdir())
    assert found == ["step-000002.ckpt", "step-000003.ckpt", "step-000100.ckpt"]


def test_dry_run_prints_and_saves_everything_trains_nothing_and_says_where_pictures_would_be_decoded(here, capsys):
    for kind in "AB":
        paint(here / "set" / kind, range(8))
    small = dict(data="set", width=2, blocks=1, layers=2, batch_size=2, pool=4)
    assert fit.main(["cyclegan", *opening.typed(small), "--dry-run", "--note", "few"]) == 0
    said, told = capsys.readouterr()
    assert f"; decoded into {here}/set.gan-cache, 1 MB" in told and not list(here.rglob("pixels-*"))
    run = here / "runs" / "001-cyclegan-few"
    assert (run / "settings.yaml").read_text() in said
    assert (run / "game.txt").read_text() in said
    assert "pool: 4" in said
    assert "generators: " in said
    assert not (run / "metrics.csv").exists()
    assert [path.name for path in (run / "samples").iterdir()] == ["reals.png"]
    assert said.endswith(f"; {(run / 'samples/reals.png').relative_to(here)} shows what the networks see\n")
    for more, refused in (
        (["--devices", "3"], "batch 2 is not divisible by 3 ranks"),
        (["--devices", "3", "--batch-size", "9"], "6 training samples do not fill a batch of 9"),
        (["--keep-best", "1", "--keep-best-by", "fid"], "--keep-best-by fid: there is no such score"),
    ):
        assert fit.main(["cyclegan", *opening.typed(small), "--dry-run", *more]) == 2
        assert refused in capsys.readouterr().err and [path.name for path in (here / "runs").iterdir()] == [run.name]


def test_the_runs_are_listed_and_help_is_short_and_has_examples_and_the_settings_of_the_run(capsys):
    assert fit.main(["--list-runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RUNS)
    assert all(len(line.split()) > 4 for line in lines)
    with pytest.raises(SystemExit):
        fit.main(["--run", "r3gan-faces", "--help"])
    said = capsys.readouterr().out
    assert "examples:" in said
    assert re.search(r"--latent LATENT +Length of the noise vector", said)
    assert "--hidden" not in said
    assert max(map(len, said.splitlines())) < 120
    assert len(said.splitlines()) < 90


# ---- mistakes ----


def contents(run):
    return {path: path.read_bytes() for path in sorted(Path(run).rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "runs"
    assert fit.main([*options("r3gan-faces", max_steps=1), "--out", str(out)]) == 0
    return out


@pytest.fixture
def one_step(trained_once, here):
    """A run of one step in runs/001-r3gan-faces."""
    shutil.copytree(trained_once, here / "runs")


@pytest.mark.promise("a refused or dry command", "the run stays as it was, to the byte")
@pytest.mark.promise("`--resume` with other settings, or from another folder")
def test_a_refused_or_dry_command_leaves_a_run_as_it_was(one_step, here, capsys):
    before = contents("runs/001-r3gan-faces")
    for typed, code, message in (
        ("--width 8 --max-steps 2", 2, "was trained with --max-steps 1, --width 4, and goes on with --max-steps 2, --"),
        (
            "--width 8 --max-steps 2",
            2,
            "and there (16, 4, 4); resume with --width 4, or begin a new run",
        ),
        ("--max-steps 7 --width 8 --dry-run", 2, "the checkpoint's networks are not this run's: "),
        ("--run sean-faces", 2, "is a run of r3gan-faces, not of sean-faces"),
        ("--note few", 2, "--note is for a new run's folder, and runs/001-r3gan-faces is there; leave --note out"),
        ("--precision 16-mixed", 2, "16-mixed needs a GPU"),
        ("--max-steps 7 --dry-run", 0, "a dry run: runs/001-r3gan-faces stays as it is"),
    ):
        if "16-mixed" in typed and torch.cuda.is_available():
            continue
        assert fit.main(["--resume", "runs/001-r3gan-faces", *typed.split()]) == code
        said = capsys.readouterr()
        assert message in said.out + said.err and "everything goes to" not in said.out
        assert contents("runs/001-r3gan-faces") == before
    assert fit.main(["--resume", "auto", "--max-steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "\nthe run was trained with --max-steps 1, and goes on with --max-steps 2\n" in said
    assert " minutes for the last 1\n" in said
    settings = yaml.safe_load((here / "runs" / "001-r3gan-faces" / "settings.yaml").read_text())
    assert (settings["max_steps"], settings["width"]) == (2, 4)
    assert list(metrics.read(here / "runs" / "001-r3gan-faces" / "metrics.csv")) == [0, 1, 2]
    assert not list((here / "runs" / "001-r3gan-faces").glob("*.part"))
    assert not (here / "runs" / "002-r3gan-faces").exists()
    more = ["--resume", "auto", "--max-steps", "3", "--faces", "14"]
    assert (fit.main(more), fit.main([*more, "--new-data", "true"])) == (2, 0)
    assert "was trained with 12 samples, and has 14 now; to go on with what is there" in capsys.readouterr().err
    assert fit.main([*options("r3gan-faces"), "--new-data", "true"]) == 2
    assert "--new-data is for a run that goes on" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_opened_is_refused_before_ranks_are_started(one_step, here, monkeypatch, capsys):
    monkeypatch.setattr(fit, "run_ranks", lambda *_: pytest.fail("ranks are started"))
    (file,) = (here / "runs" / "001-r3gan-faces" / "checkpoints").glob("*/*.safetensors")
    file.unlink()
    assert fit.main(["--resume", "auto", "--max-steps", "2", "--devices", "2", "--accelerator", "cpu"]) == 2
    assert f"{file.name} is missing; no earlier checkpoint of the run is whole" in capsys.readouterr().err


def test_a_run_that_another_process_trains_is_refused_and_left_as_it_is(one_step, here, monkeypatch, capsys):
    monkeypatch.setattr(folder, "PATIENCE", 0.1)
    with folder.training(RunFolder(here / "runs" / "001-r3gan-faces")):
        before = contents("runs/001-r3gan-faces")
        assert fit.main(["--resume", "auto", "--max-steps", "2"]) == 2
        assert f"process {os.getpid()} on {socket.gethostname()} is training 'runs/001-r3gan" in capsys.readouterr().err
        assert contents("runs/001-r3gan-faces") == before


def paint(folder, numbers):
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        Image.new("RGB", (16, 16), (number * 9, 99, 0)).save(folder / f"{number}.png")


def test_a_last_checkpoint_that_was_not_saved_is_the_last_word_and_the_best_one_is_named(here, monkeypatch, capsys):
    real = writing._write_file

    def write(part, *rest):
        if part.name.startswith("step-000003"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(part, *rest)

    monkeypatch.setattr(writing, "_write_file", write)
    settings = dict(max_steps=3, sample_every=1, keep=1, keep_best=1, strategy="single")
    assert fit.main(options("r3gan-faces", **settings)) == 2
    said = capsys.readouterr()
    run = RunFolder(here / "runs" / "001-r3gan-faces")
    rows = metrics.read(run.metrics)  # a step's score is in the row of the step before it
    best = min((1, 2), key=lambda step: rows[step]["val/distance"])
    assert set(run.steps()) <= {best, 2}
    assert re.search(
        rf"^  best +runs/001-r3gan-faces/checkpoints/step-00000{best}.ckpt \(val/distance ", said.out, re.M
    )
    assert said.err.splitlines()[-1].startswith(
        "error: the last checkpoint was not saved, and the newest one is runs/001"
    )


@pytest.mark.promise("updates that are not finite")
def test_a_loss_that_is_not_finite_ends_with_a_message_and_a_checkpoint(here, monkeypatch, capsys):
    from gan.games.pix2pix import Pix2pix

    original = Pix2pix.fool

    def poisoned(self, batch):
        return {name: loss * (float("nan") if self.step >= 2 else 1) for name, loss in original(self, batch).items()}

    monkeypatch.setattr(Pix2pix, "fool", poisoned)
    assert fit.main(options("pix2pix-faces", max_steps=40, save_every=100)) == 2
    said = capsys.readouterr().err
    assert "does not learn" in said.splitlines()[-1]
    saved = read_checkpoint(here / "runs" / "001-pix2pix-faces" / "checkpoints" / "step-000012.ckpt")
    assert all(torch.isfinite(value).all() for value in saved["state_dict"].values() if torch.is_tensor(value))


# ---- a folder of one's own ----


@pytest.fixture
def pairs(here):
    return opening.drawn(here / "mine", 8, 24)


FOLDER = dict(
    run="sean-folder", data="mine", labels=19, devices=1, size=16, batch_size=4, held_out=2, max_steps=2, workers=0,
    width=4, hidden=4, style=4, upsamplings=2, perceptual="off", pixels=10,
)  # fmt: skip


def on_folder(**more):
    return opening.typed({**FOLDER, **more})


def test_a_run_is_counted_in_epochs_and_its_perceptual_loss_resumes(pairs, here, capsys):
    """Six pictures to train on: one batch of four an epoch, and settings.yaml has everything."""
    vgg = narrow_vgg.save(here / "vgg.pth")
    arguments = on_folder(perceptual=vgg, epochs=3, flip=True, fake_once=True)
    del arguments[arguments.index("--max-steps") : arguments.index("--max-steps") + 2]
    assert fit.main(arguments) == 0
    assert "sean-folder on 1 CPU process, strategy ddp: 3 steps of 4 samples" in capsys.readouterr().out
    run = here / "runs" / "001-sean-folder"
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    wanted = dict(perceptual=vgg, epochs=3, max_steps=None, flip=True, fake_once=True, generator_rate=1e-4)
    assert {key: settings[key] for key in wanted} == wanted
    assert settings["data"] == str(here / "mine")  # from whatever folder it is opened
    assert not [key for key in read_checkpoint(RunFolder(run).checkpoint(3))["state_dict"] if "vgg" in key]
    rows = metrics.read(run / "metrics.csv")
    assert {"generator/perceptual", "generator/matching", "discriminator/hinge"} <= rows[3].keys()
    assert rows[3]["val/transfer_error"] > 0
    with Image.open(run / "samples" / "step-000003.png") as image:
        assert image.height < 3 * (128 + 10)  # two held-out pictures, two rows
    assert fit.main(["--resume", "runs/001-sean-folder", "--max-steps", "4"]) == 0
    assert "4 steps of 4 samples, from runs/001-sean-folder/checkpoints/step-000003.ckpt" in capsys.readouterr().out
    assert list(metrics.read(run / "metrics.csv")) == [0, 1, 2, 3, 4]


@pytest.mark.promise("a data set with wrong files", "all are named at once, before anything is trained")
def test_a_file_that_is_wrong_is_named_before_anything_is_trained(pairs, capsys):
    with Image.open(pairs / "labels" / "3.png") as label:
        label.putpixel((3, 4), 77)
        label.save(pairs / "labels" / "3.png")
    refused(capsys, on_folder(run="sean"), "labels/3.png", "77", "18")


def refused(capsys, arguments, *words):
    """In one line with these words, before there is a run."""
    assert fit.main(arguments) == 2
    said = capsys.readouterr().err
    assert re.findall("^.*error: ", said, re.MULTILINE) == ["error: "] and "Traceback" not in said
    assert all(word in said for word in words), said
    assert not Path("runs").exists()


@pytest.mark.promise("a file of the data changes, vanishes or becomes wrong while a run trains")
def test_a_file_that_becomes_wrong_ends_the_run_with_its_name(pairs, monkeypatch, capfd):

    def spoilt(*_):
        raise UserError("images/3.png cannot be read as a picture (gone); replace or remove it")

    monkeypatch.setattr(FolderPairs, "load_crop", spoilt)
    assert fit.main(on_folder()) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    (message,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert message == "error: images/3.png cannot be read as a picture (gone); replace or remove it"


# ---- several processes, as they are typed ----


def at_work(folder):
    """The processes in a folder, without this one."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= {process.name} if (process / "cwd").readlink() == folder else set()
    return found - {str(os.getpid())}


@pytest.mark.promise(
    "Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, to one process or to all",
    "all ranks end after the same step, all is saved, and the run resumes bit for bit",
)
@pytest.mark.parametrize(
    ("send", "number", "workers"),
    [
        (os.kill, signal.SIGINT, 0),
        pytest.param(os.killpg, signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(os.killpg, signal.SIGHUP, 1, marks=pytest.mark.slow),
    ],
)
def test_two_processes_need_no_launcher_and_stop_together(send, number, workers, here):
    """A person tells one process to end; a cluster, or Ctrl-C in a terminal, tells all and the loaders' workers too."""
    settings = dict(max_steps=100_000, devices=2, workers=workers, save_every=10_000, sample_every=10_000)
    words = ["gan.fit", *options("pix2pix-faces", strategy="ddp", check=False, **settings)]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = commands.Typed(words, cwd=here, start_new_session=send is os.killpg, **streams)
    path = here / "runs" / "001-pix2pix-faces" / "metrics.csv"
    assert commands.until(lambda: path.exists() and len(metrics.read(path)) > 5)
    family = at_work(here)
    assert len(family) > 2 + workers
    send(process.pid, number)
    out, err = process.communicate(60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert err.count("ending after this step, and saving") == 1
    assert err.count("another Ctrl-C ends at once, without saving") == (number == signal.SIGINT)
    assert out.count("2 CPU processes, strategy ddp") == 1  # one of the two speaks
    assert "go on with\n  python -m gan.fit --resume runs/001-pix2pix-faces" in out
    assert len(list((here / "runs" / "001-pix2pix-faces" / "checkpoints").glob("step-*.ckpt"))) == 1
    assert commands.until(lambda: not any(Path(f"/proc/{process}").exists() for process in family), 20)
