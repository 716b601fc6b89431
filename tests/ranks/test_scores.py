"""Scores and health while a game trains: the same figures at every number of ranks, and they change no training."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from gan.app.run.folder import RunFolder
from gan.app.scoring import distances, features
from gan.app.scoring.scorer import Scorer
from gan.app.training import health, metrics, scores
from gan.app.training.health import Health
from gan.app.training.keep import Keep
from gan.app.training.scores import Scores
from strategies import PhaseStrategy
from tests.support import labelled
from tests.support.parity import distance, often, snapshot, trainer

STEPS = 4


def trained(folder: str, policy: str, world: int = 1, measured: bool = True, count: int = 37):
    """What a training has made, and the rows of its metrics.csv."""
    Path(folder).mkdir(exist_ok=True)
    where, run = RunFolder(Path(folder)), labelled.run()
    log, keep = metrics.Record(where), Keep(where, STEPS, best=1, score="score/feature_distance")
    scorer = Scorer(scores.SCORES, extractor=features.always())
    scored = Scores(where, run, scorer, 2, keep, count)
    health = Health(STEPS)
    health.every = 1
    strategy = PhaseStrategy(policy, check=False)
    beside = {"callbacks": [health, keep, scored], "logger": [log]} if measured else {}
    # Batches of 8 pictures, some of which only one rank has.
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"), mock.patch.object(scores, "PIXELS", 8 * 16):
        trainer(strategy, world, STEPS, num_sanity_val_steps=0, log_every_n_steps=1, **beside).fit(run.game, run.data)
    return snapshot(run.game, strategy), log.rows


@pytest.mark.parametrize("policy", often(["ddp", "zero3", "zero2", "fsdp", "zero1"], ["zero3"]))
def test_scores_and_health_are_the_same_on_two_ranks_and_change_no_training(policy, ranks, tmp_path):
    (plain, _), (made, rows) = trained(str(tmp_path / "0"), "single", measured=False), trained(str(tmp_path), "single")
    assert distance(plain, made) == 0
    (found, again), *_ = ranks(2).run(trained, str(tmp_path / "two"), policy, 2)
    assert distance(found, made) < 1e-10
    measured = [name for name in rows[STEPS - 1] if name.startswith(("score/", "health/"))]
    assert len(measured) == 4 + len(health.RANGES)
    for step, row in rows.items():
        for name in set(measured) & row.keys():
            assert again[step][name] == pytest.approx(row[name], rel=1e-5, abs=1e-9), (step, name)
    assert sorted(step for step in rows if "score/precision" in rows[step]) == [0, 1, 3]


def test_what_is_known_of_the_true_pictures_is_computed_once(tmp_path):
    with mock.patch.object(distances.Known, "of", side_effect=distances.Known.of) as counted:
        trained(str(tmp_path), "single")
    assert [len(call.args[0]) for call in counted.call_args_list] == [40, 37, 37, 37]


def test_the_checkpoint_of_the_best_score_is_known(tmp_path):
    _, rows = trained(str(tmp_path), "single")
    found = json.loads((tmp_path / "best.json").read_text())
    assert found == {
        "score": "score/feature_distance",
        "steps": {"4": pytest.approx(rows[3]["score/feature_distance"], rel=1e-12)},
    }
