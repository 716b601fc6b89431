"""Scores are written as a whole, or it is said why not."""

import json

import pytest

from gan.evaluate import save
from gan.files.errors import UserError
from tests.support.posix import not_on_windows


def test_what_json_has_no_number_for_is_text(tmp_path):
    save({"a": {"b": float("inf"), 1: [2.5, None]}}, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": {"b": "inf", "1": [2.5, None]}}


@pytest.mark.promise("the scores of `gan.evaluate` cannot be written", "they are printed first, and one line says why")
@not_on_windows
def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "file" / "a.json"):
        with pytest.raises(UserError, match=f"cannot write '{path}': .* directory; the scores are in the table"):
            save({}, path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
