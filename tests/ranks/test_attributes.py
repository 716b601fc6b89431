"""What a game remembers in plain objects is in its checkpoints: a resumed run goes on as one that never stopped."""

import copy
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from itertools import count

import numpy as np
import pytest
import torch
from lightning import Callback
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from gan.files.checkpoint import load
from gan.files.errors import UserError
from strategies import PhaseStrategy
from tests.ranks.test_check import Reaching
from tests.support.duel import fit
from tests.support.hard_games import One
from tests.support.parity import EXACT, Whole, distance, equals, often, trainer, warned
from tests.support.saved import Saves


class Slot:
    __slots__ = ("__ticks",)

    def __init__(self):
        self.__ticks = 0

    def tick(self):
        self.__ticks += 1

    def count(self):
        return self.__ticks


class Slots(Slot):
    """A private slot of the class below."""

    __slots__ = ()


class Distribution(torch.Tensor):
    """BigGAN's: what is made of one has no scale."""

    def to(self, *args, **kwargs):
        return super().to(*args, **kwargs) * self.scale


class Remembering(Reaching):
    """More of what games remember."""

    def __init__(self):
        super().__init__()
        self.dice, self.generator = random.Random(1), torch.Generator().manual_seed(2)
        self.moving, self.table, self.pairs = torch.zeros(()), np.zeros((2, 2), np.float32), [("a", 0.0)]
        self.register_buffer("fading", torch.ones(()), persistent=False)
        self.fakes = self.alias = []
        self.legacy, self.slots = np.random.RandomState(3), Slots()
        self.cache, self.form = {}, None
        self.z = Distribution(torch.zeros(2, dtype=torch.float64))
        self.z.scale, self.noise = 1.0, torch.empty(1, dtype=torch.float64)

    def play(self, batch):
        if self.step > 0 and "order" not in vars(self):
            self.order, self.tally, self.lists = OrderedDict(a=1.0, b=2.0), Counter(), defaultdict(list)
            self.one = self.two = [0.0]
        if self.step > 0:
            self.order.move_to_end(next(iter(self.order)))
            self.tally["steps"] += 1
            self.lists[self.step].append(0.01)
            self.one[0] += 0.1
        self.slots.tick()
        self.form = batch["x"].shape
        key = batch["x"].device, self.form[1:], torch.float64, np.dtype("f4"), torch.channels_last
        self.cache[key] = self.cache.get(key, 0) + 1
        self.z += 0.1
        self.noise.resize_(self.step + 1).fill_(1)  # as published code resizes it
        out = self.net(batch["x"]) + self.z[:1]
        self.moving = 0.9 * self.moving + 0.1
        self.table = self.table + 1
        self.fading = 0.9 * self.fading
        self.pairs[0] = ("a", self.pairs[0][1] + 0.5)
        self.fakes.append(torch.full((2,), float(self.step)))
        self.late = {"steps": [self.step, np.float64(0.5)]}
        drawn = self.dice.random() + torch.rand((), generator=self.generator).item()
        factor = (
            self.moving + self.fading + self.table.sum() + self.pairs[0][1] + sum(map(torch.sum, self.alias)) + drawn
        )
        if self.step > 0:
            factor = factor + next(iter(self.order.values())) + self.tally["steps"] + self.two[0] + len(self.lists)
        factor = factor + self.legacy.rand() + self.slots.count() + self.cache[key]
        return super().play(batch) * (1 + 0.1 * factor) + out.mean() * self.late["steps"][1]


class Multiplier(One):
    """It freezes a layer and ends a dropout between steps, and trains by hand, with an optimizer and a schedule that no
    player has. A player's optimizer, which it keeps too, checkpoints have as that."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.alpha = torch.ones((), dtype=torch.float64)
        self.own = torch.optim.SGD([self.alpha], lr=0.3, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.own, 2, 0.5)

    def on_train_start(self):
        self.kept = self.trainer.optimizers[0]

    def play(self, batch):
        out = self.net(self.drop(batch["x"]))
        return (out - 1).square().mean() + (self.net(batch["x"]) - self.alpha).square().mean()

    def on_train_batch_end(self, *_):
        if self.step == 2:
            self.net[0].requires_grad_(False)
            self.drop.eval()
        self.alpha.grad = 0.1 * self.alpha
        self.own.step()
        self.schedule.step()


POLICIES = ["ddp", "zero3", "zero1", "fsdp"]
RESUMED = {Remembering: "ddp", Multiplier: "zero3"}  # and the policy that `make test` plays


@pytest.mark.filterwarnings("error:.*checkpoints cannot have that")
@pytest.mark.parametrize(
    ("policy", "game"), [each for game, one in RESUMED.items() for each in often([(p, game) for p in POLICIES], [one])]
)
def test_a_resumed_run_is_one_that_never_stopped_also_at_another_number_of_ranks(policy, game, ranks, tmp_path):
    """Also where a callback saves, before the game's own hook of the step."""
    one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    straight = fit(game, "single", 1, 5, one, at=3)
    assert distance(fit(game, "single", 1, 5, resume=one), straight) == 0
    equals(ranks(2).run(fit, game, policy, 2, 5, None, one), straight)
    equals(ranks(2).run(fit, game, policy, 2, 5, two, at=3), straight)
    assert len(load(two)["attributes"]) == 1  # the same on both
    assert distance(fit(game, "single", 1, 5, resume=two), straight) < EXACT


class Counts(Metric):
    """One state of each kind that can be joined."""

    def __init__(self):
        super().__init__()
        for name, default, kind in (("all", 0.0, "sum"), ("most", 0.0, "max"), ("least", 9.0, "min")):
            self.add_state(name, torch.tensor(default, dtype=torch.float64), kind)
        self.add_state("rows", [], "cat")

    def update(self, values):
        self.all += values.sum()  # in place
        self.most, self.least = torch.maximum(self.most, values.max()), torch.minimum(self.least, values.min())
        self.rows.append(values)

    def compute(self):
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        return self.all + 10 * self.most + 100 * self.least + rows.square().sum()


class Mean(Counts):
    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.zeros((), dtype=torch.float64), "mean")


class Measured(One):
    """Its learning rate follows what a metric has counted since training began, on all ranks."""

    metric = Counts

    def __init__(self):
        super().__init__()
        self.counts = self.metric()

    def play(self, batch):
        self.counts.update(self.net(batch["x"]).detach().abs().mean(1))
        return super().play(batch)

    def on_train_batch_end(self, *_):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.001 * float(self.counts.compute())


class Averaging(Measured):
    metric = Mean


def test_metrics_that_ranks_have_counted_go_on_at_another_number_of_ranks(ranks, tmp_path):
    one, two = tmp_path / "one.ckpt", tmp_path / "two.ckpt"
    straight = fit(Measured, "single", 1, 5, one, at=3)
    equals(ranks(2).run(fit, Measured, "ddp", 2, 5, None, one), straight)
    equals(ranks(2).run(fit, Measured, "ddp", 2, 5, two, at=3), straight)
    assert distance(fit(Measured, "single", 1, 5, resume=two), straight) < EXACT


def test_metrics_that_cannot_go_on_at_another_number_of_ranks_are_named(ranks, tmp_path):
    ranks(2).run(fit, Averaging, "ddp", 2, 2, tmp_path / "two.ckpt", at=1)
    with pytest.warns(UserWarning, match="on another number of ranks, metrics of class 'Mean' count anew"):
        fit(Averaging, "single", 1, 2, resume=tmp_path / "two.ckpt")


class Fails(Callback):
    def on_train_batch_end(self, *_):
        raise ZeroDivisionError


def test_a_callback_that_fails_leaves_the_games_own_hook_as_it_was():
    game, made = Multiplier(), trainer(PhaseStrategy("single"), 1, 1, callbacks=[Fails()])
    with pytest.raises(ZeroDivisionError):
        made.fit(game, Whole(1))
    assert "on_train_batch_end" not in vars(game)
    pickle.dumps(made.callbacks)


def test_a_loader_without_a_position_is_named_where_an_epoch_is_resumed(tmp_path):
    data = [{"x": row} for row in torch.ones(4, 6, dtype=torch.float64)]
    made = trainer(PhaseStrategy("single"), 1, 3)
    made.fit(One(), DataLoader(data))
    made.save_checkpoint(tmp_path / "three.ckpt")
    with pytest.warns(UserWarning, match="keeps no position, so the epoch that was begun before") as said:
        trainer(PhaseStrategy("single"), 1, 4).fit(One(), DataLoader(data), ckpt_path=tmp_path / "three.ckpt")
    assert not any("not resumable" in str(each.message) for each in said)  # Lightning's words for the same


class Local(One):
    """Each rank has a log of its own, of which nothing is trained."""

    def __init__(self):
        super().__init__()
        self.log_of_losses = []

    def play(self, batch):
        loss = super().play(batch)
        self.log_of_losses.append(loss.item())
        return loss


def logged(path, resume=None):
    game = Local()
    fitting = trainer(PhaseStrategy("ddp"), 2, 4 if resume else 2)
    fitting.fit(game, Whole(6, torch.distributed.get_rank(), 2), ckpt_path=resume)
    fitting.save_checkpoint(path)
    return game.log_of_losses


def test_what_each_rank_remembers_is_its_own(ranks, tmp_path):
    before = ranks(2).run(logged, tmp_path / "a.ckpt")
    after = ranks(2).run(logged, tmp_path / "b.ckpt", tmp_path / "a.ckpt")
    assert [each[:2] for each in after] == before and before[0] != before[1] and len(after[0]) == 4


class Grows(One):
    def on_train_batch_end(self, *_):
        self.old = copy.deepcopy(self.net)


def test_weights_that_training_makes_are_named_at_the_save_and_the_resume(tmp_path):
    with pytest.warns(UserWarning, match="has made the weights 'old.0.weight', .* no place for them: make them in"):
        fit(Grows, "single", 1, 2, tmp_path / "two.ckpt")
    with pytest.raises(UserError, match=r"are not this run's, as __init__ makes them \(missing: none; unexpected: old"):
        fit(Grows, "single", 1, 4, resume=tmp_path / "two.ckpt")


class Thing:
    pass


class Things(One):
    """It makes objects of its own while it trains."""

    def __init__(self):
        super().__init__()
        self.things, self.count = [], iter(range(9))

    def play(self, batch):
        self.things.append(Thing())
        self.numbers = iter([1, 2])
        if self.step > 1:
            self.late = Thing()
        return super().play(batch)


def test_what_cannot_be_saved_is_named_once(tmp_path):
    fitting = trainer(PhaseStrategy("single"), 1, 4, callbacks=[Saves(tmp_path / "a.ckpt", 2)])
    with warned("checkpoints cannot have that") as said:
        fitting.fit(Things(), Whole(4))
        for _ in range(2):
            fitting.save_checkpoint(tmp_path / "a.ckpt")
    assert len(said) == 2 and all(f"'{name}'" in said[0] for name in ("count", "things", "numbers"))
    assert said[1].startswith("training changes 'late', and checkpoints")


class Listing(One):
    """An nn.LSTM lists its weights. Another one takes the place of one, as where a served player is given back."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 2).requires_grad_(False)

    def on_train_batch_end(self, *_):
        self.lstm.bias_hh_l0 = nn.Parameter(self.lstm.bias_hh_l0 + 1, requires_grad=False)


class Idle(One):
    """Its loss asks no iterator for an item, and casts by a decorator."""

    def __init__(self):
        super().__init__()
        self.left = [filter(torch.is_tensor, self.net.parameters()), enumerate(number for number in range(9)), count(3)]
        self.used = [*self.left[0]][:0]

    play = torch.amp.autocast("cpu", enabled=False)(lambda self, batch: One.play(self, batch))


@pytest.mark.filterwarnings("error:training changes")
@pytest.mark.parametrize("game", [One, Listing, Idle])
def test_a_game_that_remembers_nothing_has_nothing_in_its_checkpoints(game, tmp_path):
    fit(game, "single", 1, 2, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt")["attributes"] == [{}]
