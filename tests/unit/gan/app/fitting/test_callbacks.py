"""The callbacks of `gan.fit` by themselves, under a Trainer of one's own."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning import LightningDataModule
from PIL import Image
from torch.optim import Adam
from torch.utils.data import DataLoader

from gan.app.fitting.callbacks import Pictures, Rates, Score, write_lost_settings, write_settings
from gan.app.fitting.metrics import Record
from gan.app.run.folder import RunFolder
from strategies import PhaseStrategy
from tests.support.hard_games import Plain
from tests.support.parity import distance, parts, snapshot, trainer, vectors
from tests.support.posix import not_on_windows


class Show(Plain):
    """Draws from the global random state, in training and for its pictures, and minds its modes."""

    modes: list

    def fake(self, real):
        self.modes.append((self.generator.training, self.discriminator.training))
        return self.generator(torch.randn(len(real), 4, dtype=real.dtype))

    def show(self, batch):
        assert not self.generator.training
        assert not torch.is_grad_enabled()
        made = self.generator(torch.randn(len(batch["x"]), 4, dtype=torch.float64))
        return {"made": made[:, None, None].repeat(1, 3, 6, 1)}


FIRST = SimpleNamespace(is_global_zero=True, global_step=0)


@pytest.mark.parametrize(
    ("first", "said"), [(True, "names val/eror as a score, and validation has logged val/error;"), (False, "")]
)
def test_a_score_that_validation_does_not_log_is_named_at_the_start(first, said, capsys):
    here = SimpleNamespace(is_global_zero=first, sanity_checking=True, callback_metrics={"val/error": torch.ones(())})
    Score(["val/eror"]).on_validation_end(here, None)
    assert said in (heard := capsys.readouterr().err) and bool(said) == bool(heard)


class Data(LightningDataModule):
    def train_dataloader(self):
        return parts(4)

    def val_dataloader(self):
        return DataLoader([{**vectors(9), "image": torch.zeros(16, 3, 4, 4)}], batch_size=None)


def shown(callbacks):
    torch.manual_seed(5)
    game, strategy = Show(), PhaseStrategy("single")
    game.modes = []
    game.discriminator.eval()
    trainer(strategy, 1, 4, callbacks=callbacks).fit(game, datamodule=Data())
    return snapshot(game, strategy), game.modes


def test_a_game_without_held_out_samples_says_that_it_has_no_grids(tmp_path, capsys):
    callback, game = Pictures(RunFolder(tmp_path), Record(RunFolder(tmp_path)), 1), Show()
    callback.choose(FIRST, game, game)
    assert capsys.readouterr().out == "no grids: they show held-out samples, and there are none\n"
    callback.choose(SimpleNamespace(global_step=0, is_global_zero=False), game, Data())
    assert not capsys.readouterr().out


@pytest.fixture(scope="module")
def plain():
    """A training without pictures."""
    return shown([])


@pytest.mark.promise(
    "pictures, curves, metrics, settings that cannot be written; standard output that nobody reads",
    "one warning; training goes on",
)
@pytest.mark.parametrize("spoil", ["samples", "curves", None])
def test_pictures_are_drawn_and_disturb_nothing_or_are_left_out_and_that_is_said_once(
    spoil, plain, tmp_path, capsys, curves
):
    folder = RunFolder(tmp_path)
    if spoil == "samples":
        folder.samples.write_text("a file")
    else:
        folder.samples.mkdir()
    if spoil == "curves":
        folder.curves.mkdir()
    log = Record(folder)
    log.rows = {0: {"d/x": 1.0}}
    drawn, modes = shown([Pictures(folder, log, every=3)])
    assert distance(plain[0], drawn) == 0 and modes == plain[1] == [(True, False)] * 8
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == (spoil is not None)
    assert all(line.endswith("; training goes on") and str(getattr(folder, spoil)) in line for line in said)
    if spoil != "curves":
        with Image.open(folder.curves) as image:
            assert len(image.getcolors(1 << 24)) > 20
    wanted = ["reals.png", "step-000000.png", "step-000003.png", "step-000004.png"]
    assert spoil == "samples" or sorted(path.name for path in folder.samples.iterdir()) == wanted


class TwoGroups(Plain):
    def configure_players(self):
        generator, discriminator = super().configure_players()
        first, last = (list(layer.parameters()) for layer in (self.discriminator[0], self.discriminator[-1]))
        groups = partial(Adam, [{"params": first}, {"params": last, "lr": 1e-3, "name": "last"}], lr=2e-2)
        yield from (generator, replace(discriminator, optimizer=lambda _: groups()))


@pytest.mark.parametrize(
    ("game", "rates"),
    [(Plain, {"lr-discriminator": 0.02}), (TwoGroups, {"lr-discriminator/pg1": 0.02, "lr-discriminator/last": 0.001})],
)
def test_learning_rates_have_the_names_of_players_with_and_without_a_schedule(game, rates, tmp_path):
    log = Record(RunFolder(tmp_path))
    trainer(PhaseStrategy("single", check=False), 1, 2, callbacks=[Rates()], logger=log, log_every_n_steps=1).fit(
        game(), parts(2)
    )
    found = [{name: value for name, value in row.items() if name.startswith("lr-")} for row in log.rows.values()]
    assert found == [{"lr-generator": 0.01, **rates}, {"lr-generator": pytest.approx(0.009), **rates}]


def test_a_folder_that_is_removed_while_its_run_trains_gets_its_settings_again(tmp_path, capsys):
    texts = {tmp_path / "runs" / "settings.yaml": "new", tmp_path / "runs" / "game.txt": "players"}
    for _ in range(2):  # at two saves
        write_lost_settings(texts, FIRST, None, {})
        assert all(path.read_text() == text for path, text in texts.items())
    assert capsys.readouterr().err.count(f"warning: '{tmp_path / 'runs'}' is not there any more") == 1


@not_on_windows
def test_settings_that_cannot_be_written_are_said_and_the_others_are_written(tmp_path, capsys):
    settings, game = tmp_path / "settings.yaml", tmp_path / "game.txt"
    game.mkdir()
    write_settings({game: "players", settings: "new"}, FIRST, None)
    assert settings.read_text() == "new"
    assert re.search(r"warning: .*game.txt cannot be written \(Is a directory: .*\); training", capsys.readouterr().err)
