"""What the command decides about a run before it trains."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gan import fit as command
from gan.app.run import options
from gan.app.run.computer import Computer
from gan.app.run.folder import RunFolder
from gan.app.training.keep import Keep
from gan.app.training.metrics import Record
from gan.app.training.train import finish, keeper
from gan.files.errors import UserError
from gan.runs import Run
from strategies import TorchAccelerator
from strategies.processes import agent


def test_the_best_are_kept_by_the_runs_first_score_among_validated_steps(tmp_path):
    run = Run(None, None, 100, {"val/error": "error", "val/other": "another"})

    def keep(*typed, run=run):
        return keeper(options.parse(["r3gan-faces", *typed])[0], run, RunFolder(tmp_path), 20)

    assert (keep().newest, keep().best) == (2, 0)
    for typed in ((), ("--save-every", "10"), ("--save-every", "40")):
        made = keep("--keep", "1", "--keep-best", "3", *typed)
        assert (made.newest, made.best, made.score) == (1, 3, "val/error")
    with pytest.raises(
        UserError, match=r"^--keep-best 1 needs .* are 20, 40, .*--save-every 30 .*; type --save-every 20"
    ):
        keep("--keep-best", "1", "--save-every", "30")
    with pytest.raises(UserError, match=r"^--keep-best 1: this run has no scores"):
        keep("--keep-best", "1", run=Run(None, None, 100))


@pytest.mark.parametrize("began", [None, 20])
def test_the_end_names_what_this_training_has_made(began, tmp_path, capsys):
    """Not a picture of steps that were trained before, and no score where nothing was trained."""
    where = RunFolder(tmp_path)
    where.samples.mkdir()
    for step in (10, 30):
        (where.samples / f"step-{step:06d}.png").touch()
    where.checkpoint(20).mkdir(parents=True)
    run, log = Run(None, None, 10, scores={"val/x": "the error"}), Record(where)
    log.rows = {20: {"val/x": 1.0}, 0: {"val/x": 2.0}, 10: {"val/x": 3.0}}
    finish(run, log, SimpleNamespace(global_step=20), where, Keep(where, 1), began, 60.0)
    said = capsys.readouterr().out
    assert "step-000010.png" in said and "step-000030.png" not in said and "curves" not in said
    assert said.strip().endswith("--max-steps 40")
    assert ("the error: 2.0000 at the start, 1.0000 now" in said) == (began is None)
    assert ("the run is at step 20 already, so nothing was trained" in said) == (began == 20)


def test_ranks_on_tpus_get_their_variables_before_they_start(monkeypatch):
    done = []
    tpu = SimpleNamespace(distributed=SimpleNamespace(set_tpu_launch_env=lambda **given: done.append(given)))
    monkeypatch.setattr(torch, "tpu", tpu, raising=False)
    monkeypatch.setattr(agent, "run", done.append)
    computer = Computer(TorchAccelerator(), "tpu", devices=4, nodes=1)
    command.start_ranks(options.parse(["r3gan-faces"])[0], computer, Path("runs"), [])
    assert done[0] == {"nproc_per_node": 4} and len(done) == 2
