"""The order of samples under a Trainer: one device keeps its loader's own, ranks share that of one device."""

import contextlib
import os
import random
import warnings
from functools import partial
from itertools import count
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import LightningDataModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.nn.functional import softplus
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from datasets import GlobalLoader, GlobalStream
from gan import GanModule
from gan.files.errors import UserError
from gan.ranks import alone
from strategies import PhaseStrategy
from tests.support import duel
from tests.support.hard_games import Plain
from tests.support.parity import BATCH, EXACT, distance, equals, snapshot, trainer, vectors, warned
from tests.support.saved import Saves

SAMPLES = 40


class Own(Dataset):
    """As people write them, with augmentation."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        row = torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": row + 0.1 * torch.rand(6, dtype=torch.float64), "index": index}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Own()[index] for index in torch.randperm(SAMPLES).tolist()])


class Recorded(Plain):
    """Makes its loader where the ranks are known, and remembers its samples."""

    def __init__(self, loader):
        super().__init__()
        self.make_loader, self.seen = loader, []

    def train_dataloader(self):
        return self.make_loader()

    def training_step(self, batch):
        self.seen.append((self.trainer.current_epoch, batch["index"].tolist()))
        super().training_step({"x": batch["x"]})


def fit(make, world, policy="ddp", epochs=2, save=None, resume=None, deals=True, silent=False):
    game, strategy = Recorded(make), PhaseStrategy(policy, check=False)
    callbacks = [] if save is None else [Saves(save, 3)]
    made = trainer(strategy, world, -1, max_epochs=epochs, use_distributed_sampler=deals, callbacks=callbacks)
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"), warnings.catch_warnings():  # all draw the same noise
        if silent:
            warnings.filterwarnings("error", message=".*training differs from one device")
        made.fit(game, ckpt_path=resume)
    return game.seen, snapshot(game, strategy)


own = partial(GlobalLoader, Own(), BATCH)
streamed = partial(GlobalStream, Stream(), BATCH)
lightnings = partial(DataLoader, Own(), BATCH // 2)  # a plain loader, whose batch size counts the samples of a rank


def sampled():
    return GlobalLoader(Own(), BATCH, sampler=WeightedRandomSampler(torch.arange(40.0), 40))


def together(ranks, *args, **kwargs):
    """What the ranks trained, and the global batches that they saw."""
    found = ranks(2).run(fit, *args, **kwargs)
    seen = [(epoch, mine + theirs) for (epoch, mine), (_, theirs) in zip(*(each[0] for each in found), strict=True)]
    return seen, [each[1] for each in found]


@pytest.mark.parametrize(
    ("make", "policy"),
    [(own, "zero3"), (streamed, "ddp"), (sampled, "ddp")],
    ids=["own", "streamed", "sampled"],
)
def test_ranks_train_on_ones_own_data_as_one_device_does_and_say_nothing(make, policy, ranks):
    alone, expected = fit(make, 1, "single")
    seen, found = together(ranks, make, 2, policy, silent=True)
    assert seen == alone
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1]
    equals(found, expected)


def test_a_run_of_one_device_goes_on_inside_an_epoch_on_two_ranks(ranks, tmp_path):
    path = str(tmp_path / "three.ckpt")
    seen, expected = fit(own, 1, "single", 3, save=path)
    rest, found = together(ranks, own, 2, "zero3", 3, resume=path)
    assert rest[3:] == seen[3:] and len(rest) == 6  # a resume gives back what the game has seen
    equals(found, expected)


@pytest.mark.parametrize("after", [False, True])  # saved in a callback of the last step, or after training
def test_a_run_that_is_resumed_again_and_again_is_one_run(after, tmp_path):
    """Inside epochs of two steps, and at their ends."""
    path, resume = tmp_path / "stopped.ckpt", None
    alone, expected = fit(own, 1, "single", epochs=4)
    for steps in (1, 4, 5, 6, 8):
        game, strategy, callback = Recorded(own), PhaseStrategy("single"), Saves(path, steps)
        made = trainer(strategy, 1, steps, use_distributed_sampler=True, callbacks=[callback])
        with mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"):
            made.fit(game, ckpt_path=resume)
        if after:
            made.save_checkpoint(path)
        resume = path
        assert game.seen == alone[:steps]
    equals([snapshot(game, strategy)], expected)


class Beside(Recorded):
    def training_step(self, batch):
        own, streamed = batch
        self.seen.append([] if own is None else own["index"].tolist())
        GanModule.training_step(self, {"x": streamed["x"]})


@pytest.mark.parametrize(
    ("mode", "at", "steps"), [("max_size_cycle", 2, 5), ("max_size_cycle", 5, 8), ("max_size", 4, 5)]
)
def test_a_loader_beside_a_stream_goes_on_at_the_next_batch(mode, at, steps, tmp_path):
    """Lightning takes a batch before it trains on the one before. The stream, of five batches, begins anew."""
    inside, after = tmp_path / "inside.ckpt", tmp_path / "after.ckpt"
    loaders = GlobalLoader(Subset(Own(), range(24)), 8), GlobalStream(Stream(), 8)

    def fitted(steps, resume=None):
        game, callback = Beside(lambda: CombinedLoader(loaders, mode)), Saves(inside, 0 if resume else at)
        made = trainer(PhaseStrategy("single"), 1, steps, callbacks=[callback])
        made.fit(game, ckpt_path=resume)
        return game.seen, made

    unbroken, _ = fitted(steps)
    assert len(set(map(tuple, unbroken))) == (4 if mode == "max_size" else steps)
    stopped, made = fitted(at)
    assert stopped == unbroken[:at], "a loader that another training has read"
    made.save_checkpoint(after)
    assert [fitted(steps, path)[0] for path in (inside, after)] == [unbroken, unbroken]


class Curriculum(Recorded):
    def on_train_epoch_start(self):
        self.seen.append(("starts", self.current_epoch))

    def on_train_epoch_end(self):
        self.seen.append(("ends", self.current_epoch))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start"])
def test_a_run_goes_on_between_two_epochs(hook, tmp_path):
    """By steps, where Lightning counts otherwise. The hooks that come after the save are called.

    Lightning's ModelCheckpoint saves in on_train_epoch_end, if nobody says otherwise.
    """
    path = str(tmp_path / "epoch.ckpt")

    def save(trainer, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(path)

    def seen(resume=None, steps=5):
        game = Curriculum(own)
        callback = LambdaCallback(**{hook: save} if resume is None else {})
        trainer(PhaseStrategy("single"), 1, steps, callbacks=[callback]).fit(game, ckpt_path=resume)
        return game.seen

    unbroken = seen()
    assert [epoch for epoch, _ in unbroken if epoch in range(9)] == [0, 0, 1, 1, 2]
    assert seen(path) == unbroken, "the game remembers what it has seen"
    assert seen(path, 2) == seen(None, 2), "the hook is called too if that was the last step"


class Endless(IterableDataset):
    def __iter__(self):
        return map(Own().__getitem__, range(SAMPLES))


class Derived(DataLoader):
    pass


class Batches:
    """No loader of torch's."""

    def __iter__(self):
        return iter(lightnings())


class OwnDice(Own):
    def __init__(self):
        self.dice = random.Random(0)

    def __getitem__(self, index):
        return {"x": super().__getitem__(index)["x"] + self.dice.random(), "index": index}


def time_first(samples):
    batch = default_collate(samples)
    return {"x": batch["x"].T.contiguous(), "index": batch["index"]}


def by_dice(rows):
    order = list(range(SAMPLES))
    random.Random(1 + dist.get_rank()).shuffle(order)
    return GlobalLoader(Subset(Own(), order[:rows]), BATCH)


DEALT = r"the training loader deals samples out one by one \(rank 0 gets 0, 2, 4, ...\), .* GlobalLoader\(dataset, "
APART = "each of the 2 ranks reads the {} by itself, so training differs .* return {}"
SET, STREAM = r"GlobalLoader\(dataset", r"GlobalStream\(stream"
WARNED = {
    f"{DEALT}b": lightnings,
    f"{DEALT}batch": lambda: DataLoader(Own(), BATCH // 2, sampler=DistributedSampler(Own())),
    f"{DEALT}sampler=your": lambda: DataLoader(Own(), BATCH // 2, sampler=WeightedRandomSampler(torch.ones(40), 40)),
    APART.format("stream Endless", STREAM): lambda: DataLoader(Endless(), BATCH // 2),
    APART.format("Batches", STREAM): Batches,
    APART.format("Derived", SET): lambda: Derived(Own(), BATCH // 2),
    APART.format("DataLoader", rf"{SET}, sampler="): lambda: DataLoader(Own(), batch_sampler=[[0, 1], [2, 3]]),
    "a sample of OwnDice differs when it is read twice with the same seed": lambda: GlobalLoader(OwnDice(), BATCH),
    "the first batch has 6 rows, and the loader's batches have 8 samples": lambda: GlobalLoader(
        Own(), BATCH, collate_fn=time_first
    ),
    "two training loaders of 40 samples have the seed 0": lambda: [own(), own()],
    "rank 1's data set has other samples": lambda: by_dice(SAMPLES),
}


def warns_of(words):
    """The first rank warns for all."""
    here = pytest.warns(UserWarning, match=words) if dist.get_rank() == 0 else contextlib.nullcontext()
    fails = () if words.startswith(("the training", "each", "rank 1")) else (Exception,)  # others end after the warning
    with here, contextlib.suppress(*fails):
        fit(WARNED[words], 2, epochs=1, deals=not words.startswith("each"))


@pytest.mark.promise("noise for two loaders; Lightning's own sampler (a warning)")
@pytest.mark.parametrize("words", WARNED)
def test_what_would_differ_from_one_device_is_named(words, ranks):
    ranks(2).run(warns_of, words)


class Subclass(GlobalLoader):
    """Nobody knows how to make it again."""


def held_out(count):
    return GlobalLoader(Subset(Own(), range(count)), BATCH, training=False)


def too_early(kind):
    with alone():
        return kind(Own(), BATCH)


REFUSED = {
    "rank 1 has 24 samples, and rank 0 32: all ranks": lambda: by_dice(24 if dist.get_rank() else 32),
    r"9 samples cannot be dealt out to 2 ranks, .* GlobalLoader\(training=True\)": lambda: held_out(9),
    "1 held-out samples are too few for 2 ranks": lambda: held_out(1),
    r"a Subclass was made for 1 rank\(s\), and there are 2; make it in train_": lambda: too_early(Subclass),
}


def refused(words):
    with pytest.raises(UserError, match=words):
        fit(REFUSED[words], 2, epochs=1)


@pytest.mark.parametrize("words", REFUSED)
def test_what_ranks_cannot_share_is_refused(words, ranks):
    ranks(2).run(refused, words)


def made_too_early(make):
    with alone():
        early = make(BATCH)
    assert fit(lambda: early, 2)[0] == fit(lambda: make(BATCH), 2)[0]


@pytest.mark.parametrize("make", [partial(GlobalLoader, Own()), partial(GlobalStream, Stream())], ids=["set", "stream"])
def test_a_loader_that_was_made_before_the_ranks_is_made_again_for_them(ranks, make):
    ranks(2).run(made_too_early, make)


def overfitted_and_predicted(world):
    """Lightning would make both loaders anew, by its own words."""
    with alone():
        early = own()
    game, strategy = Recorded(lambda: early), PhaseStrategy("ddp", check=False)
    game.predict_step = lambda batch: batch["index"].tolist()
    made = trainer(strategy, world, -1, max_epochs=2, overfit_batches=1, use_distributed_sampler=True)
    made.fit(game)
    assert early.sampler.shuffle, "another training shuffles again"
    predicted = trainer(PhaseStrategy("ddp"), world, 1).predict(game, held_out(20))
    return [batch for _, batch in game.seen], predicted


def test_overfit_batches_and_a_prediction_take_our_loaders_as_they_are(ranks):
    assert overfitted_and_predicted(1) == ([list(range(16))] * 2, [list(range(16)), list(range(16, 20))])
    for rank, (seen, predicted) in enumerate(ranks(2).run(overfitted_and_predicted, 2)):
        half = list(range(8 * rank, 8 * rank + 8))
        assert (seen, predicted) == ([half] * 2, [half, [16 + 2 * rank, 17 + 2 * rank]])


# ---- one device ----


@pytest.mark.parametrize("policy", ["single", "ddp"])
def test_one_device_keeps_the_order_of_its_loader(policy):
    seen, _ = fit(lambda: DataLoader(Own(), BATCH, drop_last=True), 1, policy)
    assert [batch for _, batch in seen] == [list(range(16)), list(range(16, 32))] * 2
    torch.manual_seed(5)
    seen, _ = fit(lambda: DataLoader(Own(), SAMPLES, shuffle=True), 1, policy)
    assert [sorted(batch) for _, batch in seen] == [list(range(SAMPLES))] * 2
    assert seen[0][1] != list(range(SAMPLES)) and seen[0][1] != seen[1][1]


# ---- a sampler of one's own ----


def weighted(count=8):
    """It draws from torch's own generator, which differs from rank to rank in training."""
    return DataLoader(Own(), 4, sampler=WeightedRandomSampler(torch.arange(SAMPLES).double(), count, replacement=False))


def test_a_sampler_that_draws_makes_the_same_order_on_all_ranks(ranks):
    torch.manual_seed(0)
    seen, _ = together(ranks, weighted, 2)
    assert len(seen) == 2
    for _, batch in seen:
        assert len(set(batch)) == 8, "drawn without replacement, so ranks of one order share no sample"
    assert set(seen[0][1]) != set(seen[1][1])  # others, and not the same ones in another order


class Ending(Sampler):
    """It goes on after what it calls its length, as NVIDIA's InfiniteSampler."""

    def __len__(self):
        return 8

    def __iter__(self):
        for number in count():
            assert number < 20, "it would go on for ever"
            yield number * 5 % SAMPLES


def endless():
    return DataLoader(Own(), 4, sampler=Ending())


def test_of_an_order_without_an_end_ranks_take_as_many_as_its_length(ranks):
    seen, _ = together(ranks, endless, 2)
    assert [sorted(batch) for _, batch in seen] == [list(range(0, SAMPLES, 5))] * 2  # one batch in each epoch


# ---- ranks whose batches have different sizes are refused before an update is made from them ----


def unequal(policy, sizes):
    """What a rank is told whose batches have these sizes, and its weights then."""
    game, said = Plain(), None
    mine = sizes[dist.get_rank()]
    loader = DataLoader([{"x": vectors(step)["x"][:size]} for step, size in enumerate(mine)], batch_size=None)
    try:
        trainer(PhaseStrategy(policy, check=False), 2, len(mine)).fit(game, loader)
    except UserError as error:
        said = str(error)
    return said, {name: weight.detach().clone() for name, weight in game.named_parameters()}


AT_FIRST, LATER = ([6], [2]), ([8, 6], [8, 2])


@pytest.mark.promise("ranks with unequal batches", "the training of one device, or a refusal by name")
@pytest.mark.parametrize(
    ("policy", "sizes", "where"), [("ddp", AT_FIRST, ""), ("zero3", LATER, "phase 'discriminator' of step 1: ")]
)
def test_ranks_with_unequal_rows_are_refused_by_name_on_all(policy, sizes, where, ranks):
    for said, _ in ranks(2).run(unequal, policy, sizes):
        assert said.startswith(
            f"{where}rank 1's batch has 2 rows and rank 0's 6, so the mean over ranks is not the mean"
        )
        assert "type drop_last=True" in said


@pytest.mark.promise("ranks with unequal batches")
def test_no_rank_makes_an_update_from_them(ranks):
    before = ranks(2).run(unequal, "ddp", [sizes[:1] for sizes in LATER])
    for (_, found), (_, one) in zip(ranks(2).run(unequal, "ddp", LATER), before, strict=True):
        assert distance(found, one) == 0


class Counts(LightningDataModule):
    """A curriculum by the author's own count of batches, in the data module. A trial must not count."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.seen = ranks, 0

    def train_dataloader(self):
        return duel.loader("ddp", self.ranks)

    def on_after_batch_transfer(self, batch, _):
        self.seen += 1
        return {"x": batch["x"] * self.seen}


def counted(ranks, check=True):
    module, strategy = Plain().double(), PhaseStrategy("ddp" if ranks > 1 else "single", check=check)
    trainer(strategy, ranks, 4).fit(module, datamodule=Counts(ranks))
    return snapshot(module, strategy)


def test_a_data_module_that_counts_its_batches_counts_no_trial(ranks):
    found, _ = ranks(2).run(counted, 2)
    assert distance(found, counted(1)) < EXACT
    unchecked, _ = ranks(2).run(counted, 2, check=False)
    assert distance(found, unchecked) == 0


def by_length(rows):
    return {"x": torch.stack(sorted(rows, key=lambda row: -row[0].item()))}


def in_order(rows):
    return {"x": torch.stack(rows)}


def beside_lists(rows):
    return {**in_order(rows), "few": [row[:4] for row in rows]}  # of as many rows as are tried


def of_largest(rows):
    return {"x": torch.stack(rows) / max(row.max() for row in rows)}


def collated(how):
    loader = GlobalLoader(torch.randn(16, 6, generator=torch.Generator().manual_seed(2)), 8, collate_fn=how)
    made = trainer(PhaseStrategy("ddp"), 2, 1)
    with warned("collate_fn") as said:
        made.fit(Plain().float(), loader)
    return said


@pytest.mark.parametrize(("how", "warns"), [(by_length, 1), (of_largest, 1), (beside_lists, 0)])
def test_a_collate_fn_that_sorts_or_looks_at_all_samples_is_named(how, warns, ranks):
    """VITS's and StyleTTS2's sort by length: a rank sorts its own samples, and draws follow the rows."""
    said, _ = ranks(2).run(collated, how)
    assert len(said) == warns and all("puts samples into another order" in each for each in said)


# ---- lists with a tensor for each sample ----


class Crowds(Dataset):
    """People in scenes, in each a number of its own. In some pairs of scenes, two of which make a batch, it is one."""

    def __init__(self, alike):
        self.alike = alike

    def __len__(self):
        return SAMPLES // 2

    def __getitem__(self, index):
        people = self.alike.get(index // 2, 1 + (index * index + index // 2) % 5)
        return torch.randn(people, 6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


class OfCrowds(Plain):
    """How many samples there are, and so what is drawn, tells the list alone."""

    def judge(self, batch):
        score = torch.stack([self.discriminator(people).mean(0) for people in batch["people"]])
        return softplus(-score).square().mean() + softplus(self.discriminator(self.of_each(batch))).mean()

    def fool(self, batch):
        return -self.discriminator(self.of_each(batch)).mean()

    def of_each(self, batch):
        return self.generator(torch.randn(len(batch["people"]), 4, dtype=torch.float64))


def crowds(alike, policy="single", ranks=1, micro=1, plain=False, told=False):
    data = Crowds(alike)
    how = {"collate_fn": lambda rows: {"people": rows} | ({"told": torch.zeros(len(rows), 1)} if told else {})}
    loader = DataLoader(data, 4, **how) if plain else GlobalLoader(data, 4, shuffle=False, **how)
    module, strategy = OfCrowds().double(), PhaseStrategy(policy)
    module.micro_batches = micro
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"):
        trainer(strategy, ranks, 5).fit(module, loader)
    return snapshot(module, strategy)


ALIKE = {"later": {6: 3, 7: 3}, "always": dict.fromkeys(range(10), 3), "rank": {4: 3, 7: 4}}
LISTS = [({}, "always"), ({"micro": 2}, "later"), ({"policy": "ddp", "ranks": 2}, "rank")]
LISTS.append(({"policy": "dp", "ranks": 2, "plain": True}, "later"))  # which deals them out by their items


@pytest.mark.parametrize(("how", "alike"), LISTS, ids=["alone", "micro", "ddp", "dp"])
def test_a_list_with_a_tensor_for_each_sample_may_have_them_of_one_length(how, alike, ranks):
    found = ranks(2).run(crowds, ALIKE[alike], **how) if "ranks" in how else [crowds(ALIKE[alike], **how)]
    equals(found, crowds(ALIKE[alike], told=True))


def test_lists_that_may_be_columns_are_refused_where_they_are_none_later(ranks):
    unclear = {**dict.fromkeys(range(6), 2), **dict.fromkeys(range(6, 10), 3)}
    with pytest.raises(RuntimeError, match=r"batch\['people'\] is a list of tensors of one length, .*torch.zeros\(len"):
        ranks(2).run(crowds, unclear, "ddp", 2)
