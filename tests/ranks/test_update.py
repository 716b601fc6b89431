"""What an update takes beside its gradients is the same on all ranks, or it is refused by name."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gan import Player
from gan.ranks import mean
from strategies import PhaseStrategy
from tests.support.hard_games import Micro2, Plain
from tests.support.parity import Whole, distance, often, parts, refused, single, train, trainer, weights

SAME = "must be the same on all ranks: keep gan.ranks.mean(x) in place of x"


class Reads(Plain):
    """Its updates read a number of this rank's own samples, or (`of_all`) of all ranks'."""

    of_all, seen = staticmethod(lambda number: number), 1.0

    def judge(self, batch):
        self.seen = float(self.of_all(batch["x"].detach().abs().mean()))
        return super().judge(batch)

    def configure_players(self):
        generator, _ = super().configure_players()
        return [generator, Player("discriminator", self.discriminator, partial(SGD, lr=1e-2), **self.more())]


class Rated(Reads):
    def more(self):
        return {"schedule": partial(LambdaLR, lr_lambda=lambda _: 1 / self.seen)}


class Averaged(Reads):
    def more(self):
        return {"ema": lambda _: min(1.0, self.seen / 10)}


class Written(Reads):
    def more(self):
        return {"after": self.shrink}

    def shrink(self, module):
        for weight in module.parameters():
            weight.mul_(1 - self.seen / 100)


READ = {
    Rated: "player 'discriminator': 'lr' of group 0 is",
    Averaged: "player 'discriminator': the decay of its average is",
    Written: "player 'discriminator': after= has left other weights on each rank",
}


@pytest.mark.parametrize("game", READ)
@pytest.mark.parametrize("policy", often(["ddp", "zero1", "zero2", "zero3", "fsdp"], ["zero3"]))
def test_what_an_update_reads_of_one_ranks_samples_is_refused(policy, game, ranks):
    for said in ranks(2).run(refused, game, policy=policy, world=2, steps=1, check=True):
        assert said is not None and READ[game] in said and SAME in said
    assert ranks(2).run(refused_of_all, game, policy) == [None, None]


def refused_of_all(game, policy):
    of_all = type("OfAll", (game,), {"of_all": staticmethod(mean)})
    return refused(of_all, policy=policy, world=2, steps=2, check=True)


# ---- on_after_backward ----


class Clips(Plain):
    def on_after_backward(self):
        nn.utils.clip_grad_norm_(self.discriminator.parameters(), 1e-3)


class ClipsInParts(Clips, Micro2):
    pass


@pytest.mark.parametrize(
    ("policy", "game"), [("zero2", Clips), ("zero3", Clips), ("fsdp", Clips), ("ddp", ClipsInParts)]
)
def test_gradients_that_are_not_whole_are_not_left_to_on_after_backward(policy, game, ranks):
    for said in ranks(2).run(refused, game, policy=policy, world=2, steps=1):
        assert said is not None and "write on_before_optimizer_step(self, optimizer), where they are the means" in said


def test_ddp_has_them_whole_there(ranks):
    alone = weights(train(Clips, policy="single"))
    assert distance(weights(ranks(2).run(train, Clips, policy="ddp", world=2)[0]), alone) < 1e-12
    assert distance(weights(train(Plain, policy="single")), alone) > 1e-6


class Forgetting(Plain):
    """As ReDo and warm restarts: the hook changes the moments of a weight, if there are any."""

    def on_before_optimizer_step(self, optimizer):
        for weight in optimizer.param_groups[0]["params"]:
            if "exp_avg" in optimizer.state[weight]:
                optimizer.state[weight]["exp_avg"].mul_(0.5)


@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_a_hook_that_changes_the_moments_of_a_weight_is_refused_where_there_are_pieces(policy, ranks):
    for said in ranks(2).run(refused, Forgetting, policy=policy, world=2, steps=1):
        assert said is not None and "of which this rank's optimizer has a piece" in said


@pytest.mark.slow
def test_a_pipeline_has_whole_moments(ranks):
    alone = weights(train(Forgetting, policy="single"))
    assert (
        distance(weights(ranks(2).run(train, Forgetting, policy="generator=pipeline,*=ddp", world=2)[0]), alone) < 1e-12
    )
    assert distance(weights(train(Plain, policy="single")), alone) > 1e-6


class Toggles(Plain):
    """As e4e's: the loss freezes the network again when it is done."""

    def judge(self, batch):
        losses = super().judge(batch)
        self.discriminator.requires_grad_(False)
        return losses

    def configure_phases(self):
        return [phase for phase in super().configure_phases() if phase.name == "discriminator"]

    def on_train_batch_start(self, *_):
        self.discriminator.requires_grad_(True)


@pytest.mark.parametrize("policy", often(["zero2", "zero3", "fsdp"]))
def test_a_loss_may_freeze_the_weights_that_it_is_done_with(policy, ranks):
    alone = weights(train(Toggles, policy="single"))
    assert distance(weights(ranks(2).run(train, Toggles, policy=policy, world=2)[0]), alone) < 1e-12


# ---- a forward that runs again, or on one rank only ----


class Tosses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, x):
        return torch.tanh(self.layer(x) * (0.5 + random.random() + np.random.rand()))


class Counts(Tosses):
    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.layer(x) * self.calls)


class Tossing(Plain):
    block = Tosses

    def __init__(self):
        super().__init__()
        random.seed(3)
        np.random.seed(3)
        self.generator = nn.Sequential(nn.Linear(4, 6), self.block(), self.block())

    def configure_players(self):
        generator, discriminator = super().configure_players()
        yield replace(generator, blocks=["1", "2"])
        yield discriminator


class Counting(Tossing):
    block = Counts


class Assigned(Tosses):
    """As AdaIN in MUNIT: the network gives its layers what they scale with."""

    gain = 1.0

    def forward(self, x):
        return torch.tanh(self.layer(x) * self.gain)


class Assigns(nn.Sequential):
    def forward(self, x):
        found = 0
        for gain in (x.mean(1, keepdim=True), 2.0):
            self[1].gain = self[2].gain = gain
            found = found + super().forward(x)
        return found


class Assigning(Tossing):
    block = Assigned

    def __init__(self):
        super().__init__()
        self.generator = Assigns(*self.generator)


class Keeps(Tosses):
    def __init__(self):
        super().__init__()
        self.past = []

    def forward(self, x):
        self.past.append(1)
        return torch.tanh(self.layer(x) * len(self.past))


class Keeping(Tossing):
    block = Keeps


@pytest.mark.parametrize("game", [Tossing, Counting, Assigning])
def test_a_block_that_runs_again_has_the_dice_and_attributes_of_the_first_time(game):
    assert distance(*(weights(train(game, policy=policy)) for policy in ("single", "single+recompute"))) == 0


def test_recompute_refuses_a_block_that_writes_into_a_list():
    said = refused(Keeping, single, policy="single+recompute", steps=1)
    assert "changes the attribute 'past' of a Keeps in forward, and recompute would change it again" in said


def test_a_stage_that_draws_what_other_ranks_do_not_is_refused(ranks):
    for said in ranks(2).run(refused, Tossing, policy="generator=pipeline,*=ddp", world=2, steps=1, check=True):
        assert said is not None and "draws by NumPy or Python's random, which only the rank of its stage" in said


# ---- hooks of a batch ----


class Augments(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])} if self.trainer.training else batch


class Normalises(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] - self.middle(batch["x"].mean(0))}

    middle = staticmethod(lambda own: own)


class NormalisesByAll(Normalises):
    middle = staticmethod(mean)


@pytest.mark.parametrize("game", [Augments, pytest.param(NormalisesByAll, marks=pytest.mark.slow)])
def test_what_a_hook_does_to_a_batch_follows_the_samples(game, ranks):
    alone = weights(train(game, policy="single"))
    assert distance(weights(ranks(2).run(train, game, policy="ddp", world=2, check=True)[0]), alone) < 1e-12
    assert distance(weights(train(Plain, policy="single")), alone) > 1e-6


class ChangesItsBatch(Plain):
    def on_train_batch_start(self, batch, *_):
        batch["x"].add_(0.3 * torch.randn_like(batch["x"]))


class ReplacesIt(Plain):
    def on_train_batch_start(self, batch, *_):
        batch["x"] = batch["x"] - batch["x"].mean(0)


@pytest.mark.parametrize("game", [ChangesItsBatch, ReplacesIt])
def test_a_hook_of_which_no_trial_knows_leaves_the_batch_as_it_is(game, ranks):
    found = ranks(2).run(refused, game, world=2, steps=1)
    assert found[0].startswith("on_train_batch_start changes the batch: what it draws or computes is each rank's own")


def test_a_hook_that_looks_at_one_ranks_batch_is_refused(ranks):
    for said in ranks(2).run(refused, Normalises, policy="ddp", world=2, steps=1, check=True):
        assert said is not None and "would not train as one device does" in said


# ---- optimizers that are not what their class says ----


def centred(parameters):
    optimizer = SGD(parameters, lr=1e-2)

    def centre(optimizer, *_):
        for weight in optimizer.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.grad -= weight.grad.mean()

    optimizer.register_step_pre_hook(centre)
    return optimizer


class Hooked(Plain):
    make = staticmethod(centred)

    def configure_players(self):
        generator, _ = super().configure_players()
        return [generator, Player("discriminator", self.discriminator, self.make)]


class Unhooked(Hooked):
    make = partial(SGD, lr=1e-2)


class HookedLate(Unhooked):
    def on_train_start(self):
        for optimizer in self.trainer.optimizers:
            optimizer.register_step_post_hook(lambda *_: None)


class Regroups(Unhooked):
    """Layers of rates of their own, found by the weights' identity."""

    def on_train_start(self):
        (optimizer,) = (each for each in self.trainer.optimizers if isinstance(each, SGD))
        first, mine = optimizer.param_groups[0], set(map(id, self.discriminator[2].parameters()))
        chosen = [weight for weight in first["params"] if id(weight) in mine]
        first["params"] = [weight for weight in first["params"] if id(weight) not in mine]
        optimizer.add_param_group({"params": chosen, "lr": 1e-3})


@pytest.mark.parametrize("policy", ["single", "zero3"])
def test_groups_that_a_hook_makes_are_refused(policy, ranks):
    said = ranks(2).run(refused, Regroups, policy="zero3", world=2, steps=1)[0] if policy == "zero3" else None
    said = said or refused(Regroups, single, policy=policy, steps=1)
    assert "player 'discriminator': a hook has changed which weights are in optimizer.param_groups" in said


def test_a_hook_of_an_optimizer_sees_whole_weights_or_is_refused(ranks):
    alone = weights(train(Hooked, policy="single"))
    assert distance(weights(ranks(2).run(train, Hooked, policy="zero1", world=2)[0]), alone) < 1e-12
    assert distance(weights(train(Unhooked, policy="single")), alone) > 1e-6
    both = (ranks(2).run(refused, game, policy="zero3", world=2, steps=1, check=True) for game in (Hooked, HookedLate))
    said, late = (of_ranks[0] for of_ranks in both)
    assert "SGD with hooks, a `step` or a state of your own may not give the same result on pieces" in said
    assert "do that in the function that makes it" in late


class Lookahead(Optimizer):
    """Published ones call the optimizer inside of them `optimizer`, as Lightning's wrapper does."""

    shared = True

    def __init__(self, weights, lr=1e-2):
        self.optimizer = Adam(weights, lr=lr)
        super().__init__(self.optimizer.param_groups, {})

    def step(self):
        if self.shared:
            self.optimizer.state = self.state
        self.optimizer.step()


class Unmade(Optimizer):
    """As LSGM published its average of weights: around an optimizer, and without super().__init__."""

    def __init__(self, weights):
        self.optimizer = Adam(weights, lr=1e-2)
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


class LooksAhead(Hooked):
    make = Lookahead


def test_an_optimizer_with_another_one_inside_is_saved_whole_or_refused(tmp_path):
    path = str(tmp_path / "two.ckpt")
    first = trainer(PhaseStrategy("single"), 1, 2)
    first.fit(LooksAhead(), Whole(4))
    first.save_checkpoint(path)
    unbroken, resumed = LooksAhead(), LooksAhead()
    trainer(PhaseStrategy("single"), 1, 4).fit(unbroken, Whole(4))
    trainer(PhaseStrategy("single"), 1, 4).fit(resumed, Whole(4), ckpt_path=path)
    assert all(map(torch.equal, unbroken.parameters(), resumed.parameters()))
    apart = type("Apart", (Lookahead,), {"shared": False})
    said = refused(type("LooksApart", (Hooked,), {"make": apart}), single, policy="single", steps=1)
    assert "a checkpoint would not have what Apart keeps in 'optimizer', which has a state of its own" in said
    said = refused(type("LooksUnmade", (Hooked,), {"make": Unmade}), single, policy="single", steps=1)
    assert "a checkpoint would not have what Unmade keeps in the form of its own state_dict(); call super()" in said


class Masters(Optimizer):
    """It has whole weights for those in bfloat16, a mask, and a count."""

    def __init__(self, weights, lr=1e-2):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state.update(master=weight.float(), mask=torch.ones_like(weight) > 0, count=torch.zeros((), dtype=int))
            state["count"] += 1
            state["master"][state["mask"]] -= 1e-3 * weight.grad.float()[state["mask"]] / state["count"]
            weight.copy_(state["master"])


@pytest.mark.parametrize(("make", "precision"), [(Masters, "bf16-true"), (torch.optim.NAdam, "64-true")])
def test_an_optimizers_state_keeps_its_types(make, precision, tmp_path):
    """torch gives all of a loaded state the type of the weight."""
    path, game = str(tmp_path / "four.ckpt"), type("Made", (Hooked,), {"make": make})
    unbroken, resumed = game(), game()
    first = trainer(PhaseStrategy("single"), 1, 4, precision=precision)
    first.fit(game(), Whole(8))
    first.save_checkpoint(path)
    trainer(PhaseStrategy("single"), 1, 8, precision=precision).fit(unbroken, Whole(8))
    trainer(PhaseStrategy("single"), 1, 8, precision=precision).fit(resumed, Whole(8), ckpt_path=path)
    assert all(map(torch.equal, unbroken.parameters(), resumed.parameters()))


class SavesTooEarly(Plain):
    def on_before_zero_grad(self, optimizer):
        self.trainer.save_checkpoint("early.ckpt")


class SavesBefore(Plain):
    def on_train_batch_start(self, *_):
        self.trainer.save_checkpoint("early.ckpt")


class SavesInItsEpochsStart(Plain):
    def on_train_epoch_start(self):
        self.trainer.save_checkpoint("early.ckpt")


@pytest.mark.parametrize("game", [SavesTooEarly, SavesBefore, SavesInItsEpochsStart])
def test_a_checkpoint_in_the_midst_of_a_step_is_refused(game):
    said = refused(game, single, policy="single", steps=1)
    assert said == (
        "a checkpoint is saved while a step is played, or a step or epoch begins, and no training could go on from it; "
        "save in on_train_batch_end"
    )


class Fails(Plain):
    fails = True

    def fool(self, batch):
        if self.fails and self.step == 3:
            raise ValueError("by chance")
        return super().fool(batch)


def test_a_callback_that_saves_at_an_error_does_not_hide_the_error(tmp_path):
    """And leaves the last checkpoint, and a game that can be trained again."""
    game = Fails()
    saving = ModelCheckpoint(tmp_path, "{step}", save_last=True, save_on_exception=True, every_n_train_steps=2)
    saving.CHECKPOINT_NAME_LAST = "last-{step}"
    settings = {"callbacks": [saving], "enable_checkpointing": True}
    with pytest.raises(ValueError, match="by chance"), pytest.warns(UserWarning, match="is not saved, because the tr"):
        trainer(PhaseStrategy("single"), 1, 4, **settings).fit(game, parts(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last-step=2.ckpt", "step=2.ckpt"]
    game.fails = False
    trainer(PhaseStrategy("single"), 1, 2).fit(game, parts(2))


# ---- a training that has nothing left to do ----


def again(policy, path):
    first, done = trainer(PhaseStrategy(policy), 2, 2), Plain()
    first.fit(done, parts(2, 2))
    first.save_checkpoint(path)
    game = Plain()
    trainer(PhaseStrategy(policy), 2, 2).fit(game, parts(2, 2), ckpt_path=path)
    return [tensor.detach().clone() for each in (done, game) for tensor in each.parameters()]


@pytest.mark.parametrize("policy", often(["zero3", "generator=pipeline,*=ddp"]))
def test_a_run_that_is_resumed_at_its_end_gives_its_weights_back(policy, ranks, tmp_path):
    for found in ranks(2).run(again, policy, str(tmp_path / "done.ckpt")):
        half = len(found) // 2
        assert all(map(torch.equal, found[:half], found[half:]))


# ---- validation after the training ----


class Validated(Plain):
    def validation_step(self, batch, _):
        self.shown = [weight.detach().clone() for weight in self.generator.parameters()]


def test_a_validation_after_the_training_shows_the_averages_until_weights_are_written():
    game, made = Validated(), trainer(PhaseStrategy("single"), 1, 3)
    made.fit(game, parts(3, 1), parts(1, 1))
    inside = game.shown
    made.validate(game, parts(1, 1), verbose=False)
    assert all(map(torch.equal, inside, game.shown))
    assert not all(map(torch.equal, inside, game.generator.parameters()))
    game.load_state_dict(Validated().state_dict())
    with pytest.warns(UserWarning, match="player 'generator' is shown with its weights as they are now"):
        made.validate(game, parts(1, 1), verbose=False)
    assert all(map(torch.equal, game.shown, game.generator.parameters()))
