import os

import pytest

from gan.files.errors import UserError
from strategies.processes.agent import NEVER, Progress


def test_the_agent_reads_the_step_of_each_rank(tmp_path, monkeypatch):
    monkeypatch.setenv(Progress.VARIABLE, str(tmp_path / "steps"))
    Progress.clear(3)
    assert Progress.read(3) == [NEVER] * 3
    for rank, steps in ((0, (0, 1, 2)), (2, (0, 1, 70_000_000_000))):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        progress = Progress()
        for step in steps:
            progress.begin(step)
    assert Progress.read(3) == [2, NEVER, 70_000_000_000]
    Progress.clear(3)
    assert Progress.read(3) == [NEVER] * 3


def test_without_an_agent_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(Progress.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    Progress().begin(3)
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv(Progress.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=f"GAN_STEPS is '{tmp_path}', which cannot be written to .*; unset it"):
        Progress()


def test_a_file_that_is_gone_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(Progress.VARIABLE, str(tmp_path / "gone"))
    Progress().begin(3)
    assert not os.listdir(tmp_path)
