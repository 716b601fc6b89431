"""How a rank has failed, in the one form in which that is told."""

import json
import os
import socket
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gan.files.errors import RankLost, UserError, WorkerLost, printable
from strategies.processes import failure
from strategies.processes.failure import ERROR, FILE, FOLLOWS, LOST, REFUSED, Failure, cause
from strategies.processes.whereabouts import RanksDiverged

RANK_3 = f"rank 3 (process {os.getpid()} on {socket.gethostname()})"


def told(error, path, monkeypatch, status=1):
    """What the agent of rank 3 reads after an error."""
    monkeypatch.setenv(FILE, str(path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    failure.report(error)
    return failure.read(3, "host", ProcessFailure(0, 4711, status, str(path / "error.json")))


IN_A_WORKER = "Caught UserError in worker 0.\nTraceback: ...\ngan.errors.UserError: 3.png cannot be read"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UserError("type another batch"), REFUSED, "type another batch"),
        (RankLost("rank 1 is gone"), FOLLOWS, "rank 1 is gone"),
        (WorkerLost("a lost worker"), ERROR, f"{RANK_3} ended with a lost worker"),
        (UserError(IN_A_WORKER), REFUSED, "3.png cannot be read"),
        (UserError("no \x1b[2J.png"), REFUSED, "no \\x1b[2J.png"),
        (ValueError("no such label\nand more"), ERROR, f"{RANK_3} ended with ValueError: no such label"),
        (KeyError(), ERROR, f"{RANK_3} ended with KeyError"),
        (KeyboardInterrupt(), ERROR, f"{RANK_3} was interrupted"),
    ],
    ids=["refused", "lost", "worker", "in a worker", "escaped", "error", "without words", "interrupted"],
)
def test_the_agent_reads_what_a_rank_has_reported(error, kind, text, tmp_path, monkeypatch):
    found = told(error, tmp_path, monkeypatch)
    assert (found.kind, printable(str(found))) == (kind, text)
    if type(error) is ValueError:
        written = json.loads((tmp_path / "error.json").read_text())
        assert written["message"]["message"] == "ValueError: no such label"  # in torchrun's own table


def test_a_report_that_is_cut_off_is_not_there_for_the_agent(tmp_path, monkeypatch):
    """A process may be ended while it writes; torch's agent fails on half a file."""
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))

    def cut_off(path, text, encoding):
        path.touch()
        raise InterruptedError

    with mock.patch.object(Path, "write_text", cut_off), pytest.raises(InterruptedError):
        failure.report(ValueError("no"))
    monkeypatch.delenv(FILE)
    failure.report(ValueError("no"))  # without an agent nothing is written
    assert not (tmp_path / "error.json").exists()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-9, "was ended by signal 9 (Killed): from outside, or out of memory?"),
        (-6, f"was ended by signal 6 (Aborted): {failure.UNLIKE}"),
        (-11, "was ended by signal 11 (Segmentation fault)"),
        (3, "ended with status 3; see what it said"),
    ],
)
def test_a_rank_that_says_nothing_is_known_by_its_status(status, words, tmp_path):
    found = failure.read(1, "host", ProcessFailure(0, 4711, status, str(tmp_path / "none")))
    assert (str(found), found.kind) == (f"rank 1 (process 4711 on host) {words}", LOST if status == -9 else found.kind)


def test_the_cause_is_the_first_that_does_not_follow_another():
    kinds = ((FOLLOWS, 1.0), (ERROR, 2.0), (REFUSED, 3.0), (LOST, 0.0))
    follows, first, second, killed = (Failure(0, 1, "host", "why", kind, at=at) for kind, at in kinds)
    assert cause([follows, second, first]) is first
    assert cause([follows, first, killed]) is killed
    assert cause([follows]) is follows


def test_ranks_that_go_different_ways_are_no_refusal():
    assert failure.failed(1, UserError("type ddp")).refused
    apart = failure.failed(1, RanksDiverged("rank 1 plays phase 'g' where rank 0 plays 'd'"))
    assert not apart.refused and str(apart).startswith("rank 1 plays")
