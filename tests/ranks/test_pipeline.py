"""pipeline: what it refuses, holds and moves. tests/scenes/pipelines.py has that it trains as one device does."""

import math
import re
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gan import Phase, Player, noise
from gan import ranks as every_rank
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.pipelining import passes
from tests.scenes.pipelines import Chained, HeadsInTurn, Painting
from tests.support.composite import WIDTH, SizedEvenly
from tests.support.duel import fit
from tests.support.hard_games import Micro4, Plain
from tests.support.parity import EXACT, distance, parts, refused, train, trainer, vectors
from tests.support.planned import payload, planned
from tests.support.staged_games import Staged
from tests.support.watch import watched

# ---- 1f1b ----


def order_of_passes(schedule):
    """What the first rank did in the generator's last turn: f for a forward, b for a backward, of whichever call."""
    seen = []

    def noting(cls, letter):
        step = cls.step
        return mock.patch.object(cls, "step", lambda self, *args: (seen.append(letter), step(self, *args)))

    with noting(passes.ForwardPass, "f"), noting(passes.BackwardPass, "b"):
        train(Micro4, policy=f"generator=pipeline+chunks:2+schedule:{schedule},*=ddp", world=2, steps=1)
    return "".join(seen[-16:])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_1f1b_runs_a_backward_beside_the_next_forward(schedule, ranks):
    first, last = ranks(2).run(order_of_passes, schedule)
    assert (first.count("f"), first.count("b")) == (last.count("f"), last.count("b")) == (8, 8)
    if schedule == "gpipe":
        assert first == last == "ffbb" * 4
    else:
        assert (first, last) == ("ff" + "fbfb" * 3 + "bb", "ff" + "bfbf" * 3 + "bb")


@pytest.mark.slow
def test_checkpoints_go_from_policy_to_policy(ranks, tmp_path):
    unbroken, path, staged = fit(Staged, "single", 1, 6), None, "encoder=ddp,*=pipeline"
    for step, policy in enumerate([staged, "zero3", f"{staged}+stages:2", "fsdp", "ddp", staged], 1):
        world, before, path = 4 if "stages:2" in policy else 2, path, str(tmp_path / f"{step}.ckpt")
        arrived = ranks(world).run(fit, Staged, policy, world, step, path, before)[0]
    assert distance(arrived, unbroken) < EXACT


def held():
    """The elements that a rank has of each player between steps, and its modules' classes and keys."""
    game, strategy = Staged(), PhaseStrategy("encoder=ddp,*=pipeline", check=False)
    before = {name: type(module) for name, module in game.named_modules()}, list(game.state_dict(keep_vars=True))
    found = {}

    class AtEnd(Callback):
        def on_train_batch_end(self, *_):
            for name, policy in strategy.policies.items():
                found[name] = sum(
                    weight.untyped_storage().nbytes() // weight.element_size()
                    for weight in policy.belongings.parameters.values()
                )
            assert (
                {name: type(module) for name, module in game.named_modules()},
                list(game.state_dict(keep_vars=True)),
            ) == before

    trainer(strategy, 2, 1, callbacks=[AtEnd()]).fit(game, parts(1, 2))
    whole = sum(weight.numel() for weight in game.generator.parameters())
    assert not any("forward" in vars(module) or "_call_impl" in vars(module) for module in game.modules())
    return found, whole


def test_a_rank_has_its_own_stages_and_modules_stay_what_they_are(ranks):
    results = ranks(2).run(held)
    for player in ("generator", "teacher"):
        parts_of_it = [found[player] for found, _ in results]
        whole = results[0][1]
        assert max(parts_of_it) < 0.65 * whole
        assert whole <= sum(parts_of_it) < whole + 60  # one number in place of each weight that is elsewhere


def payloads():
    """The bytes that each kind of collective of this rank has read and filled, in each phase of the third step."""
    found = {}
    batches = {step: {"x": vectors(step)["x"].float()} for step in range(3)}
    for step, phase, trace in watched(SizedEvenly, "pipeline", 2, 3, batches.get, precision="32-true"):
        for kind, size in trace.collectives if step == 2 else ():
            sums = found.setdefault(phase, {})
            sums[kind] = sums.get(kind, 0) + size
    return found


def test_a_phase_moves_activations_and_no_weights(ranks):
    """As `gan.plan` says: the samples of both ranks go from stage to stage, and their gradients come back."""
    batch = {"x": vectors(0)["x"].float()}
    plan = payload(planned(SizedEvenly, "pipeline", 2, batch))
    results = ranks(2).run(payloads)
    rows = 16 * WIDTH * 4  # bytes of all samples at any place of the network
    flags = 400  # bytes of flags, norms and signatures
    for phase, calls, backwards in (("first", 2, 2), ("second", 2, 1)):
        # In each call, and in each backward, one rank sends and the other receives.
        assert sum(found[phase]["send"] for found in results) == (calls + backwards) * rows == 2 * plan[phase]["send"]
        for found in results:
            gathered = found[phase]["_allgather_base_"] / 1.5  # it reads half of what it fills
            assert calls * rows <= gathered < calls * rows + flags
            assert set(found[phase]) == {"send", "recv_", "scatter_", "gather_", "_allgather_base_", "allreduce_"}
        # An input's gradient is added up: that of the second player's, in the first player's turn.
        summed = rows if phase == "first" else 0
        assert all(summed <= found[phase]["allreduce_"] < summed + flags for found in results)
        assert plan[phase]["all-reduce"] == summed
        kinds = {"all-gather": calls, "scatter": calls, "gather": backwards}
        assert {kind: plan[phase][kind] for kind in kinds} == {kind: number * rows for kind, number in kinds.items()}


# ---- refusals ----


def refusal(game, policy="generator=pipeline,*=ddp", world=2):
    try:
        trainer(PhaseStrategy(policy, check=False), world, 2).fit(game(), parts(2, world))
    except UserError as error:
        return str(error)
    return None


class ReadsValue(Chained):
    def between(self, x):
        return x if x.mean() > 0 else -x


class Backwards(Chained):
    def forward(self, z, codes):
        return self.one(self.two(z.repeat(1, 2))[:, :4])[:, :6]


class Unseen(Chained):
    """Between its layers is a function that torch does not see, so only the rank of the second layer can refuse it."""

    def between(self, x):
        with torch._C.DisableTorchFunction():
            return x.tanh()


class InPlace(Chained):
    def forward(self, z, codes):
        x = z.repeat(1, 2)
        x += self.one(z)
        return self.two(x)


class Summed(Chained):
    def between(self, x):
        return x - every_rank.mean(x.mean(0))


class Changing(Chained):
    calls = 0

    def forward(self, z, codes):
        self.calls += 1
        x = self.one(z)
        return self.two(x if self.calls < 4 else self.one(x[:, :4]))


class NoRows(Chained):
    def forward(self, z, codes):
        return super().forward(z, codes).mean(0)


class TwoRows(Chained):
    def forward(self, z, codes):
        return super().forward(torch.cat((z, -z)), codes)


class Packs(Chained):
    """A recurrent layer gets and gives sequences that are packed."""

    def __init__(self):
        super().__init__()
        self.one = nn.GRU(4, 8, batch_first=True)

    def forward(self, z, codes):
        packed = pack_padded_sequence(z[:, None], torch.ones(len(z)), batch_first=True)
        return self.two(pad_packed_sequence(self.one(packed)[0], batch_first=True)[0][:, 0])


class Nonzero(Chained):
    def between(self, x):
        return x + x[x > 0].sum()


class ByGenerator(Chained):
    def __init__(self):
        super().__init__()
        self.dice = torch.Generator().manual_seed(5)

    def between(self, x):
        return x + torch.randn(x.shape, dtype=x.dtype, generator=self.dice)


class Seeded(Chained):
    def between(self, x):
        torch.manual_seed(5)
        return x + torch.randn_like(x)


class Pooled(Chained):
    """Draws by what torch calls with the device of a stand-in."""

    def between(self, x):
        return x + F.fractional_max_pool2d(x[:, None, None], 1, output_size=(1, 8))[:, 0, 0]


class Sized(Chained):
    """Its buffer learns from samples."""

    def __init__(self):
        super().__init__()
        self.one = Centred(4, 8)


class Centred(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        x = super().forward(x)
        self.center = self.center.lerp(x.detach().mean(0), 0.1)
        return x


class Squared(Plain):
    def configure_phases(self):
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator", second_order=True)


class Sloped(Plain):
    """Differentiates through the generator, in a phase in which another player learns."""

    def judge(self, batch):
        z = noise.randn((len(batch["x"]), 4), like=batch["x"]).requires_grad_()
        fake = self.generator(z)
        (slope,) = torch.autograd.grad(fake.sum(), z, create_graph=True)
        return F.softplus(self.discriminator(fake)).mean() + slope.square().mean()


class Shared(Plain):
    """The teacher is the generator's base, without its own gradients."""

    def configure_players(self):
        generator, discriminator = super().configure_players()
        for weight in self.generator[0].parameters():
            weight.requires_grad_(False)
        yield Player("base", self.generator[0])
        yield generator
        yield discriminator


REFUSALS = [
    (partial(Painting, ReadsValue), "", r"its forward reads a value \(__bool__\) between its blocks"),
    (partial(Painting, Backwards), "", "its forward calls 'one' of stage 0 after a block of stage 1"),
    (partial(Painting, Unseen), "", "'two' gets a tensor that was made by a function that torch does not see"),
    (partial(Painting, InPlace), "", "changes a tensor in place between its blocks"),
    (partial(Painting, Summed), "", r"adds up over the ranks \(gan.ranks\) between its blocks"),
    (partial(Painting, Changing), "", "its forward calls .one., where it called .two. before"),
    (
        partial(Painting, NoRows),
        "",
        r"returns a tensor of shape \(6,\), not a row for each sample; return a mean for each",
    ),
    (partial(Painting, TwoRows), "", "not a row for each sample; return the rows of each batch apart"),
    (partial(Painting, Packs), "", "'one' returns what cannot be made without its values, as a PackedSequence"),
    (partial(Painting, Nonzero), "", "whose result depends on values"),
    (partial(Painting, ByGenerator), "", r"by a generator of the game .* leave generator= out, .* generator=zero3"),
    (partial(Painting, Seeded), "", r"after torch.manual_seed, .* seed inside `with torch.random.fork_rng\(\):`"),
    (partial(Painting, Pooled), "", "returns after 1 random draws on one rank where it returns after 0 .*=zero3"),
    (partial(Painting, Sized), "+chunks:2", r"buffer 'one.center' looks at the whole batch.*pipeline\+chunks:1"),
    (Squared, "", r"phase 'generator' differentiates its gradient \(second_order=True\)"),
    (Plain, "+stages:3", r"can be cut into 2 stages, .* of 3; type generator=pipeline\+stages:N with an N of 2"),
    (Plain, "+schedule:interleaved", "can be cut into 2 stages, .* several; type --strategy generator=ddp"),
    (Plain, "+chunks:3", r"the 16 samples of a pipeline's ranks do not divide into 3 chunks; .* N of 1, 2, 4, 8, 16,"),
    (Shared, "", "has parameters that another player has too"),
]


@pytest.mark.parametrize(
    ("game", "options", "words"),
    REFUSALS,
    ids=[f"{getattr(each[0], 'args', each)[0].__name__}{each[1]}" for each in REFUSALS],
)
def test_what_a_pipeline_cannot_do_is_refused_by_name(game, options, words, ranks):
    message, other = ranks(2).run(refusal, game, f"generator=pipeline{options},*=ddp")
    assert message is not None and message == other
    assert "player 'generator'" in message
    assert re.search(words, message), message


class Dropping(nn.Linear):
    """A block whose dropout ends."""

    calls, last = 0, 2

    def forward(self, x):
        self.calls += 1
        return F.dropout(super().forward(x), 0.5 if self.calls <= self.last else 0.0)


class Falling(Chained):
    def __init__(self):
        super().__init__()
        self.one = Dropping(4, 8)


def test_a_block_that_draws_less_often_than_before_is_refused(ranks):
    """Or what is drawn after it would be other noise on the other ranks."""
    message, _ = ranks(2).run(refusal, partial(Painting, Falling))
    assert "draws 0 times in 'one', where it drew 1 times before" in message and "generator=zero3,*=ddp" in message


def calls_of_each_block():
    game = Painting(Falling)
    game.generator.two = Dropping(8, 6)
    blocks = game.generator.one, game.generator.two
    for block in blocks:
        block.last = 9
    trainer(PhaseStrategy("generator=pipeline+chunks:4,*=ddp", check=False), 2, 2).fit(game, parts(2, 2))
    return [block.calls for block in blocks]


def test_what_a_block_counts_is_the_same_on_all_ranks(ranks):
    """A validation computes the whole network on each rank, and a checkpoint keeps the first rank's numbers."""
    assert ranks(2).run(calls_of_each_block) == [[4, 4]] * 2


class Sometimes(Chained):
    """One rank leaves out the last layer, calls another one in its place, or gives it no tensor of the first stage."""

    def __init__(self, rank, how):
        super().__init__()
        self.rank, self.how, self.three = rank, how, nn.Linear(8, 6)  # in a stage of its own

    def forward(self, z, codes):
        x = self.one(z)
        if dist.get_rank() != self.rank:
            return self.three(x)
        if self.how == "leaves out":
            return x[:, :6]
        return self.two(x) if self.how == "another" else self.three(z.repeat(1, 2))


@pytest.mark.parametrize(
    ("how", "words", "rank"),
    [("leaves out", "returns after 0 random draws", 0), ("another", "calls 'two'", 1), ("no", "calls 'three'", 0)],
)
def test_a_forward_that_goes_another_way_on_one_rank_is_refused_by_all(how, words, rank, ranks):
    message, other = ranks(2).run(refusal, partial(Painting, partial(Sometimes, rank, how)))
    first, second = (words, WITH_THE_TENSOR) if rank == 0 else (WITH_THE_TENSOR, words)
    assert f"player 'generator': its forward {first} on one rank where it {second} on another" in message
    assert message == other


class Turning(Chained):
    """From step 1 on it detaches what goes to the next stage, or returns another number. It returns a NaN, too."""

    def __init__(self, how):
        super().__init__()
        self.how, self.late = how, False

    def forward(self, z, codes):
        x = self.one(z)
        y = self.two(x.detach() if self.late and self.how == "detaches" else x)
        return y, int(self.late and self.how == "number"), math.nan


class Turned(Painting):
    def on_train_batch_start(self, *_):
        self.generator.late = self.step > 0


@pytest.mark.parametrize(("how", "words"), [("detaches", "passes on a tensor of"), ("number", "returns other numbers")])
def test_a_forward_that_goes_another_way_in_a_later_step_is_refused(how, words, ranks):
    message = ranks(2).run(refusal, partial(Turned, partial(Turning, how)))[0]
    assert f"player 'generator': its forward {words}" in message
    assert ranks(2).run(refusal, partial(Turned, partial(Turning, "not"))) == [None, None]


WITH_THE_TENSOR = "passes a tensor from stage 0 to stage 1"


class Routed(Painting):
    """Each rank calls another one of the player's networks, with rows of the same shape."""

    def __init__(self):
        super().__init__()
        self.generator = nn.ModuleList([Chained(), Chained()])

    def fake(self, real):
        return self.generator[dist.get_rank()](noise.randn((len(real), 4), like=real), real)


def test_ranks_that_call_other_networks_of_a_player_are_refused_together(ranks):
    message, other = ranks(2).run(refusal, Routed)
    assert message == other and "player 'generator'" in message
    assert "of its tensors are '0.one' with [(8, 4), (8, 6)] or '1.one' with [(8, 4), (8, 6)]" in message


def test_a_derivative_of_a_derivative_is_an_error(ranks):
    for message in ranks(2).run(broken_by_autograd):
        assert "player 'generator': a loss differentiates a gradient that has come through its network" in message


class Penalised(Plain):
    """WGAN-GP's: what is differentiated is not used in the loss otherwise, so autograd itself has nothing to say."""

    def judge(self, batch):
        mix = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(mix).sum(), mix, create_graph=True)
        return {**super().judge(batch), "penalty": (slope.norm(dim=1) - 1).square().mean()}


def test_a_gradient_through_stages_cannot_be_differentiated(ranks):
    for message in ranks(2).run(refusal, Penalised, "discriminator=pipeline,*=ddp"):
        assert "player 'discriminator': a loss differentiates a gradient that has come through its network" in message
        assert "type --strategy discriminator=zero3,*=ddp" in message


def clamped(weight):
    weight.grad.clamp_(-1e-3, 1e-3)


class ClampsGradients(Plain):
    def __init__(self):
        super().__init__()
        for weight in self.generator.parameters():
            weight.register_post_accumulate_grad_hook(clamped)


def test_a_hook_that_clips_the_gradient_of_a_stage_is_refused(ranks):
    for message in ranks(2).run(
        refused, ClampsGradients, policy="generator=pipeline,*=ddp", world=2, steps=1, check=True
    ):
        assert "player 'generator': the gradients of" in message and "belongs into on_before_optimizer_step" in message


def broken_by_autograd():
    try:
        trainer(PhaseStrategy("generator=pipeline,*=ddp", check=False), 2, 2).fit(Sloped(), parts(2, 2))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("stages", r"option 'stages' of strategy 'pipeline' needs a value, e.g. pipeline\+stages:"),
        ("schedule:dual", "expected one of gpipe, 1f1b, interleaved"),
    ],
)
def test_options_have_values(typed, words):
    with pytest.raises(UserError, match=words):
        PhaseStrategy(f"pipeline+{typed}")


def differently():
    """One rank calls the network with twice as many rows."""
    game = Painting()
    game.fake = lambda real: Painting.fake(game, torch.cat([real] * (1 + dist.get_rank())))[: len(real)]
    try:
        trainer(PhaseStrategy("generator=pipeline,*=ddp", check=False), 2, 2).fit(game, parts(2, 2))
    except UserError as error:
        return str(error)
    return ""


class OfOneLayer(Plain):
    def __init__(self):
        super().__init__()
        self.generator = nn.ModuleDict({"net": self.generator, "text": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})


def test_a_network_that_is_too_small_for_stages_is_named(ranks):
    for message in ranks(2).run(refused, OfOneLayer, policy="generator=pipeline,*=ddp", world=2, steps=1):
        assert "its 'text' has no two layers between which a pipeline could cut it" in message
        assert message.endswith("or make 'text' a player of its own")


def test_ranks_that_call_the_network_differently_are_named(ranks):
    message, other = ranks(2).run(differently)
    assert message == other
    assert "is called by the ranks of its pipeline with other shapes, modes or numbers" in message
    assert "'start' with [(8, 4), (8, 3)] or 'start' with [(16, 4), (16, 3)]" in message


# ---- what the trial of a step finds ----


def through_a_broken_engine(what):
    slopes, used = passes.BackwardPass.slopes, passes.BackwardPass._used
    broken = {
        "nothing": {},
        "scaled": {"slopes": lambda self: [None if each is None else 1.01 * each for each in slopes(self)]},
        "zeros": {"_used": lambda self, given: {number: used(self, given).get(number) for number in self.plan.outputs}},
    }
    with ExitStack() as stack:
        for name, method in broken[what].items():
            stack.enter_context(mock.patch.object(passes.BackwardPass, name, method))
        return refused(HeadsInTurn, policy="generator=pipeline,*=ddp", world=2, steps=1, check=True)


@pytest.mark.parametrize("what", ["nothing", "scaled", "zeros"])
def test_one_device_computes_the_network_without_stages_in_a_trial(what, ranks):
    """So a fault of the pipeline itself is found, which a network in stages would have too."""
    for message in ranks(2).run(through_a_broken_engine, what):
        if what == "nothing":
            assert message is None
        else:
            assert "player 'generator'" in message and "would not train as one device does" in message
