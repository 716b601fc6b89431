"""One rank's disk is full: all ranks train on together, and save again together."""

import pytest

from gan.app.run.folder import RunFolder
from gan.files.errors import UserError
from tests.unit.gan.app.training.test_keep import Full, kept_when_full


def full_on_one_rank(folder, in_background, *steps):
    keep, ended = kept_when_full(folder, Full(*steps, ranks=[1]), in_background, steps=6, ranks=2)
    try:
        keep.refuse_if_not_saved(True)
    except UserError as error:
        return ended, keep.wrote, str(error)
    return ended, keep.wrote, ""


@pytest.mark.promise("a rank cannot write its part of a checkpoint: its disk is full")
@pytest.mark.parametrize("in_background", [True, False])
def test_all_ranks_train_on_and_the_next_save_is_whole(in_background, ranks, tmp_path):
    assert ranks(2).run(full_on_one_rank, tmp_path, in_background, 4) == [(6, [2, 6], "")] * 2
    assert RunFolder(tmp_path).steps() == [2, 6]


def test_all_ranks_say_that_the_last_one_was_not_saved(ranks, tmp_path):
    found = ranks(2).run(full_on_one_rank, tmp_path, True, 6)
    assert [each[:2] for each in found] == [(6, [2, 4])] * 2
    for *_, said in found:
        assert "the last checkpoint was not saved, and the newest one is" in said
        assert "step-000006.ckpt: rank 1: No space left on device" in said
    assert RunFolder(tmp_path).steps() == [2, 4]
