"""Each rule has a control: what breaks it is named. And what breaks none. test_some.py plays a few true cases."""

import os
import pickle
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGUSR1

import pytest
import torch
from safetensors.torch import save_file

from tests.faults import case
from tests.faults.__main__ import play, table, told
from tests.faults.case import Player
from tests.faults.child import Ended
from tests.faults.kinds import KINDS
from tests.faults.kinds.checkpoints import give
from tests.faults.known import _bits
from tests.faults.rules import Seen, broken

SETTINGS, KEPT, CURVES = (f"runs/001-r/{name}" for name in ("settings.yaml", "keep.txt", "metrics.csv"))
BEFORE = dict.fromkeys((SETTINGS, KEPT, CURVES), "as it was")
CHANGED = f"nothing lost: {SETTINGS} is changed"


def wrong(what="sample", status=0, err="", writes="", removes="", words=(), **more):
    """What the rules say of a command that has ended so, and has written or removed a file."""
    after = {**BEFORE, writes: "anew"} if writes else {path: BEFORE[path] for path in BEFORE if path != removes}
    return broken(Seen(what, words, Ended(status, "", err, 1.0), BEFORE, after, **more))


@pytest.mark.parametrize(
    "how",
    [
        {},
        dict(status=2, err="error: there is no run; type auto"),
        dict(writes="runs/001-r/samples/show.png"),
        dict(writes=SETTINGS, what="resume"),
        dict(status=-SIGUSR1, signals=(SIGUSR1,)),
    ],
)
def test_a_command_that_does_all_right_breaks_none(how):
    assert wrong(**how) == []


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        ("the status: the exit status is 1", dict(status=1)),
        ("the status: the exit status is -10", dict(status=-SIGUSR1)),
        ("the reason: status 2 without an error line: ''", dict(status=2)),
        (r"the reason: the control character '\x1b' in 'error: \x1b[2J'", dict(status=2, err="error: \x1b[2J")),
        (f"nothing lost: {KEPT} is gone", dict(removes=KEPT, what="resume")),
        (f"nothing lost: {CURVES} is changed", dict(writes=CURVES)),
        (CHANGED, dict(writes=SETTINGS, what="resume", status=2, err="error: no")),
        (CHANGED, dict(writes=SETTINGS, what="resume", words=("--dry-run",))),
        ("nothing half written: a.png.7.part remains", dict(writes="a.png.7.part")),
        ("nothing taken: it is another one", dict(taken=("it is another one",))),
    ],
)
def test_what_breaks_a_rule_is_named(rule, how):
    assert wrong(**how) == [rule]


# ---- commands that are made up, in processes of their own ----


def found(kind, tmp_path):
    return Player(kind, "control", 0, 7, tmp_path / "known").end().wrong


def does_all_wrong():
    Path("keep.txt").write_text("anew")
    if not os.fork():
        time.sleep(60)
    raise KeyError("no such thing")


@pytest.mark.slow
def test_a_command_is_seen_with_its_files_and_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.faults.child.LEFT", 0.2)

    def kind(case):
        Path("keep.txt").write_text("as it was")
        case.run("sample", main=lambda _: does_all_wrong())

    status, traceback, left, lost = found(kind, tmp_path)
    assert status == "the status: the exit status is 1"
    assert traceback == "no traceback: a traceback: KeyError: 'no such thing'"
    assert left.startswith("nobody left: still runs: process ")
    assert lost == "nothing lost: keep.txt is changed"


def hangs(_):
    time.sleep(60)


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_and_the_line_is_named(tmp_path):
    (line,) = found(lambda case: case.run("sample", main=hangs, limit=1.5), tmp_path)
    assert "no hang: no end within 2 s" in line and "test_rules.py" in line


@pytest.mark.slow
def test_a_case_that_fails_itself_is_a_failure(tmp_path):
    (line,) = found(lambda case: does_all_wrong(), tmp_path)
    assert "KeyError" in line
    killed = found(lambda case: os.kill(os.getpid(), SIGKILL), tmp_path)
    assert killed == ["the case itself: its process ended with -9"]


@pytest.mark.slow
def test_what_is_printed_plays_the_case_again(tmp_path, monkeypatch):
    def kind(case):
        case.result.wrong.append(f"the dice say {case.chance.random()}")

    monkeypatch.setitem(KINDS, "words", (kind, 1))
    found = {result.number: result for result in play(tmp_path / "known", 5, range(6), "words", 2)}
    (again,) = play(tmp_path / "known", 5, [3], "words", 1)
    assert again.wrong == found[3].wrong != found[4].wrong
    assert told(again, 5)[0].endswith("again: make faults ARGS='--seed 5 --kind words --case 3'")
    assert "! the dice say" in told(again, 5)[1]
    assert table([*found.values()])[1].split()[:3] == ["words", "6", "6"]


# ---- checkpoints ----

RIGHT, OTHER = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.0000002])}
FOLDER = Path("runs/001-f/checkpoints")


def exports(state, step=2):
    path = Path(f"runs/001-f/export/step-{step:06d}/generator.safetensors")
    path.parent.mkdir(parents=True)
    save_file(state, path)
    print(path)
    return 0


def refuses():
    print("error: step-000002.ckpt is damaged", file=sys.stderr)
    return 2


def loses():
    shutil.rmtree(FOLDER / "step-000001.ckpt")
    return exports(RIGHT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("export", "which", "said"),
    [
        (partial(exports, RIGHT), "auto", None),
        (partial(exports, RIGHT, 1), "auto", None),
        (refuses, "auto", None),
        (partial(exports, OTHER), "auto", "a damaged checkpoint was taken in silence: export from step 2 is another"),
        (loses, "auto", "is no longer whole, and there is no newer one"),
        (lambda: 0, "auto", "made nothing that can be compared"),
        (partial(exports, RIGHT, 1), FOLDER / "step-000002.ckpt", "was asked for, and step 1 was taken"),
    ],
)
def test_a_damaged_or_lost_checkpoint_is_reported_and_right_weights_or_a_refusal_are_right(
    export, which, said, tmp_path, monkeypatch
):
    for step in (1, 2):
        folder = tmp_path / "known" / "faces" / FOLDER / f"step-{step:06d}.ckpt"
        folder.mkdir(parents=True)
        (folder / "values.json").write_text(f"{step}")
        (tmp_path / "known" / f"faces-export-{step}").write_bytes(pickle.dumps({"generator.safetensors": _bits(RIGHT)}))
    monkeypatch.setitem(case.COMMANDS, "export", lambda words: export())

    def kind(case):
        case.copy("faces")
        give(case, "faces", "export", which, FOLDER / "step-000001.ckpt")

    lines = found(kind, tmp_path)
    assert lines == [] if said is None else any("nothing taken: " in line and said in line for line in lines)
