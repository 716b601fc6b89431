"""`python -m gan.env`: what a report of a problem needs."""

import pytest
import torch

from gan.app.run import options
from gan.env import main


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "001-r3gan-faces"
    (folder / "checkpoints/step-000020.ckpt").mkdir(parents=True)
    settings = options.parse(["r3gan-faces", "--batch-size", "12"])[0]
    (folder / "settings.yaml").write_text(options.dump(settings, settings.run))
    return folder


def test_it_names_versions_devices_and_what_the_run_was_trained_with(run, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([str(run)]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["torch", torch.__version__] in said and ["OMP_NUM_THREADS", "1"] in said
    assert ["batch_size:", "12"] in said and [f"{run},", "step-000020.ckpt"] in said


def test_without_a_run_it_says_so(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 0
    assert "no run with a checkpoint" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err
