"""Ranks that are killed: the others end and name them, the last whole checkpoint loads, and nothing is lost."""

import re

import pytest

from tests.support.crashes import FIVE, assert_named, made, newest, train
from tests.support.parity import EXACT, distance

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What one process makes, whom nobody kills."""
    folder = tmp_path_factory.mktemp("unbroken")
    ended = train(folder, 1, *FIVE, "--strategy", "single")
    assert ended.statuses == [0], ended.said
    return made(folder)


@pytest.mark.promise(
    "a rank is killed in training, while it writes, or anywhere",
    "the others end within 30 s and name it; the newest whole checkpoint is there, and the run goes on from it "
    "as if it had not been",
)
def test_the_others_of_a_killed_rank_end_by_its_name_and_the_run_goes_on(unbroken, tmp_path):
    """Wherever it is killed: tests/matrix/test_crashes.py."""
    ended = train(tmp_path, 2, *FIVE, "--strategy", "zero3", victim=1, itself="collective")
    assert_named(ended, 1)
    speaker = ended.said[0]
    assert re.search(r"go on from the last whole checkpoint with\n  python -m gan.fit --resume runs/001-wgan", speaker)
    saved = newest(tmp_path)
    assert saved.is_relative_to(tmp_path / "runs" / "001-wgan-gp-faces")
    again = train(tmp_path, 1, *FIVE, "--strategy", "single")
    assert again.statuses == [0], again.said
    assert f"from {saved.relative_to(tmp_path)}" in again.said[0]
    assert distance(made(tmp_path), unbroken) <= EXACT


@pytest.mark.promise("a rank is killed before the ranks are connected", "the others end and name it")
@pytest.mark.slow
def test_a_rank_that_is_killed_before_the_ranks_are_connected_is_named(tmp_path):
    assert_named(train(tmp_path, 2, *FIVE, "--strategy", "ddp", victim=1, itself="connects"), 1)


@pytest.mark.slow
def test_an_error_on_one_rank_comes_after_what_all_are_saving(tmp_path):
    settings = "--max-steps", "9", "--save-every", "2", "--check", "false", "--strategy", "ddp"
    ended = train(tmp_path, 2, *settings, victim=1, itself="error while it writes", patient=False)
    assert ended.statuses == [2, 1], ended.said
    assert newest(tmp_path).name == "step-000002.ckpt"
    again = train(tmp_path, 2, *settings)
    assert again.statuses == [0, 0] and "step-000002.ckpt" in again.said[0], again.said
