"""docs/start/port.md: its game gives the weights of its loop, and the first step finds its five mistakes."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import DataLoader

from gan import ranks
from gan.files.errors import UserError
from strategies import PhaseStrategy
from tests.support.hard_games import One, mlp
from tests.support.parity import BROKEN, EXACT, trainer

PAGE = (Path(__file__).parents[2] / "docs/start/port.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
QUOTES = re.compile(r"^> (.*)$", re.M)
FORMULA = QUOTES.search(PAGE)[1]  # of all mistakes but the last
MISTAKES = {  # by number: its code and what the page says of it
    number: (re.search(r"```python\n(.*?)```", text, re.S)[1], [*QUOTES.findall(text), FORMULA][:2])
    for number, text in re.findall(r"^\*\*(\d)\. (.*?)(?=^\*\*\d|\Z)", PAGE, re.S | re.M)
}
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


@pytest.fixture
def page():
    """The names that the first two blocks of the page define."""
    names = {"__name__": "page"}
    for block in BLOCKS[:2]:
        exec(block, names)
    return SimpleNamespace(**names)


def furthest(ones, others):
    pairs = zip(ones, others, strict=True)
    return max((one.double() - other.double()).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize(("policy", "devices"), [("ddp", 1), pytest.param("dp", 2, marks=pytest.mark.slow)])
def test_the_game_gives_the_weights_of_the_loop(policy, devices, page):
    batches = [(torch.randn(8, 2).double(), torch.randn(8, 4).double()) for _ in range(12)]
    networks = page.networks
    page.by_hand.__globals__["networks"] = lambda: [net.double() for net in networks()]
    G, D, average = page.by_hand(*zip(*batches, strict=True))
    averages = []
    with mock.patch.object(page.Game, "on_train_end", lambda game: averages.extend(averaged(game)), create=True):
        game = page.train(DataLoader(batches, batch_size=None), policy, devices, precision="64-true", **QUIET)
    assert furthest([*game.G.parameters(), *game.D.parameters()], [*G.parameters(), *D.parameters()]) < EXACT
    assert furthest(averages, average.parameters()) < EXACT
    assert furthest(average.parameters(), G.parameters()) > BROKEN


def averaged(game):
    with game.averaged():
        return [weight.detach().clone() for weight in game.G.parameters()]


class Playing(One):
    """A game around the losses of the page."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(1)
        self.net = mlp(6, 3)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.register_buffer("center", torch.zeros(3))
        self.loss = loss

    def play(self, batch):
        return self.loss(self, batch)


def play(code, which, **settings):
    """In which words this rank's training is refused; none where it trains."""
    names = {"ranks": ranks, "torch": torch, "softplus": softplus, "cross_entropy": cross_entropy}
    exec(code, names)
    batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(3)).double()
    own = batch.chunk(2)[torch.distributed.get_rank()]
    try:
        made = trainer(PhaseStrategy("ddp"), 2, 1, **settings)
        made.fit(Playing(names[which]), DataLoader([own], batch_size=None))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("number", MISTAKES)
def test_the_first_step_finds_the_mistake_and_not_what_is_right(number, ranks):
    code, said = MISTAKES[number]
    refused, _ = ranks(2).run(play, code, "wrong", sync_batchnorm=False)
    assert all(each in refused for each in said) and ("Trainer(sync_batchnorm=True)" in refused) == (number == "5")
    assert ranks(2).run(play, code, "right", sync_batchnorm=True) == [None, None]


def test_there_are_five_and_the_page_quotes_them():
    assert list(MISTAKES) == ["1", "2", "3", "4", "5"]
