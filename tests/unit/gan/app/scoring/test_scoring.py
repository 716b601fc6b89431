"""Which samples are scored, each picture once; and the file of scores."""

import json
from collections import Counter

import pytest
import torch

from datasets.files.sides import UnpairedSides
from gan.app.scoring import scoring
from gan.app.scoring.features import Known, always, as_bytes, distances
from gan.app.scoring.outputs import Made, _translated
from gan.app.scoring.scorer import Scorer
from gan.evaluate import save
from gan.files.errors import UserError
from strategies.world import World
from tests.support.posix import not_on_windows


def scored_classes(count, batch_size=8, ranks=1):
    """The classes of the samples that each rank scores, of three folders of 40 pictures."""
    samples = [{"class": number // 40} for number in range(120)]
    worlds = [World(ranks, rank) for rank in range(ranks)]
    turns = [list(scoring.turns_of(samples, count, batch_size, world, 0)) for world in worlds]
    return [
        kind
        for together in zip(*turns, strict=True)
        for _, batch, spare in together
        if not spare
        for kind in batch["class"].tolist()
    ]


def test_a_few_samples_of_class_folders_are_of_all_classes_and_always_the_same():
    few = scored_classes(30)
    assert sorted(Counter(few)) == [0, 1, 2] and min(Counter(few).values()) > 5
    assert Counter(scored_classes(120)) == {0: 40, 1: 40, 2: 40}
    assert few == scored_classes(30, batch_size=4) == scored_classes(30, ranks=3) == scored_classes(120)[:30]


class Side(list):
    size, channels = (8, 8), 3

    def __init__(self, count):
        super().__init__({"image": torch.rand(3, 8, 8) * 2 - 1} for _ in range(count))
        self.pictures = self


def test_of_two_sides_of_unequal_size_each_picture_is_scored_once(monkeypatch):
    torch.manual_seed(0)
    a, b = Side(20), Side(5)
    scorer = Scorer(("features", "precision", "recall"), extractor=always())
    both = {"a to b": ("a", "b"), "b to a": ("b", "a")}

    def makes(_, batch, numbers) -> dict[str, Made]:
        return {title: _translated(batch[one] * 0.9, batch, one, other) for title, (one, other) in both.items()}

    def features(side, strength):
        return Known.of(scorer.extractor.network(as_bytes(torch.stack([each["image"] for each in side]) * strength)))

    monkeypatch.setattr(scoring, "makes", makes)
    turns = scoring.turns_of(UnpairedSides(a, b), 20, 3, World(), 0)
    found = scoring.Scoring(None, scorer, lambda batch: batch, World()).rows(turns, 20)
    for title, one, other in (("a to b", a, b), ("b to a", b, a)):
        wanted = distances(features(one, 0.9), features(other, 1.0), scorer.scores, scorer.extractor.names)
        figures = scorer.figures(*found[title])
        for name in ("precision", "recall", "feature_distance"):
            assert figures[name] == pytest.approx(wanted[name], rel=1e-6)
        assert figures["kernel_distance"] == pytest.approx(wanted["kernel_distance"], rel=0.2)  # of random subsets


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
