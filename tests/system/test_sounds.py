"""A run that makes sounds: its files, and every command on it."""

import io
import json
import re
import wave
from base64 import b64decode

import pytest
import torch
from PIL import Image

from gan import evaluate as evaluate
from gan import sample as sample
from gan.app.fitting import metrics
from gan.app.page import run_tables
from gan.app.run.reopen import open_run
from gan.app.sampling import grids
from gan.sound import PAUSE
from samples import gallery
from tests.support import opening

SECONDS, HELD_OUT = 1.6, 2  # long enough for wide spectrograms


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    sizes = dict(width=16, bands=8, segment=512, clips=6, held_out=HELD_OUT, seconds=SECONDS)
    return opening.train(tmp_path_factory.mktemp("sounds") / "runs", "hifigan-tones", **sizes)


def heard(data: bytes) -> float:
    """The seconds of a WAV file."""
    with wave.open(io.BytesIO(data)) as file:
        assert file.getframerate() == 8000
        return file.getnframes() / file.getframerate()


def test_training_draws_spectrograms_and_writes_the_sounds(run):
    names = sorted(path.name for path in (run / "samples").iterdir())
    steps = [f"step-00000{step}{kind}" for step in (0, 1, 2) for kind in ("-generated.wav", "-real.wav", ".png")]
    assert names == steps
    together = HELD_OUT * (SECONDS + PAUSE) - PAUSE
    for path in (run / "samples").glob("*.wav"):
        assert heard(path.read_bytes()) == pytest.approx(together, abs=0.01)
    with Image.open(run / "samples" / "step-000002.png") as sheet:
        assert sheet.height > 2 * HELD_OUT * 80 > sheet.width  # real and generated stand below each other


def test_sample_writes_a_grid_and_the_sounds(run, tmp_path, capsys):
    grid = tmp_path / "mine.png"
    assert sample.main([str(run), "--count", "2", "--singles", "-o", str(grid)]) == 0
    files = [grid, tmp_path / "mine-real.wav", tmp_path / "mine-generated.wav", tmp_path / "mine"]
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {path}" for path in files]
    assert heard(files[1].read_bytes()) == pytest.approx(2 * SECONDS + PAUSE, abs=0.01)
    singles = sorted(path.name for path in (tmp_path / "mine").iterdir())
    assert singles == ["0-generated.png", "0-generated.wav", "1-generated.png", "1-generated.wav"]
    assert heard((tmp_path / "mine" / "1-generated.wav").read_bytes()) == pytest.approx(SECONDS, abs=0.01)


def test_evaluate_gives_the_score_of_training(run, capsys):
    assert evaluate.main([str(run), "--devices", "1"]) == 0
    assert "error of log mel spectrograms" in capsys.readouterr().out
    found = json.loads((run / "evaluation-step-000002.json").read_text())["scores"]["sounds"]
    assert found.keys() == {"mel_error", "spectral_error"}
    opened = open_run(str(run))
    assert opened.run.scores.keys() <= metrics.read(run / "metrics.csv")[2].keys()
    batch = {"wave": torch.stack([item["wave"] for item in (opened.run.data.val[k] for k in range(HELD_OUT))])}
    expected = opened.run.game.mel_error(opened.run.game.voice(batch), batch["wave"])
    assert found["mel_error"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_page_plays_the_sounds_and_the_tables_speak_of_them(run):
    assert gallery.main([str(run)]) == 0
    text = (run / "gallery.html").read_text()
    played = re.findall(r'<audio controls src="data:audio/wav;base64,([^"]+)" title="([^"]+)">', text)
    titles = [f"{kind}, sound {number}" for kind in ("real", "generated") for number in range(HELD_OUT)]
    assert [title for _, title in played] == titles
    assert all(heard(b64decode(data)) == pytest.approx(SECONDS, abs=0.01) for data, _ in played)
    links = re.findall(r'<section id="(\w+)">', text)
    assert links == ["training", "sounds", "scores", "curves", "run"]
    opened = open_run(str(run))
    known = {row.title: row.cells[0].words for row in run_tables.facts(opened).rows}
    assert known["sounds"] == "6 to train on, 2 held out, 1.6 seconds at 8,000 Hz"
    assert known["trained"] == "2 of 2 steps, 4 sounds a step"
    assert "generator" in known["parameters"]
    moments = run_tables.over_time(opened)
    assert list(moments.moments) == ["step 0", "step 1", "step 2"] and list(moments.columns) == ["sound 0", "sound 1"]
    assert [(row.title, len(row.cells[0].pictures)) for row in moments.rows] == [("real", 1), ("generated", 3)]
    real, made = run_tables.sounds(opened).rows
    for then, now in zip(moments.rows[0].cells + moments.rows[1].cells, [*real.cells, *made.cells], strict=True):
        assert then.pictures[-1].tobytes() == now.pictures[0].tobytes()
    assert run_tables.nearest(opened).note == run_tables.NO_PICTURES
    batch = run_tables.held_out(opened, 2)
    assert list(run_tables.made_by(opened, batch)) == ["generated"]
    assert not any(sounds.samples.requires_grad for sounds in opened.run.game.show(batch).values())
    assert list(grids.made({"real": batch["wave"], "copy": batch["wave"].clone()}, batch)) == ["copy"]
