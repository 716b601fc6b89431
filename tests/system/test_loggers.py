"""`--logger`: what services are told, read back from their files without a network, and that a run goes on there."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from gan import fit
from gan.app.fitting import card, health, loggers, metrics
from gan.app.run.folder import RunFolder
from gan.app.run.reopen import open_run
from tests.support import commands, opening
from tests.support.parity import often

WANTED = ("score/feature_distance", "val/distance", "grid/filenames", "health/told_apart")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_SILENT", "WANDB_X_DISABLE_STATS", "WANDB_X_DISABLE_META", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


ALL, TENSORBOARD = "csv,tensorboard,wandb,mlflow", "csv,tensorboard"
FEWER = f"{ALL} then {TENSORBOARD}"


def names(run):
    known = json.loads((run / "trained.json").read_text())
    return {name: known[name] for name in ("tensorboard", "wandb", "mlflow") if name in known}


@pytest.fixture(scope="module", params=often([TENSORBOARD, ALL, FEWER], [TENSORBOARD]))
def run(request, tmp_path_factory):
    """Two steps on one device, whose health is measured, two more there, and two on two ranks with these loggers."""
    first, _, then = request.param.partition(" then ")
    with pytest.MonkeyPatch.context() as patch:
        offline.__wrapped__(patch)
        patch.setattr(health, "APART", 1)
        out = tmp_path_factory.mktemp("loggers") / "runs"
        made = opening.train(out, "r3gan-faces", logger=first, score_every=1, **opening.NARROW)
        before = names(made)
        assert list(before) == first.split(",")[1:]
        patch.undo()
        offline.__wrapped__(patch)
        assert fit.main(["--resume", str(made), "--max-steps", "4"]) == 0
        together = ("--devices", 2, "--sample-every", 1, "--logger", then or first, "--check", "false")
        ended = commands.run("gan.fit", "--resume", made, "--max-steps", 6, *together)
        assert ended.returncode == 0, ended.stderr
        assert names(made) == before
        return made


# Both packages start processes and databases, which takes longer than the training.
SERVICES = pytest.mark.parametrize(
    "run", [pytest.param(each, marks=pytest.mark.slow) for each in (ALL, FEWER)], indirect=True
)


@pytest.fixture
def steps(request):
    """The steps that Weights & Biases and MLflow know."""
    return 4 if FEWER in request.node.name else 6


def test_the_runs_own_metrics_are_as_ever(run):
    rows = metrics.read(run / "metrics.csv")
    assert list(rows) == [*range(7)] and {"score/feature_distance", "val/distance"} <= rows[0].keys()
    assert json.loads((run / "trained.json").read_text())["computer"].startswith("2 CPU processes, torch ")


def test_the_card_has_settings_that_a_resumed_run_has_changed(run, tmp_path):
    there, opened = RunFolder(tmp_path), open_run(str(run))
    known = card.facts(opened.folder, opened.run, 6, opened.settings)
    both = {f"settings until step {step}": f"max-steps {step}" for step in (2, 4)}
    alone, samples = f"1 CPU process, torch {torch.__version__}", f"{len(opened.run.data.train):,} to train on"
    told = {**both, "settings until step 4": f"max-steps 4, {alone}"}
    assert told.items() <= known.items() and card.run_notes(opened.folder)["samples"] == samples
    noted = {**both, "computer": "1 CPU", "samples": "9 to train on"}
    there.trained.write_text(json.dumps(noted))  # then it goes on from its checkpoint of step 3
    trainer = SimpleNamespace(
        is_global_zero=True, global_step=3, loggers=[], strategy=SimpleNamespace(root_device="cpu")
    )
    trainer.strategy, resumed = SimpleNamespace(root_device="cpu"), SimpleNamespace(changed=[])
    loggers.Track(there, opened.run, "1 CPU", None, {}, resumed).on_train_start(trainer, None)
    kept = {name: each for name, each in card.run_notes(there).items() if name.startswith(card.UNTIL)}
    assert kept == {"settings until step 2": "max-steps 2", "settings until step 3": "max-steps 4"}
    trainer.global_step = 5  # then with other samples, as with --new-data
    noted = card.run_notes(there) | {"samples": "9 to train on"}
    there.trained.write_text(json.dumps(noted))
    loggers.Track(there, opened.run, "1 CPU", None, {}, resumed).on_train_start(trainer, None)
    assert card.run_notes(there)["settings until step 5"] == "9 to train on"


def test_tensorboard_has_scalars_pictures_settings_and_the_card(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), {"images": 0, "scalars": 0, "tensors": 0}).Reload()
    scores = [each.step for each in events.Scalars("score/feature_distance")]
    assert scores == [*range(7)]
    assert [each.step for each in events.Scalars("health/told_apart")] == [1, 2]
    assert {each.step for each in events.Images("grid")} == {*range(7)} and len(events.Images("reals")) == 1
    assert b"2 CPU processes" in events.Tensors("card/text_summary")[-1].tensor_proto.string_val[0]
    assert b"| strategy | ddp |" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


BLOCK, HEADER = 32768, 7  # bytes; a header is a checksum, a length and the kind of a piece: 1 whole, 4 the last


def records(path):
    """The records of what Weights & Biases writes without a connection: of protobuf, in the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


@SERVICES
def test_wandb_goes_on_under_the_same_name(run, steps):
    said = names(run)["wandb"]
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == steps // 2  # the first rank's, of each of the trainings
    for number, file in enumerate(files):
        found = list(records(file))
        named = [each.run for each in found if each.HasField("run")]
        assert {each.run_id for each in named} == {said} and {each.project for each in named} == {"gan"}
        assert f"# {run.name}, step {2 + 2 * number}" in named[-1].notes
        logged = [
            {item.key or "/".join(item.nested_key): item.value_json for item in each.history.item} for each in found
        ]
        seen = {name: {int(row["trainer/global_step"]) for row in logged if name in row} for name in WANTED}
        ours, untrained = {2 * number + 1, 2 * number + 2}, set() if number else {0}
        assert any("generator/relativistic" in row for row in logged)
        assert seen == {**dict.fromkeys(WANTED, ours | untrained), "health/told_apart": ours if number == 0 else set()}
        config = {update.key for each in found for update in (*each.run.config.update, *each.config.update)}
        assert {"batch_size", "strategy", "run"} <= config
    assert len(list(run.glob("wandb/offline-run-*/files/media/images/grid_*.png"))) >= steps


@SERVICES
def test_mlflow_goes_on_under_the_same_name(run, steps):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent}/mlflow/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("gan").experiment_id])
    assert found.info.run_id == names(run)["mlflow"]
    assert found.info.status == "FINISHED" and found.info.run_name == run.name
    for name, wanted in {"score/feature_distance": [*range(steps + 1)], "health/told_apart": [1, 2]}.items():
        assert sorted(each.step for each in client.get_metric_history(found.info.run_id, name)) == wanted
    assert found.data.params["max_steps"] == "2"  # as it began; MLflow refuses to change one
    assert f"# {run.name}, step {steps}" in found.data.tags["mlflow.note.content"]
    pictures = {Path(each.path).name.split("+")[0] for each in client.list_artifacts(found.info.run_id, "images")}
    assert pictures == {"grid", "reals"}


def test_a_package_that_is_not_here_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == "mlflow" else object())
    assert fit.main(["--logger", "wandb, mlflow", "--out", str(tmp_path), "--devices", "1"]) == 2
    assert "--logger mlflow needs its package: pip install '.[mlflow]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_service_that_fails_later_ends_nothing_and_is_said_once(monkeypatch, capsys, tmp_path):
    def fail(*_, **__):
        raise ConnectionError("the line is dead")

    monkeypatch.setattr(loggers.TensorBoardLogger, "log_metrics", fail)
    monkeypatch.setattr(loggers.TensorBoard, "picture", fail)
    run = opening.train(tmp_path, "r3gan-faces", logger="tensorboard", **opening.NARROW)
    assert list(metrics.read(run / "metrics.csv")) == [0, 1, 2]
    said = "warning: --logger tensorboard has failed (the line is dead); training goes on"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_service_that_cannot_begin_is_an_error(real, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://there")
    if not real:  # which takes longer to import than all the rest
        monkeypatch.setattr(loggers.MLFlowLogger, "__init__", mock.Mock(side_effect=ValueError("nonsense")))
    typed = ["r3gan-faces", "--devices", "1", "--out", str(tmp_path / "runs"), *opening.typed(opening.NARROW)]
    assert fit.main([*typed, "--logger", "mlflow", "--max-steps", "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("--logger mlflow cannot begin: ") == 1 and "MLFLOW_TRACKING_URI" in said
    assert not list((tmp_path / "runs").glob("0*"))
