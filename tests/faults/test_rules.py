"""Each rule has a control: a command that breaks it, which the fuzz must name. And one that breaks none.

The commands are made up. test_some.py plays a small part of `make faults`.
"""

import os
import pickle
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.faults import case, child
from tests.faults.__main__ import play, table, told
from tests.faults.case import Player
from tests.faults.kinds import KINDS
from tests.faults.kinds.checkpoints import give
from tests.faults.known import _bits

pytestmark = pytest.mark.slow


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    """What is wrong with a command: a function that is called in a folder with a run, in a process of its own."""
    monkeypatch.setattr(child, "LEFT", 0.2)

    def find(main, *words, what="sample", limit=60.0, between=None, **about):
        def kind(case):
            run = Path("runs/001-r")
            (run / "checkpoints").mkdir(parents=True)
            for name in ("settings.yaml", "keep.txt", "metrics.csv"):
                (run / name).write_text("a\n")
            started = case.start(what, *words, main=lambda _: main(), limit=limit)
            if between is not None:
                between(started[3])
            case.judge(*started, **about)

        return Player(kind, "control", 0, 0, tmp_path / "known").end().wrong

    return find


def says(text, status=2):
    print(text, file=sys.stderr)
    return status


def raises():
    raise KeyError("no such thing")


def leaves_a_process():
    if not os.fork():
        time.sleep(60)
    return 0


def writes(path, status=0, text="b\n"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return says("error: no", status)


def removes(path):
    Path(path).unlink()
    return 0


SETTINGS = "runs/001-r/settings.yaml"
CHANGED = f"nothing lost: {SETTINGS} is changed"


def test_a_command_that_does_all_right_breaks_none(wrong):
    assert wrong(lambda: 0) == []
    assert wrong(lambda: says("error: there is no run; type auto")) == []
    assert wrong(partial(writes, "runs/001-r/samples/show.png")) == []
    assert wrong(partial(writes, SETTINGS), what="resume") == []


@pytest.mark.parametrize(
    ("rule", "main", "how"),
    [
        ("the status: the exit status is 1", lambda: 1, {}),
        ("the status: the exit status is -9", lambda: os.kill(os.getpid(), signal.SIGKILL), {}),
        ("no traceback: a traceback: KeyError: 'no such thing'", raises, {}),
        ("nobody left: still runs", leaves_a_process, {}),
        ("the reason: status 2 without an error line", lambda: 2, {}),
        (r"the reason: the control character '\x1b'", lambda: says("error: \x1b[2J"), {}),
        ("nothing lost: runs/001-r/keep.txt is gone", partial(removes, "runs/001-r/keep.txt"), {"what": "resume"}),
        ("nothing lost: runs/001-r/metrics.csv is changed", partial(writes, "runs/001-r/metrics.csv"), {}),
        (CHANGED, partial(writes, SETTINGS, status=2), {"what": "resume"}),
        (CHANGED, partial(writes, SETTINGS), {"what": "resume", "words": ["--dry-run"]}),
        ("nothing half written: a.png.7.part remains", partial(writes, "a.png.7.part"), {}),
        ("nothing taken: it is another one", lambda: 0, {"check": lambda ended: ["it is another one"]}),
    ],
)
def test_what_breaks_a_rule_is_named(wrong, rule, main, how):
    how = dict(how)
    found = wrong(main, *how.pop("words", ()), **how)
    assert any(rule in line for line in found), found


def test_a_command_that_hangs_is_ended_and_the_line_is_named(wrong):
    (line,) = wrong(lambda: time.sleep(60), limit=1.5)
    assert "no hang: no end within 2 s" in line and "test_rules.py" in line


def test_a_signal_that_was_sent_may_end_it(wrong):
    def send(running):
        while not Path("begun").exists():
            time.sleep(0.01)
        os.kill(running.process, signal.SIGUSR1)

    def main():
        Path("begun").touch()
        time.sleep(60)

    ended = partial(wrong, main, between=send)
    assert ended(signals=(signal.SIGUSR1,)) == []
    assert ended() == ["the status: the exit status is -10"]


def test_a_case_that_fails_itself_is_a_failure(tmp_path):
    result = Player(lambda case: raises(), "control", 0, 7, tmp_path / "known").end()
    assert result.number == 7 and "KeyError" in result.wrong[0]
    result = Player(lambda case: os.kill(os.getpid(), signal.SIGKILL), "control", 0, 7, tmp_path / "known").end()
    assert result.wrong == ["the case itself: its process ended with -9"]


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


def exports(state, step=2, status=0):
    path = Path(f"runs/001-f/export/step-{step:06d}/generator.safetensors")
    path.parent.mkdir(parents=True)
    save_file(state, path)
    print(path)
    return status


def refuses():
    os.write(2, b"error: step-000002.ckpt is damaged\n")
    return 2


def loses():
    shutil.rmtree(FOLDER / "step-000001.ckpt")
    return exports(RIGHT)


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """What is said of an export, if it does as `main` does."""
    for step in (1, 2):
        folder = tmp_path / "known" / "faces" / FOLDER / f"step-{step:06d}.ckpt"
        folder.mkdir(parents=True)
        (folder / "values.json").write_text(f"{step}")
        (tmp_path / "known" / f"faces-export-{step}").write_bytes(pickle.dumps({"generator.safetensors": _bits(RIGHT)}))

    def find(main, which="auto"):
        def kind(case):
            case.copy("faces")
            give(case, "faces", "export", which, FOLDER / "step-000001.ckpt")

        monkeypatch.setitem(case.COMMANDS, "export", lambda words: main())
        return Player(kind, "control", 0, 0, tmp_path / "known").end().wrong

    return find


def test_right_weights_and_a_refusal_are_right(taken):
    for ends in (lambda: exports(RIGHT), lambda: exports(RIGHT, 1), refuses):
        assert taken(ends) == []


@pytest.mark.parametrize(
    ("main", "said"),
    [
        (lambda: exports(OTHER), "a damaged checkpoint was taken in silence: export from step 2 is another one"),
        (loses, "is no longer whole, and there is no newer one"),
        (lambda: 0, "made nothing that can be compared"),
    ],
)
def test_a_damaged_or_lost_checkpoint_is_reported(main, said, taken):
    assert any(line.startswith("nothing taken: ") and said in line for line in taken(main))


def test_another_checkpoint_than_was_asked_for_is_reported(taken):
    (line,) = taken(lambda: exports(RIGHT, 1), which=FOLDER / "step-000002.ckpt")
    assert "was asked for, and step 1 was taken" in line
