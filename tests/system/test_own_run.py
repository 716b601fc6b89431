"""A run in a person's own file through all commands: trained, resumed from another folder, exported, and moved."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from gan import evaluate as evaluate
from gan import export as export
from gan import fit as fit
from gan import sample as sample
from gan.app.run.reopen import open_run
from samples import gallery
from tests.support.parity import often
from tests.system.test_restarts import GAME


@pytest.fixture
def here(here):
    (here / "own_line.py").write_text(GAME)
    return here


def test_all_commands_take_it(here, monkeypatch, capsys):
    alone = ["--devices", "1", "--accelerator", "cpu", "--log-every", "1"]
    assert fit.main(["--run", "own_line.py:line", "--width", "5", "--max-steps", "4", *alone]) == 0
    assert "line on 1 CPU process, strategy ddp: 4 steps; a checkpoint every 1\n" in capsys.readouterr().out
    run = here / "runs" / "001-line"
    assert yaml.safe_load((run / "settings.yaml").read_text())["run"] == f"{here}/own_line.py:line"
    assert (run / "curves.png").is_file() and not (run / "samples").exists()

    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert fit.main(["--resume", str(run), "--max-steps", "6", *alone]) == 0
    assert (run / "checkpoints" / "step-000006.ckpt").is_dir()
    assert export.main([str(run)]) == 0
    assert (run / "export" / "step-000006" / "net.safetensors").is_file()
    capsys.readouterr()

    assert sample.main([str(run), "--seeds", "0-7"]) == 2
    assert "leave --seeds out, or derive the game from gan.games.from_noise.FromNoise" in capsys.readouterr().err
    for command, words in (
        (sample, "shows nothing: its game needs show(batch)"),
        (evaluate, "what Line makes is not known here; its scores of validation are in the run's metrics.csv"),
    ):
        assert command.main([str(run)] if command is sample else [str(run), "--devices", "1"]) == 2
        assert words in capsys.readouterr().err
    assert export.main([str(run), "--format", "torch"]) == 2
    assert "leave it out, or let show(batch) call the network" in capsys.readouterr().err

    # Its file moves, and `auto` is the newest run of the name that is typed.
    sys.modules.pop("own_line")
    Path(here / "own_line.py").rename(here / "moved_line.py")
    assert export.main([str(run)]) == 2
    assert f"there is no file {here}/own_line.py; " in capsys.readouterr().err
    assert export.main([str(run), "--run", "../moved_line.py:line"]) == 0
    assert export.main(["--out", str(here / "runs"), "--run", "../moved_line.py:line"]) == 2
    assert f"no run of {here}/moved_line.py:line with a checkpoint" in capsys.readouterr().err
    assert export.main(["--out", str(here / "runs"), "--run", "../own_line.py:line"]) == 2
    assert "there is no file" in capsys.readouterr().err


PAINTS = """
from functools import partial

import torch
from lightning import LightningDataModule
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from datasets import GlobalLoader
from gan import GanModule, Phase, Player
from gan.app.scoring.outputs import Made, makes
from gan.runs import Run

PICTURES = torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


class Paints(GanModule):
    def __init__(self):
        super().__init__()
        self.net = self.encoder = nn.Conv2d(3, 3, 1)  # not SEAN's encoder
        self.told = "nothing"

    def on_save_checkpoint(self, checkpoint):
        checkpoint["told"] = f"step {self.step}"

    def on_load_checkpoint(self, checkpoint):
        self.told = checkpoint["told"]

    def configure_players(self):
        yield Player("net", self.net, partial(SGD, lr=0.1))

    def configure_phases(self):
        yield Phase("learn", lambda x: (self.net(x) - x).square().mean(), learners="net")

    def show(self, batch):
        return {"real": batch, "made": self.net(batch)}


class OwnLoaders(Paints):
    def train_dataloader(self):
        return GlobalLoader(PICTURES[:16], batch_size=4)

    def val_dataloader(self):
        return GlobalLoader(PICTURES[16:], batch_size=4, training=False)


class NoneHeldOut(OwnLoaders):
    val_dataloader = GanModule.val_dataloader


class Plain(LightningDataModule):
    def setup(self, stage):
        self.pictures = PICTURES

    def train_dataloader(self):
        return DataLoader(self.pictures[:16], batch_size=4)

    def val_dataloader(self):
        return DataLoader(self.pictures[16:], batch_size=4)


@makes.register
def _paints(game: Paints, batch, numbers):
    return {"made": Made(game.net(batch), batch)}


def loaders(): return Run(OwnLoaders(), None, 4)
def module(): return Run(Paints(), Plain(), 4)
def unheld(): return Run(NoneHeldOut(), None, 4)
"""


@pytest.mark.parametrize("name", often(["loaders", "module", "unheld"], ["loaders"]))
def test_data_of_ones_own_are_held_out_like_others(name, here, capsys):
    (here / "own_line.py").write_text(PAINTS)
    alone = ["--devices", "1", "--accelerator", "cpu"]
    assert fit.main([f"own_line.py:{name}", *alone]) == 0
    run, held = here / "runs" / f"001-{name}", name != "unheld"
    assert len(list((run / "samples").glob("step-*.png"))) == (5 if held else 0)
    capsys.readouterr()
    assert sample.main([str(run)]) == 0
    assert (run / "samples" / "show.png").is_file()
    assert open_run(str(run)).run.game.told == "step 4"
    assert evaluate.main([str(run), *alone, "--scores", "rmse"]) == 0
    found = json.loads((run / "evaluation-step-000004.json").read_text())
    assert (found["pictures"], found["held_out"]) == ((8, 8) if held else (16, 0))
    said = capsys.readouterr().out
    assert said.count("nothing is held out: these are samples that it trains on") == (0 if held else 2)
    assert evaluate.main([str(run), "--devices", "2", "--accelerator", "cpu", "--scores", "rmse"]) == 0
    assert json.loads((run / "evaluation-step-000004.json").read_text())["scores"] == found["scores"]
    assert gallery.main([str(run)]) == 0
    assert "4 of 4 steps" in (run / "gallery.html").read_text()
