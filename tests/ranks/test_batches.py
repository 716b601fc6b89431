"""What a batch may be: all that has a row for each sample is cut alike."""

from unittest import mock

import pytest
import torch

from gan import noise
from gan.files.errors import UserError
from strategies.micro_batches import Cut, rows
from tests.support.hard_games import Plain
from tests.support.parity import BATCH, BROKEN, EXACT, distance, equals, refused, train, vectors


def described(step):
    """Vectors, a caption for each and a clip of a length of its own for each."""
    x = vectors(step)["x"]
    lengths = [1 + (3 * number + step) % 7 for number in range(BATCH)]
    clips = [row[:1].expand(length) for row, length in zip(x, lengths, strict=True)]
    return {"x": x, "captions": tuple("a" * length for length in lengths), "clips": clips}


class Described(Plain):
    """Each row is compared with its own caption and clip; a mean over samples, so micro-batches change nothing."""

    def judge(self, batch):
        score = self.discriminator(batch["x"])[:, 0]
        pairs = zip(score, batch["captions"], batch["clips"], strict=False)
        return torch.stack(
            [(score - 0.1 * len(caption) - clip.sum()).square() for score, caption, clip in pairs]
        ).mean()


class DescribedInTwo(Described):
    micro_batches = 2


def images_alone(cut, batch):
    """The control: lists are not cut."""
    return {**batch, "x": batch["x"][cut.rows]}


@pytest.mark.promise("micro-batches of lists and captions", "the training of one device, or a refusal by name")
@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2", "zero3"])
def test_captions_and_clips_go_with_their_samples(policy, ranks, whole):
    equals(ranks(2).run(train, DescribedInTwo, described, policy, 2), whole)


@pytest.mark.promise("micro-batches of lists and captions")
def test_so_they_do_on_one_device_and_under_dp(whole):
    assert distance(train(DescribedInTwo, described, "single"), whole) < EXACT
    assert distance(train(DescribedInTwo, described, "dp", devices=2), whole) < EXACT
    with mock.patch.object(Cut, "__call__", images_alone):
        assert distance(train(DescribedInTwo, described, "single"), whole) > BROKEN


@pytest.fixture(scope="module")
def whole():
    """In one piece, where nothing is cut."""
    return train(Described, described, "single")


class Spoken(Plain):
    """A batch of captions alone: the discriminator sees a fake for each."""

    micro_batches = 2

    def judge(self, batch):
        lengths = torch.tensor([len(caption) for caption in batch["captions"]], dtype=torch.float64)
        fake = self.generator(noise.randn((len(lengths), 4), like=lengths)).detach()
        return (self.discriminator(fake)[:, 0] - lengths).square().mean()

    def fool(self, batch):
        fake = self.generator(noise.randn((len(batch["captions"]), 4), like=self.generator[0].weight))
        return -self.discriminator(fake).mean()


def spoken(step):
    return {"captions": described(step)["captions"]}


def test_a_batch_of_captions_alone(ranks):
    expected = train(Spoken, spoken, "single")
    equals(ranks(2).run(train, Spoken, spoken, "zero3", 2), expected)
    assert distance(train(Spoken, spoken, "dp", devices=2), expected) < EXACT
    assert distance(train(Spoken, lambda step: spoken(step + 1), "single"), expected) > BROKEN


# ---- loaders of different batch sizes ----


class TwoLoaders(Plain):
    """Noise for the rows of both loaders."""

    def judge(self, batch):
        few = self.generator(noise.randn((len(batch["few"]), 4), like=batch["few"]))
        return {**super().judge(batch), "few": (self.discriminator(few.detach()) * batch["few"][:, :1]).mean()}

    def fool(self, batch):
        few = self.generator(noise.randn((len(batch["few"]), 4), like=batch["few"]))
        return super().fool(batch) + (few * batch["few"]).mean()


def two_loaders(step):
    return {**vectors(step), "few": vectors(step + 50)["x"][: BATCH // 2]}


def in_one_place():
    """The control: all rows are taken for those of the first loader."""
    with mock.patch("strategies.turn.row_counts", lambda batch: [rows(batch)]):
        return refused(TwoLoaders, two_loaders, "ddp", 2)


@pytest.mark.promise(
    "noise for two loaders; Lightning's own sampler (a warning)", "the training of one device, or a refusal by name"
)
@pytest.mark.parametrize(
    ("policy", "world"), [("ddp", 2), pytest.param("ddp", 4, marks=pytest.mark.slow), ("zero3", 2)]
)
def test_noise_follows_the_samples_of_every_loader(policy, world, ranks):
    equals(ranks(world).run(train, TwoLoaders, two_loaders, policy, world), train(TwoLoaders, two_loaders, "single"))


@pytest.mark.promise("noise for two loaders; Lightning's own sampler (a warning)")
def test_the_control_that_knows_one_loader_is_refused(ranks):
    assert "noise of 4 rows in a phase whose batch has 8" in ranks(2).run(in_one_place)[0]


def test_under_dp_two_loaders_are_refused_by_key():
    with pytest.raises(UserError, match=r"strategy dp: the batch has 16 samples and batch\['few'\] is of 8 rows"):
        train(TwoLoaders, two_loaders, "dp", devices=2)
