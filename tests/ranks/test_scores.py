"""Scores and health while a game trains: the same figures at every number of ranks, and they change no training."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from gan.app.fitting import health, metrics, scores
from gan.app.fitting.health import Health
from gan.app.fitting.keep import Keep
from gan.app.fitting.scores import Scores
from gan.app.run.folder import RunFolder
from gan.app.scoring import features
from gan.app.scoring.scorer import Scorer
from gan.runs import build
from strategies import PhaseStrategy
from tests.support.parity import distance, often, snapshot, trainer

STEPS = 2


def trained(folder: str, policy: str, world: int = 1, measured: bool = True, count: int = 21):
    """What a training has made, and the rows of its metrics.csv."""
    Path(folder).mkdir(exist_ok=True)
    where, run = RunFolder(Path(folder)), build("biggan-faces", faces=24, held_out=12, batch_size=8, size=16, width=2)
    log, keep = metrics.Record(where), Keep(where, STEPS, best=1, score="score/feature_distance")
    scorer = Scorer(scores.SCORES, extractor=features.always())
    scored = Scores(where, run, scorer, 2, keep, count)
    health = Health(STEPS)
    health.every = 2
    strategy = PhaseStrategy(policy, check=False)
    beside = {"callbacks": [health, keep, scored], "logger": [log]} if measured else {}
    # Batches of 8 pictures, some of which only one rank has.
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"), mock.patch.object(scores, "PIXELS", 8 * 16**2):
        trainer(strategy, world, STEPS, num_sanity_val_steps=0, log_every_n_steps=1, **beside).fit(run.game, run.data)
    return snapshot(run.game, strategy), log.rows


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one device has made, its rows and its folder; and how many true pictures have been looked at."""
    folder = tmp_path_factory.mktemp("alone")
    with mock.patch.object(features.Known, "of", side_effect=features.Known.of) as counted:
        return *trained(str(folder), "single"), folder, [len(call.args[0]) for call in counted.call_args_list]


def test_measured_on_one_device_it_trains_the_same_and_knows_its_best_checkpoint(alone, tmp_path):
    made, rows, folder, looked_at = alone
    assert distance(trained(str(tmp_path), "single", measured=False)[0], made) == 0
    assert sorted(step for step in rows if "score/precision" in rows[step]) == [0, 2]
    assert looked_at == [24, 21, 21]  # the true pictures once
    assert json.loads((folder / "best.json").read_text()) == {
        "score": "score/feature_distance",
        "steps": {"2": pytest.approx(rows[2]["score/feature_distance"], rel=1e-12)},
    }


@pytest.mark.parametrize("policy", often(["ddp", "zero3", "zero2", "fsdp", "zero1"], ["zero3"]))
def test_scores_and_health_are_the_same_on_two_ranks_and_change_no_training(policy, alone, ranks, tmp_path):
    made, rows, *_ = alone
    (found, again), *_ = ranks(2).run(trained, str(tmp_path / "two"), policy, 2)
    assert distance(found, made) < 1e-10
    measured = [name for name in rows[STEPS] if name.startswith(("score/", "health/"))]
    assert len(measured) == 5 + len(health.RANGES)
    for step, row in rows.items():
        for name in set(measured) & row.keys():
            assert again[step][name] == pytest.approx(row[name], rel=1e-5, abs=1e-9), (step, name)
