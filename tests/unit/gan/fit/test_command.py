"""What the command decides about a run before it trains."""

import pytest

from gan.errors import UserError
from gan.fit import options
from gan.fit.command import keeper
from gan.fit.folder import RunFolder
from gan.runs import Run


def test_the_best_are_kept_by_the_runs_first_score_among_validated_steps(tmp_path):
    run = Run(None, None, 100, {"val/error": "error", "val/other": "another"})

    def keep(*typed, run=run):
        return keeper(options.parse(["r3gan-faces", *typed])[0], run, RunFolder(tmp_path), 20)

    assert (keep().newest, keep().best) == (2, None)
    for typed in ((), ("--save-every", "10"), ("--save-every", "40")):
        made = keep("--keep", "1", "--keep-best", "3", *typed)
        assert (made.newest, made.count, made.best.score) == (1, 3, "val/error")
    with pytest.raises(
        UserError, match=r"^--keep-best 1 needs .* are 20, 40, .*--save-every 30 .*; type --save-every 20"
    ):
        keep("--keep-best", "1", "--save-every", "30")
    with pytest.raises(UserError, match=r"^--keep-best 1: this run has no scores"):
        keep("--keep-best", "1", run=Run(None, None, 100))
