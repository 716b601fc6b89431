"""What the guides say is so: programs run, commands are read, and quotes are quotes."""

import re
from functools import partial

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.utils.data import DataLoader

import gan
from gan import GanModule
from gan.runs import build
from tests.support.guides import ROOT, guides

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def reader():
    with guides.reader() as folder:
        yield folder


def test_the_gan_in_full_trains_as_it_stands(here):
    (program,) = guides.blocks((ROOT / "docs/guide/game.md").read_text(), "python")
    exec(program.replace("max_steps=100", "max_steps=3"), names := {"__name__": "__main__"})
    assert names["trainer"].global_step == 3


class Networks(GanModule):
    """What the game in the README derives from."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.G, self.D = nn.Linear(4, 2).double(), nn.Linear(2, 1).double()


def test_the_two_columns_of_the_readme_give_the_same_weights(monkeypatch):
    monkeypatch.setattr(gan, "GanModule", Networks)  # which the right column imports
    by_hand, game = guides.blocks(README, "py")
    batches = [(torch.randn(8, 2).double(), torch.randn(8, 4).double()) for _ in range(4)]
    loader = DataLoader(batches, batch_size=None)
    before, hand = Networks(), Networks()
    optimizers = {f"{name}_optimizer": Adam(getattr(hand, name.upper()).parameters(), lr=1e-3) for name in "gd"}
    exec(by_hand, {"G": hand.G, "D": hand.D, "loader": loader, "softplus": softplus, **optimizers})
    exec(game, names := {"partial": partial, "Adam": Adam, "softplus": softplus})
    played = names["Game"]()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "precision": "64-true"}
    trainer = Trainer(strategy=names["PhaseStrategy"]("ddp"), accelerator="cpu", devices=1, max_epochs=1, **quiet)
    trainer.fit(played, loader)
    for one, other, start in zip(hand.parameters(), played.parameters(), before.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-12 < (one - start).abs().max()


@pytest.mark.parametrize("page", guides.GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fragments_compile_and_commands_are_read(page, reader):
    guides.check_fragments(page)
    for words in guides.commands(page.read_text()):
        guides.check_command(words)


def test_the_control_a_wrong_command_is_refused_and_its_own_run_is_one(reader):
    ((*words,),) = guides.commands("```sh\npython -m gan.fit --strategy zero3 --btch-size 3   # so many\n```\n")
    with pytest.raises(AssertionError, match="btch-size 3 is refused"):
        guides.check_command(words)
    assert build(f"{reader}/my_gan.py:my_run", batch_size=8).max_steps == 1000


def test_troubles_quotes_what_is_said():
    guides.check_quotes(ROOT / "docs/troubles.md")


def test_front_doors_are_short_and_what_they_link_to_is_there():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "strategies/README.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), target
    longest = {"README.md": 150, "CONTRIBUTING.md": 80, "strategies/README.md": 20}
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in longest}
    assert {name: found for name, found in lines.items() if found > longest[name]} == {}
