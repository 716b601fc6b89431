"""What differs from one device only after the first step is named, because later steps are tried too."""

import random
import re

import pytest
import torch
import torch.distributed as dist

from gan import Phase, noise
from gan import ranks as all_ranks
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.processes.same_on_ranks import AGAIN, SameOnRanks
from strategies.training.watch import TrialSchedule
from strategies.world import World
from tests.ranks.test_check import Codebook, tried
from tests.support.hard_games import One
from tests.support.parity import distance, equals, often, parts, refused, train, trainer, vectors, warned

LATER = 6  # steps: from step 0 to 5


class Masked(One):
    """A mean over what a mask leaves, beside one over all samples."""

    def play(self, batch):
        score, mask = self.net(batch["x"]).square().mean(1), batch["mask"]
        return score.mean() + (score * mask).sum() / mask.sum().clamp(min=1)


def with_mask(step, ones):
    batch = vectors(step)
    return {**batch, "mask": torch.tensor([float(row in ones) for row in range(len(batch["x"]))], dtype=torch.float64)}


def masked(step):
    """In the first batch the mask leaves everything."""
    return with_mask(step, set(range(16)) - ({2, 8, 12} if step else set()))


def rare(step):
    """It leaves a few samples, and none of the first ones of a rank."""
    return with_mask(step, {5, 6, 13})


class Cached(One):
    """It keeps what it has drawn for a number of samples, for ever."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def play(self, batch):
        out = self.net(batch["x"])
        made = self.made.setdefault(len(out), noise.randn((3,), out, common=True))
        return (out - made).square().mean()


def eight(step):
    return {"x": vectors(step)["x"][:8]}


class OfPairs(One):
    """A penalty on half of the batch, which takes no odd number of samples."""

    def play(self, batch):
        if len(batch["x"]) % 2:
            raise UserError("an odd number of samples")
        return super().play(batch) + self.net(batch["x"][::2]).tanh().square().mean()


class Running(One):
    """A running mean, kept as a number of Python's, of the rank's own samples."""

    mean = 0.0

    def play(self, batch):
        score = super().play(batch)
        loss = score * (1 + self.mean)
        self.mean = 0.9 * self.mean + 0.1 * score.item()
        return loss


class Asks(One):
    """A term that looks at the whole batch joins the loss at step 4, which asks for gradients of its samples."""

    def play(self, batch):
        out = self.net(batch["x"].requires_grad_())
        losses = {"score": out.square().mean()}
        return losses | ({"spread": out.std()} if self.step >= 4 else {})


class Adapts(One):
    """ADA: the signs of some steps move a probability, which does not differ in a trial."""

    probability = 0.0
    of_all = staticmethod(lambda signs: signs)

    def __init__(self):
        super().__init__()
        self.signs = []

    def play(self, batch):
        out = self.net(batch["x"])
        self.signs.append(self.of_all(out.detach().sign().mean()).item())
        if len(self.signs) == 4:
            self.probability = min(max(self.probability + 0.2 * sum(self.signs), 0), 0.5)
            self.signs.clear()
        seen = noise.rand((len(out), 1), out) < self.probability
        return (out * ~seen).square().mean()


class AdaptsAlike(Adapts):
    of_all = staticmethod(all_ranks.mean)


TIMES = {"called": 0.0}


class Ratio:
    """EnCodec's mean: a sum of weighted values by a sum of weights, which are the rank's numbers of samples."""

    def __init__(self):
        self.total = self.weight = TIMES["called"] = 0.0

    def __call__(self, value, weight):
        TIMES["called"] += 1
        self.total, self.weight = 0.9 * self.total + weight * value, 0.9 * self.weight + weight
        return self.total / self.weight + TIMES["called"]


class Balanced(One):
    """What it keeps lies in an object that is called, and in a global."""

    def __init__(self):
        super().__init__()
        self.ratio = Ratio()

    def play(self, batch):
        loss = super().play(batch)
        return loss / self.ratio(all_ranks.mean(loss.detach()).item(), len(batch["x"]))


class Logs(One):
    """It keeps its own losses, and never reads them."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def play(self, batch):
        loss = super().play(batch)
        self.last = loss.item()
        self.losses.append(loss.item())
        return loss


class JoinsFirst(One):
    """A root of a mean joins a sum of many terms in step 4, in front of them."""

    def play(self, batch):
        total = self.net(batch["x"]).square().mean().sqrt() if self.step >= 4 else 0.0
        for number in range(8):
            total = total + self.net(batch["x"] * number).square().mean()
        return total


# A game, its batches, and the step whose trial names it.
GAMES = [
    (Masked, masked, 1),
    (Masked, rare, 0),
    (Running, vectors, 1),
    (Asks, vectors, 4),
    (JoinsFirst, vectors, 4),
]


@pytest.mark.parametrize(("game", "batches", "step"), GAMES)
@pytest.mark.parametrize("policy", often(["zero3", "ddp", "zero1", "zero2", "fsdp"], ["ddp"]))
def test_what_differs_later_is_named(policy, game, batches, step, ranks):
    said = ranks(2).run(refused, game, batches, policy, 2, steps=LATER, check=True)
    assert said[0] == said[1]
    assert f"In a trial of step {step}" in said[0] and "phase 'play': loss '" in said[0]
    remembered = "on another, for the same samples" in said[0] and "What a loss remembers" in said[0]
    assert remembered == (game is Running)


@pytest.mark.parametrize("game", [Cached, OfPairs])
def test_what_depends_on_the_number_of_samples_is_not_named(game, ranks):
    equals(ranks(2).run(train, game, eight, world=2, steps=LATER, check=True), train(game, eight, steps=LATER))


@pytest.mark.parametrize(("game", "named"), [(Adapts, ["'signs'"]), (AdaptsAlike, []), (Logs, [])])
def test_what_a_loss_reads_later_and_differs_from_one_device_is_said(game, named, ranks):
    said = ranks(2).run(tried, game)[0][1]
    assert re.findall(r"a loss keeps other values in (.*) than one device would", said) == named


def test_what_an_object_keeps_that_is_called_is_named(ranks):
    unchecked = ranks(2).run(train, Balanced, world=2, steps=1, check=False)
    assert distance(ranks(2).run(train, Balanced, world=2, steps=1, check=True)[0], unchecked[0]) == 0
    for found in ranks(2).run(refused, Balanced, world=2, steps=LATER, check=True):
        assert "A loss also keeps other values in 'ratio.total', 'ratio.weight' than one device would." in found


class Tosses(One):
    """Dice of the game's own decide whether all samples share a draw. The trial after such a step throws them again."""

    def __init__(self):
        super().__init__()
        self.dice = random.Random(5)

    def play(self, batch):
        x = batch["x"]
        if self.dice.random() < 0.3:
            x = x * torch.rand(8, 6, dtype=x.dtype).mean(0)
        return self.net(x + torch.randn(len(x), 6, dtype=x.dtype)).square().mean()


def test_a_guess_that_a_trial_did_not_meet_is_tried_again(ranks):
    """Dice that the trials of step 0, 1, 3 and 10 and the first of those after a step throw without that draw."""
    for found in ranks(2).run(refused, Tosses, world=2, steps=40, check=True):
        assert "drew other numbers than one device, where the game drew something for the first time" in found


CONTROLS = [(Masked, masked, 2), (Running, vectors, 3), (Codebook, vectors, 1)]


@pytest.mark.promise("buffers that learn from the rank's samples")
@pytest.mark.promise("a loss that is no mean over samples")
@pytest.mark.promise("statistics kept by hand")
@pytest.mark.parametrize(("game", "batches", "steps"), CONTROLS)
def test_the_control_without_the_check_differs_in_silence(game, batches, steps, ranks):
    found = ranks(2).run(train, game, batches, "ddp", 2, steps=steps, check=False, sync_batchnorm=False)
    assert distance(found[0], train(game, batches, steps=steps)) > 1e-6


def steps_tried(phases, often=False, steps=400):
    trials, found = TrialSchedule(phases, often), []
    for step in range(steps):
        before = trials.before(phases, step)
        trials.asked += [phase.name for phase in phases if phase.when and phase.due(step)]
        if before | trials.after():
            found.append(step)
    return found


def phase(name, **when):
    return Phase(name, lambda batch: None, name, **when)


def test_a_phase_is_tried_at_growing_distances_and_often_at_least_every_tenth_time():
    assert steps_tried([phase("a")]) == [0, 1, 3, 10, 30, 100, 300]
    assert steps_tried([phase("a", every=4)]) == [0, 4, 12, 40, 120]
    both = steps_tried([phase("a", start=50), phase("b", start=350)])
    assert both == [50, 51, 53, 60, 80, 150, 350, 351, 353, 360, 380]
    assert steps_tried([phase("a", when=lambda: True)]) == [0, 1, 3, 10, 30, 100, 300]
    assert steps_tried([phase("a")], True, 50) == [0, 1, 3, 10, 20, 30, 40]
    assert steps_tried([phase("a", every=4)], True, 50) == [0, 4, 12, 40]


def forms(size=2):
    """Of each rank, on a store of their own."""
    store = torch.distributed.HashStore()
    rows = [SameOnRanks() for _ in range(size)]
    for rank, each in enumerate(rows):
        each.world, each.store = World(size, rank), store
    return rows


def new_forms(*steps, forget=False, draws=frozenset()):
    """Whether each step, with these losses of two ranks, has a form that is new on both."""
    both, found = forms(), []
    for step in steps:
        for form, losses in zip(both, step, strict=True):
            form.steps += 1
            form.saw("play", losses, draws)
        first, second = (form.new_on_all() for form in both)
        for form in both:
            form.end_step(forget)
        assert first == second
        found.append(first)
    return found


def test_a_form_of_a_loss_is_new_once_and_only_if_it_is_new_on_all_ranks():
    x = torch.ones(3, requires_grad=True)
    mean, total = {"loss": x.mean()}, {"loss": x.sum()}
    named, deep = {"other": x.mean()}, {"loss": (x * 2).exp().mean() + x.sum()}
    assert new_forms((mean, mean), (mean, mean), (total, total), (mean, mean), (total, total)) == [0, 0, 1, 0, 0]
    assert new_forms((mean, mean), (named, named), (deep, mean), (mean, deep), (deep, deep)) == [0, 1, 0, 0, 0]
    many = [(mean, mean)] * (AGAIN + 3)  # draws that no trial has shown
    assert new_forms(*many, draws=frozenset([("play", 1)])) == [1] + [0] * (AGAIN + 2)
    assert new_forms(*many, draws=frozenset([("play", 1)]), forget=True) == [1] * (AGAIN + 1) + [0, 0]


class Gated(One):
    """As EBGAN's margin: a branch that some ranks take, in a step between trials."""

    def __init__(self, *those):
        super().__init__()
        self.those = those

    def play(self, batch):
        loss = super().play(batch)
        return 2 * loss if self.step == 2 and dist.get_rank() in self.those else loss


class Weighed(One):
    """A hook sets the weight of its loss, between trials; and a number that is for a log."""

    def __init__(self, of_ranks, log):
        super().__init__()
        self.of_ranks, self.log_of_ranks, self.weight, self.seen = of_ranks, log, 1.0, 0.0

    def play(self, batch):
        return self.weighed(super().play(batch))

    def weighed(self, loss):
        return loss * self.weight

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 2:
            self.seen = self.log_of_ranks[dist.get_rank()] + self.seen
            self.weight = self.of_ranks[dist.get_rank()]


def said_of(*those, game=Gated, words="other operations", steps=4):
    made = trainer(PhaseStrategy("ddp"), 2, steps)
    with warned(words) as said:
        made.fit(game(*those), parts(steps, 2))
    return said


@pytest.mark.parametrize(("of_ranks", "warn"), [((1.0, 3.0), [1]), ((2.0, 3.0), [0, 1]), ((2.0, 2.0), [])])
def test_a_number_of_a_loss_that_a_hook_sets_otherwise_on_a_rank_is_named(of_ranks, warn, ranks):
    found = ranks(2).run(said_of, of_ranks, (1.0, 2.0), game=Weighed, words="was set on rank", steps=3)
    assert [rank for rank, said in enumerate(found) if said] == warn
    for said in filter(None, found):
        assert len(said) == 1 and "before step 2 'weight' was set" in said[0] and "a loss reads it" in said[0]


def test_a_rank_that_takes_another_branch_than_the_next_one_says_so(ranks):
    nothing, (said,) = ranks(2).run(said_of, 1)
    assert "in step 2 rank 1 has computed the loss of phase 'play' by other operations than before, and rank 0" in said
    assert "That is right where each sample is computed by itself" in said and "If a branch for all depends on" in said
    assert nothing == [] and ranks(2).run(said_of, 0, 1) == [[], []]


def test_another_word_is_refused():
    with pytest.raises(UserError, match=r"PhaseStrategy\(check='seldom'\): type True, False or 'often'"):
        PhaseStrategy("ddp", check="seldom")
