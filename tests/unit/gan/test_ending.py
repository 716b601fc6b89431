"""How a command begins and ends, and what gan.env says."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from PIL import Image

import gan.app.outputs
from gan import env, evaluate, export, sample
from gan import fit as command
from gan.app import command as command_module
from gan.app.editing import editors
from gan.app.fitting.keep import Keep
from gan.app.fitting.metrics import Record
from gan.app.fitting.train import Beginning, begin, finish, keeper, often
from gan.app.outputs import Output, outputs
from gan.app.run import options, reopen, settings_file
from gan.app.run.computer import Computer
from gan.app.run.folder import RunFolder
from gan.files.errors import UserError
from gan.runs import Run
from strategies import TorchAccelerator
from strategies.processes import agent
from tests.support import commands
from tests.support.posix import not_on_windows, only_on_linux

OUTPUTS = Path(gan.app.outputs.__file__)
# The file alone: the packages that it is in import torch, which takes seconds.
ALONE = f"""
import sys, types
for name, path in (("gan", {str(OUTPUTS.parents[1])!r}), ("gan.files", {str(OUTPUTS.parents[1] / "files")!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
exec(open({str(OUTPUTS)!r}).read())
"""

PROGRAM = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor

class Slow:
    def __del__(self):
        print("taken apart")

kept = Slow()
pool = ThreadPoolExecutor()
pool.submit(print, " pool ")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
atexit.register(print, "atexit")
print("main", end=" ")
"""


def run(program: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", f"{ALONE}\n{program}"], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("closing", "more"), [("end(3)", []), ("import sys; sys.exit(3)", ["taken", "apart"])])
def test_threads_and_exit_functions_are_not_left_out(closing, more):
    status, said, error = run(f"{PROGRAM}\n{closing}")
    said = said.split()
    assert (status, error) == (3, "") and sorted(said[: -1 - len(more)]) == ["main", "pool", "thread"]
    assert said[-1 - len(more) :] == ["atexit", *more]


IN_BACKGROUND = """
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
run(lambda: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGHUP)) or 0)
"""


@not_on_windows
def test_an_interrupt_is_heard_also_where_a_script_has_started_the_command_with_an_ampersand():
    """A shell lets such a command ignore it. What nohup lets it ignore stays so."""
    assert run(IN_BACKGROUND) == (0, f"True {signal.SIG_IGN}\n", "")


DEAF = """
import signal, time
end.__globals__["PATIENCE"] = 0.3

def died(*_):
    raise RuntimeError("a worker is killed")

signal.signal(signal.SIGCHLD, died)  # as torch does

def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)

fork = multiprocessing.get_context("fork")
ready = fork.Event()
deaf = fork.Process(target=stay, daemon=True, name="deaf")
deaf.start()
ready.wait()
"""


@pytest.mark.promise(
    "a daemon process that does not end at exit, such as a loader's worker",
    "it is killed after some seconds, and the command ends",
)
@only_on_linux
def test_a_daemon_process_that_does_not_end_is_killed():
    """Such as a loader's worker, which leaves SIGTERM to the trainer and waits for a disk."""
    ended = commands.run("-c", f"{ALONE}\nimport datasets.workers\n{DEAF}\nprint(deaf.pid)\nend(3)")
    assert (ended.returncode, ended.stderr) == (3, "")
    assert commands.until(lambda: not commands.alive(int(ended.stdout)), 20)


# ---- fit ----


def test_the_best_are_kept_by_the_runs_first_score_among_validated_steps(tmp_path):
    run = Run(None, None, 100, {"val/error": "error", "val/other": "another"})

    def keep(typed, run=run, made=()):
        return keeper(options.parse(["r3gan-faces", *typed.split()])[0], run, RunFolder(tmp_path), 20, made)

    assert (keep("").newest, keep("").best, keep("").in_background) == (2, 0, True)
    assert not keep("--save-in-background false").in_background
    for typed in ("", " --save-every 10", " --save-every 40"):
        made = keep(f"--keep 1 --keep-best 3{typed}")
        assert (made.newest, made.best, made.score) == (1, 3, "val/error")
    by_fid = "--keep-best 1 --keep-best-by fid"
    made = keep(f"{by_fid} --score-every 50", made=["score/fid"])
    assert (made.score, made.every) == ("score/fid", 50)
    for name in ("other", "val/other"):  # which is what metrics.csv calls it
        assert keep(f"--keep-best 1 --keep-best-by {name}").score == "val/other"
    words = r"^--keep-best 1 needs .* are 20, 40, .*--save-every 30 .*; type --save-every 20"
    with pytest.raises(UserError, match=words):
        keep("--keep-best 1 --save-every 30")
    with pytest.raises(UserError, match=r"^--keep-best-by fid: there is no such score, but error, other; type --score"):
        keep(by_fid)
    with pytest.raises(UserError, match=r"^--keep-best 1: this run has no scores"):
        keep("--keep-best 1", run=Run(None, None, 100))


@pytest.fixture
def beginning(tmp_path, capsys):
    """What is said where a run begins, for what was typed."""

    def said(typed, run, kind="cpu", saves=10):
        settings, where = options.parse(typed.split())[0], RunFolder(tmp_path)
        begin(settings, run, Computer(TorchAccelerator(), kind, 1, 1), where, None, saves)
        return capsys.readouterr().out

    return said


@pytest.mark.parametrize(
    ("steps", "batch", "turns", "typed", "grids", "saves"),
    [
        (1_562_500, 16, 1, "", 12_500, 12_500),
        (156_000, 256, 2, "", 1562, 1562),  # each network sees half of the samples
        (1_562_500, 16, 1, " --sample-every 9 --save-every 30000", 9, 30_000),
        (9, 10**6, 1, "", 1, 1),
        (10, 4, 1, "", 3, 3),
        (60, 4, 1, "", 15, 15),
        (180, 4, 1, "", 25, 25),
        (1_562_500, None, 1, "", 156_250, 156_250),
    ],
)
def test_a_long_run_has_grids_and_checkpoints_every_200_kimg_a_short_one_few_and_says_so(
    steps, batch, turns, typed, grids, saves, tmp_path, beginning
):
    settings = options.parse(f"r3gan-faces{typed}".split())[0]
    run = Run(SimpleNamespace(show=None), SimpleNamespace(batch_size=batch), steps, turns=turns)
    saved = keeper(settings, run, RunFolder(tmp_path), often(settings, run)).every
    said = beginning(f"r3gan-faces{typed}", run, saves=saved).partition("\n")[0]
    assert said.endswith(f"; a grid every {grids}, a checkpoint every {saves}")


LONG = "without a GPU 8,000,000 samples take days or years; for a first look type "


@pytest.mark.parametrize(
    ("name", "kind", "steps", "small"),
    [
        ("stylegan2", "cpu", 500_000, "--size 32 --kimg 40"),
        ("hifigan", "cpu", 500_000, "--max-steps 500"),
        ("stylegan2", "cpu", 100_000, None),
        ("stylegan2", "cuda", 500_000, None),
    ],
)
def test_a_published_length_without_a_gpu_is_said_with_what_to_type_and_what_was_chosen(
    name, kind, steps, small, beginning
):
    run = Run(None, SimpleNamespace(batch_size=16), steps, chosen={"config_": "auto", "ema_kimg": "2"})
    said = beginning(name, run, kind)
    assert (f"\n{LONG}{small}, and a smaller --width\n" in said) == ("without a GPU" in said) == (small is not None)
    assert "; a checkpoint every 10\n" in said and "\nsettings: config auto, ema-kimg 2\n" in said
    assert "\nno grids: the game has no show(batch); " in said


def test_the_batch_that_is_chosen_for_many_ranks_stays_when_a_run_goes_on_with_fewer(tmp_path):
    for number in range(70):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / f"{number}.png")
    typed = f"stylegan2 --data {tmp_path} --width 0.001 --mapping 1 --out {tmp_path / 'runs'}".split()

    def started(ranks, *more):
        settings, found = options.parse([*typed, *more])
        return Beginning(settings, found, None, tmp_path / "runs", [], ranks)

    new = started(8)
    assert new.run.batch_size == 64
    where = RunFolder(tmp_path / "runs" / "001-stylegan2")
    where.checkpoint(1).mkdir(parents=True)
    where.settings.write_text(new.all_settings)
    assert started(1, "--resume", "auto").run.batch_size == 64
    where.settings.write_text(new.all_settings.replace("batch_size: 64", "batch_size: null"))  # as of before
    assert started(8, "--resume", "auto").run.batch_size == 32


@pytest.mark.parametrize("began", [None, 20])
def test_the_end_names_what_this_training_has_made(began, tmp_path, capsys):
    """Not a picture of steps that were trained before, and no score where nothing was trained."""
    where = RunFolder(tmp_path)
    where.samples.mkdir()
    for path in (where.samples / "step-000010.png", where.samples / "step-000030.png", where.scores):
        path.touch()
    where.checkpoint(20).mkdir(parents=True)
    run, log = Run(None, None, 10, scores={"val/x": "the error"}), Record(where)
    log.rows = {20: {"val/x": 1.0, "score/fid": 4.0}, 0: {"val/x": 2.0, "score/fid": 5.0}, 10: {"val/x": 3.0}}
    finish(run, log, SimpleNamespace(global_step=20), where, Keep(where, 1), began, 60.0)
    said = capsys.readouterr().out
    assert "step-000010.png" in said and "step-000030.png" not in said and "curves" not in said
    assert said.strip().endswith("--max-steps 40") and re.search(rf"\n  scores +{where.scores}\n", said)
    for score in ("the error: 2.0000 at the start, 1.0000 now", "\nFID: 5.0000 at the start, 4.0000 now\n"):
        assert (score in said) == (began is None)
    assert ("the run is at step 20 already, so nothing was trained" in said) == (began == 20)


def test_ranks_on_tpus_get_their_variables_before_they_start(monkeypatch):
    tpu, run = mock.Mock(), mock.Mock(side_effect=lambda _: launch.assert_called_once_with(nproc_per_node=4))
    launch = tpu.distributed.set_tpu_launch_env
    monkeypatch.setattr(torch, "tpu", tpu, raising=False)
    monkeypatch.setattr(agent, "run", run)
    computer = Computer(TorchAccelerator(), "tpu", devices=4, nodes=1)
    command.start_ranks(options.parse(["r3gan-faces"])[0], computer, Path("runs"), [])
    run.assert_called_once()


# ---- command ----


def ends(command, error, monkeypatch) -> int:
    for module in (reopen, editors):
        monkeypatch.setattr(module, "open_run", mock.Mock(side_effect=error))
    return command.main(["--devices", "1", "--accelerator", "cpu"] if command is evaluate else [])


def after(error, cause):
    """An error that another one has caused, which Lightning's SystemExit(1) has as its context alone."""
    error.__cause__ = error.__context__ = cause
    return error


FULL = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("command", [evaluate, export, sample])
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (after(SystemExit(1), KeyboardInterrupt()), 130, ""),
        (UserError("this is wrong"), 2, "error: this is wrong\n"),
        (FULL, 2, "error: too many open files: this shell allows a process"),
    ],
)
def test_a_mistake_is_one_line_and_another_error_is_raised(command, error, status, said, monkeypatch, capsys):
    assert ends(command, error, monkeypatch) == status
    printed = capsys.readouterr().err
    assert printed[: len(said)] == said and printed.count("\n") == bool(said)
    with pytest.raises(KeyError):
        ends(command, KeyError("image"), monkeypatch)


BUSY = "Resource temporarily unavailable"


@pytest.mark.promise("too few file handles, threads or processes")
@not_on_windows
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FULL, r"allows a process \d+; type ulimit -n \d+$"),
        (RuntimeError("Too many open files. Communication with the workers is"), "type ulimit -n"),
        (after(RuntimeError("DataLoader"), FULL), "type ulimit -n"),
        (RuntimeError("can't start new thread"), r"\(can't start new thread\); type ulimit -u"),
        (RuntimeError(BUSY), "no more processes .* type ulimit -u"),
        (BlockingIOError(errno.EAGAIN, BUSY), "no more processes .* type ulimit -u"),
        (None, None),
        (ValueError("x"), None),
        (OSError(errno.ENOENT, "x"), None),
        (after(UserError("y"), FULL), None),
    ],
)
def test_what_a_shell_forbids_is_named_and_other_errors_stay_what_they_are(error, words):
    found = command_module._named(error)
    assert found is None if words is None else isinstance(found, UserError) and re.search(words, str(found))


# ---- outputs ----


class Broken:
    encoding, closed = "utf-8", False

    def write(self, *_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    flush = write


@pytest.mark.promise("pictures, curves, metrics, settings that cannot be written; standard output that nobody reads")
def test_output_that_nobody_reads_is_left_out_and_said_on_the_other_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Broken())
    with outputs():
        for _ in range(2):
            print("hello")
        assert sys.stdout.encoding == "utf-8"
    assert type(sys.stdout) is Broken
    said = capsys.readouterr().err
    assert said == "\nwarning: standard output cannot be written (Broken pipe); the command goes on\n"
    monkeypatch.setattr(sys, "stderr", Broken())  # nobody reads that either
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


# ---- env: what a report of a problem needs ----


def test_it_names_versions_devices_and_what_the_run_was_trained_with(tmp_path, capsys, monkeypatch):
    run = tmp_path / "001-r3gan-faces"
    (run / "checkpoints/step-000020.ckpt").mkdir(parents=True)
    settings = options.parse(["r3gan-faces", "--batch-size", "12"])[0]
    (run / "settings.yaml").write_text(settings_file.dump(settings, settings.run))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert env.main([str(run)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["torch", torch.__version__] in said and ["OMP_NUM_THREADS", "1"] in said
    assert ["batch_size:", "12"] in said and [f"{run},", "step-000020.ckpt"] in said
