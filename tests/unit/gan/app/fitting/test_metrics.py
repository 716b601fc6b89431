"""metrics.csv over interruptions, and the panels of its curves."""

import errno
import json
from pathlib import Path
from unittest import mock

import pytest

from gan.app.fitting import card, metrics
from gan.app.fitting.metrics import best_effort
from gan.app.run.folder import RunFolder
from gan.files.errors import UserError


def write(folder, rows):
    log = metrics.Record(folder)
    for step, row in rows:
        log.log_metrics({**row, "epoch": 0}, step - 1)  # as Lightning numbers it
    log.finalize("success")
    return log


def test_a_row_a_step_and_new_columns_keep_old_rows(tmp_path):
    folder = RunFolder(tmp_path)
    write(folder, [(0, {"d/loss": 1.5}), (10, {"d/loss": 1.25}), (10, {"val/score": 0.5}), (20, {"g/loss": -2.0})])
    assert folder.metrics.read_text() == ("step,d/loss,val/score,g/loss\n0,1.5,,\n10,1.25,0.5,\n20,,,-2\n")
    wanted = {0: {"d/loss": 1.5}, 10: {"d/loss": 1.25, "val/score": 0.5}, 20: {"g/loss": -2}}
    assert metrics.read(folder.metrics) == wanted


def test_a_resumed_run_continues_from_its_checkpoint_and_keeps_the_order_of_columns(tmp_path):
    folder = RunFolder(tmp_path)
    write(folder, [(0, {"x": 0}), (10, {"x": 1, "z": 1}), (20, {"y": 2}), (30, {"x": 5})])
    write(folder, [(20, {"a": 1}), (40, {"y": 3})])  # no row with y has stayed
    assert folder.metrics.read_text() == "step,x,z,y,a\n0,0,,,\n10,1,1,,\n20,,,,1\n40,,,3,\n"
    assert [*tmp_path.iterdir()] == [folder.metrics]


def test_rows_of_checkpoints_that_stay_are_kept_beside(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    write(folder, [(step, {"x": step}) for step in range(0, 50, 10)])
    folder.checkpoint(40).mkdir(parents=True)
    write(folder, [(20, {"y": 1})])
    assert [*metrics.read(folder.metrics)] == [0, 10, 20]
    assert [*metrics.read(tmp_path / "metrics-to-step-000040.csv")] == [0, 10, 20, 30, 40]
    assert "goes on from step 19; metrics-to-step-000040.csv keeps its later rows" in capsys.readouterr().out


def test_a_step_from_which_on_a_run_had_other_settings_is_marked(tmp_path):
    folder = RunFolder(tmp_path)
    noted = {"computer": "1 CPU process", "settings": "gamma 2", "settings until step 6": "gamma 1, kimg 2"}
    folder.trained.write_text(json.dumps(noted))
    assert card.old_settings(folder) == {6: "gamma 1, kimg 2"} and card.old_settings(RunFolder(tmp_path / "none")) == {}
    panels = metrics.panels({0: {"d/x": 1.0}, 9: {"d/x": 2.0}})
    both = card.old_settings(folder), {}
    marked, plain = (metrics.drawn(panels, "svg", "a run", changes=each).decode() for each in both)
    assert "until step 6 (dotted): gamma 1, kimg 2" in marked and "until" not in plain
    assert marked.count("stroke-dasharray") == plain.count("stroke-dasharray") + 1


def test_panels_are_the_phases_then_gradient_norms_then_scores():
    rows = {
        1: {"val/error": 1.0, "generator/encoder_grad_norm": 4.0, "generator/hinge": 2.0, "lr-G": 1e-3}
        | {"pictures": 32.0, "seconds": 5.0, "score/fid": 9.0, "score/recall": 0.5, "health/diversity": 0.1},
        0: {"generator/hinge": 3.0, "discriminator/hinge": 5.0},
    }
    panels = metrics.panels(rows)
    scores = ["distance from the true pictures", "precision and recall", "held-out scores"]
    assert list(panels) == ["discriminator", "generator", "learning rates", "gradient norms", "health", *scores]
    assert metrics.clock(rows) == (0.032, "0.032 kimg in 00:05")
    assert panels["learning rates"] == {"G": [(1, 1e-3)]}
    assert panels["generator"] == {"hinge": [(0, 3.0), (1, 2.0)]}
    assert panels["gradient norms"] == {"generator: encoder": [(1, 4.0)]}
    assert metrics.panels({}) == {} and metrics.clock({}) == (0, "")


def test_health_is_drawn_from_zero_to_one_with_the_ends_of_its_ranges():
    panel = {"augmented": [(0, 0.001)], "memorised": [(0, 0.5)]}
    drawn = metrics.drawn({"health": panel}, "svg").decode()
    assert "<!-- 1.0 -->" in drawn and "<!-- dashed: the ends of what is well -->" in drawn


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\n",
        b"time,x\n0,1\n",
        b"step,x\n0,1\n10,many\n",
        b"step,x\n0,1\nten,1\n",
        b"step,x\n0,1,2\n",
        b"step,x\n0\n10,1\n",
        b"step,x\n0," + b"1" * 200_000 + b"\n",
    ],
)
def test_a_damaged_file_is_named_and_a_resumed_run_puts_it_aside(content, tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(content)
    with pytest.raises(UserError, match=r"^'.*metrics.csv' is damaged \(.*\); remove it, or mend it$"):
        metrics.read(folder.metrics)
    write(folder, [(20, {"x": 3})])
    assert metrics.read(folder.metrics) == {20: {"x": 3}}
    assert (tmp_path / "metrics-damaged.csv").read_bytes() == content
    assert capsys.readouterr().err.count("warning: ") == 1


@pytest.mark.promise(
    "a damaged metrics.csv, another file's name in `samples/`, a folder that cannot be written",
    "one line, or left alone",
)
@pytest.mark.parametrize("content", ["", "st", "step,x\r\n", "step,x\r\n0,1\r\n10,2", "step,x\n\n0,1\n"])
def test_a_last_line_that_was_cut_off_is_left_out(content, tmp_path):
    (tmp_path / "metrics.csv").write_text(content, newline="")
    assert metrics.read(tmp_path / "metrics.csv") == ({0: {"x": 1}} if "0,1" in content else {})


def test_metrics_without_a_step_are_refused(tmp_path):
    """They would be a row that cannot be read again."""
    with pytest.raises(UserError, match=r"type self.logger.log_metrics\(metrics, step=self.step\)"):
        metrics.Record(RunFolder(tmp_path)).log_metrics({"x": 1})


@pytest.mark.promise("pictures, curves, metrics, settings that cannot be written; standard output that nobody reads")
def test_rows_that_could_not_be_written_are_when_there_is_room_again(tmp_path, monkeypatch, capsys):
    folder = RunFolder(tmp_path)
    log = metrics.Record(folder)
    log.log_metrics({"x": 0}, -1)
    log.log_metrics({"x": 1}, 0)
    before = folder.metrics.read_text()
    for step in (2, 3, 4):  # added to the file, and then all rows of it again
        with monkeypatch.context() as full:
            for method in ("open", "write_text"):
                full.setattr(Path, method, mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            log.log_metrics({"x": step}, step - 1)
        assert folder.metrics.read_text() == before
    assert capsys.readouterr().err.count(f"warning: {folder.metrics} cannot be written (No space left on dev") == 1
    log.finalize("success")
    assert metrics.read(folder.metrics) == {step: {"x": step} for step in range(5)}


def test_each_kind_of_file_that_cannot_be_written_is_said_once(capsys, tmp_path):
    for step in (1, 2):
        for place in ((tmp_path / f"{step}.png", "pictures"), (tmp_path / "curves.png",)):
            with best_effort(*place):
                raise OSError(errno.ENOSPC, "No space left on device", "x")
    words = "\nwarning: {} cannot be written (No space left on device: x); training goes on\n"
    assert capsys.readouterr().err == "".join(words.format(tmp_path / name) for name in ("1.png", "curves.png"))
