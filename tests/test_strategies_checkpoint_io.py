"""A checkpoint is there whole or not at all, also when the process is killed while it saves."""

import os
import pickle
import subprocess
import sys
import time

import pytest
import torch

from gan.errors import UserError
from strategies.checkpoint_io import WholeCheckpointIO

SAVER = """
import sys, torch
from strategies.checkpoint_io import WholeCheckpointIO
path = sys.argv[1]
for number in range(1000):
    state = {"number": number, "weights": torch.full((3_000_000,), float(number))}
    WholeCheckpointIO().save_checkpoint(state, path)
    print(number, flush=True)
"""


def whole(path):
    state = WholeCheckpointIO().load_checkpoint(path)
    assert torch.equal(state["weights"], torch.full((3_000_000,), float(state["number"])))
    return state["number"]


def test_a_kill_while_saving_leaves_the_last_whole_checkpoint(tmp_path):
    caught_in_the_middle = 0
    for attempt in range(6):
        path = tmp_path / f"{attempt}.ckpt"
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "0\n"
        part = path.with_name(path.name + ".part")
        deadline = time.monotonic() + 20
        while not (part.exists() and part.stat().st_size > 100_000) and time.monotonic() < deadline:
            time.sleep(0.0005)
        process.kill()
        said = process.stdout.read().split()
        process.wait()
        assert whole(path) >= int(said[-1] if said else 0)
        caught_in_the_middle += part.exists()
    assert caught_in_the_middle  # otherwise nothing was tested


def test_the_control_a_file_written_in_place_is_torn_by_a_kill(tmp_path):
    path = tmp_path / "torn.ckpt"
    saver = SAVER.replace("WholeCheckpointIO().save_checkpoint(state, path)", "torch.save(state, path)")
    for _ in range(20):
        process = subprocess.Popen([sys.executable, "-c", saver, str(path)], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while path.stat().st_size > 6_000_000 and time.monotonic() < deadline:
            pass
        process.kill()
        process.wait()
        try:
            whole(path)
        except UserError as error:
            assert "cannot be read as a checkpoint" in str(error)
            return
    pytest.fail("no file was torn")


def test_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "kept.ckpt"
    WholeCheckpointIO().save_checkpoint({"number": 1}, path)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        WholeCheckpointIO().save_checkpoint({"number": lambda: 2}, path)
    assert WholeCheckpointIO().load_checkpoint(path) == {"number": 1}


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Malice:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"malice": Malice()}, tmp_path / "malice.ckpt")
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        WholeCheckpointIO().load_checkpoint(tmp_path / "malice.ckpt")
    assert not (tmp_path / "ran").exists()


def test_storage_options_are_refused_rather_than_ignored(tmp_path):
    with pytest.raises(UserError, match="leave storage_options out"):
        WholeCheckpointIO().save_checkpoint({}, tmp_path / "x.ckpt", storage_options={"key": 1})
