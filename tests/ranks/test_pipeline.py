"""pipeline: what it refuses, holds and moves. tests/scenes/pipelines.py has that it trains as one device does."""

import math
import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gan import Phase, noise
from gan import ranks as every_rank
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.pipelining import passes
from tests.scenes.pipelines import Chained, HeadsInTurn, Painting, chained
from tests.support.composite import WIDTH, SizedEvenly
from tests.support.hard_games import Micro4, Plain, mlp
from tests.support.parity import parts, refused, train, trainer, vectors
from tests.support.planned import payload, planned
from tests.support.scene import having, made_of
from tests.support.sharing_games import OneModule
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


def held():
    """The elements that a rank has of each player between steps, and its modules' classes and keys."""
    game, strategy = Staged(), PhaseStrategy("encoder=ddp,*=pipeline", check=False)
    found = {}

    def modules():
        return {name: type(module) for name, module in game.named_modules()}, list(game.state_dict(keep_vars=True))

    before = modules()

    def look(*_):
        for name, policy in strategy.policies.items():
            weights = policy.belongings.parameters.values()
            found[name] = sum(each.untyped_storage().nbytes() // each.element_size() for each in weights)
        assert modules() == before

    trainer(strategy, 2, 1, callbacks=[LambdaCallback(on_train_batch_end=look)]).fit(game, parts(1, 2))
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
    """The bytes that each kind of collective of this rank has read and filled, in each phase of the second step."""
    found = {}
    batches = {step: {"x": vectors(step)["x"].float()} for step in range(2)}
    for step, phase, trace in watched(SizedEvenly, "pipeline", 2, 2, batches.get, precision="32-true"):
        for kind, size in trace.collectives if step == 1 else ():
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


def unseen(network, x):
    with torch._C.DisableTorchFunction():
        return x.tanh()


def seeded(network, x):
    torch.manual_seed(5)
    return x + torch.randn_like(x)


def changing(self, z, codes):
    self.calls += 1
    x = self.one(z)
    return self.two(x if self.calls < 4 else self.one(x[:, :4]))


class Packs(Chained):
    """A recurrent layer gets and gives sequences that are packed."""

    def __init__(self):
        super().__init__()
        self.one = nn.GRU(4, 8, batch_first=True)

    def forward(self, z, codes):
        packed = pack_padded_sequence(z[:, None], torch.ones(len(z)), batch_first=True)
        return self.two(pad_packed_sequence(self.one(packed)[0], batch_first=True)[0][:, 0])


class ByGenerator(Chained):
    def __init__(self):
        super().__init__()
        self.dice = torch.Generator().manual_seed(5)

    def between(self, x):
        return x + torch.randn(x.shape, dtype=x.dtype, generator=self.dice)


class Centred(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        x = super().forward(x)
        self.center = self.center.lerp(x.detach().mean(0), 0.1)
        return x


class Sloped(Plain):
    """Differentiates through the generator, in a phase in which another player learns."""

    def judge(self, batch):
        z = noise.randn((len(batch["x"]), 4), like=batch["x"]).requires_grad_()
        fake = self.generator(z)
        (slope,) = torch.autograd.grad(fake.sum(), z, create_graph=True)
        return F.softplus(self.discriminator(fake)).mean() + slope.square().mean()


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


class Turning(Chained):
    """From step 1 on it detaches what goes to the next stage, or returns another number. It returns a NaN, too."""

    def __init__(self, how):
        super().__init__()
        self.how, self.late = how, 0

    def forward(self, z, codes):
        x = self.one(z)
        y = self.two(x.detach() if self.late and self.how == "detaches" else x)
        return y, int(bool(self.late) and self.how == "number"), math.nan


class Turned(Painting):
    def on_train_batch_start(self, *_):
        self.generator.late = int(self.step > 0)  # a flag would make another plan


class Routed(Painting):
    """Each rank calls another one of the player's networks, with rows of the same shape."""

    def __init__(self):
        super().__init__()
        self.generator = nn.ModuleList([Chained(), Chained()])

    def fake(self, real):
        return self.generator[dist.get_rank()](noise.randn((len(real), 4), like=real), real)


class Penalised(Plain):
    """WGAN-GP's: what is differentiated is not used in the loss otherwise, so autograd itself has nothing to say."""

    def judge(self, batch):
        mix = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(mix).sum(), mix, create_graph=True)
        return {**super().judge(batch), "penalty": (slope.norm(dim=1) - 1).square().mean()}


def twice_on_one_rank(game, real):
    """It calls the network with twice as many rows."""
    return Painting.fake(game, torch.cat([real] * (1 + dist.get_rank())))[: len(real)]


def one_layer():
    return nn.ModuleDict({"net": mlp(4, 6), "text": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})


class Deeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, z):
        return self.b(self.a(z).tanh())


def by_other_weights(game, real):
    weights = {name: torch.ones(weight.shape) for name, weight in game.generator.named_parameters()}
    return functional_call(game.generator, weights, noise.randn((len(real), 4), like=real))


def another_way(rank, how, words):
    first, second = (words, WITH_THE_TENSOR) if rank == 0 else (WITH_THE_TENSOR, words)
    said = f"its forward {first} on one rank where it {second} on another"
    return partial(Painting, partial(Sometimes, rank, how)), "", said


WITH_THE_TENSOR = "passes a tensor from stage 0 to stage 1"
NOT_TWICE = "a loss differentiates a gradient that has come through its network"
REFUSALS = {  # a game, the pipeline's options or all policies, and words
    "reads": (
        chained(between=lambda _, x: x if x.mean() > 0 else -x),
        "", r"its network reads a value \(__bool__\) between its blocks",
    ),
    "backwards": (
        chained(forward=lambda self, z, _: self.one(self.two(z.repeat(1, 2))[:, :4])[:, :6]),
        "", "its network calls 'one' of stage 0 after a block of stage 1",
    ),
    # Only the rank of the second layer can refuse it.
    "unseen": (
        chained(between=unseen), "", "'two' gets a tensor that was made by a function that torch does not see"
    ),
    "in place": (
        chained(forward=lambda self, z, _: self.two(z.repeat(1, 2).add_(self.one(z)))),
        "", "changes a tensor in place between its blocks",
    ),
    "sums": (
        chained(between=lambda _, x: x - every_rank.mean(x.mean(0))),
        "", r"adds up over the ranks \(gan.ranks\) between its blocks",
    ),
    "changing": (chained(forward=changing, calls=0), "", "its forward calls .one., where it called .two. before"),
    "no rows": (
        chained(forward=lambda self, z, codes: Chained.forward(self, z, codes).mean(0)),
        "", r"returns a tensor of shape \(6,\), not a row for each sample; return a mean for each",
    ),
    "two rows": (
        chained(forward=lambda self, z, codes: Chained.forward(self, torch.cat((z, -z)), codes)),
        "", "not a row for each sample; return the rows of each batch apart",
    ),
    "packs": (
        partial(Painting, Packs), "", "'one' returns what cannot be made without its values, as a PackedSequence"
    ),
    "nonzero": (chained(between=lambda _, x: x + x[x > 0].sum()), "", "whose result depends on values"),
    "by generator": (
        partial(Painting, ByGenerator),
        "", r"by a generator of the game .* leave generator= out, .* generator=zero3",
    ),
    "seeded": (
        chained(between=seeded), "", r"after torch.manual_seed, .* seed inside `with torch.random.fork_rng\(\):`",
    ),
    # What torch calls with the device of a stand-in.
    "pooled": (
        chained(between=lambda _, x: x + F.fractional_max_pool2d(x[:, None, None], 1, output_size=(1, 8))[:, 0, 0]),
        "", "returns after 1 random draws on one rank where it returns after 0 .*=zero3",
    ),
    "a buffer of samples": (
        partial(Painting, made_of(Chained, one=partial(Centred, 4, 8))),
        "+chunks:2", r"buffer 'one.center' looks at the whole batch.*pipeline\+chunks:1",
    ),
    "second order": (
        having(Plain, configure_phases=lambda self: [Phase("g", self.fool, "generator", second_order=True)]),
        "", r"phase 'g' differentiates its gradient \(second_order=True\)",
    ),
    "three stages": (
        Plain, "+stages:3", r"can be cut into 2 stages, .* of 3; type generator=pipeline\+stages:N with an N of 2"
    ),
    "interleaved": (
        Plain, "+schedule:interleaved", "can be cut into 2 stages, .* several; type --strategy generator=ddp"
    ),
    "three chunks": (
        Plain, "+chunks:3",
        r"the 16 samples of a pipeline's ranks do not divide into 3 chunks; .* N of 1, 2, 4, 8, 16,",
    ),
    "other weights": (
        having(Plain, fake=by_other_weights), "",
        r"is called with other weights than its own \(torch.func.functional_call\); otherwise type .*generator=zero3",
    ),
    "shared": (OneModule, "teacher=pipeline,*=ddp", "has parameters that another player has too"),
    # Or what is drawn after it would be other noise on the other ranks.
    "draws less": (
        partial(Painting, Falling), "", r"draws 0 times in 'one', where it drew 1 times before.*generator=zero3,\*=ddp"
    ),
    "leaves out": another_way(0, "leaves out", "returns after 0 random draws"),
    "another": another_way(1, "another", "calls 'two'"),
    "no tensor": another_way(0, "no", "calls 'three'"),
    "detaches": (partial(Turned, partial(Turning, "detaches")), "", "its forward passes on a tensor of"),
    "number": (partial(Turned, partial(Turning, "number")), "", "its forward returns other numbers"),
    "other networks": (
        Routed, "", re.escape("of its tensors are '0.one' with [(8, 4), (8, 6)] or '1.one' with [(8, 4), (8, 6)]")
    ),
    "other rows": (
        having(Painting, fake=twice_on_one_rank), "",
        "is called by the ranks of its pipeline with other shapes, modes or numbers.*"
        + re.escape("'start' with [(8, 4), (8, 3)] or 'start' with [(16, 4), (16, 3)]"),
    ),
    "slope": (Sloped, "", NOT_TWICE),
    "penalty": (
        Penalised, "discriminator=pipeline,*=ddp", NOT_TWICE + r".*type --strategy discriminator=zero3,\*=ddp"
    ),
    "one layer": (
        made_of(Plain, generator=one_layer), "",
        "its 'text' has no two layers between which a pipeline could cut it.*or make 'text' a player of its own$",
    ),
    "wrapped": (
        made_of(Plain, generator=lambda: nn.Sequential(Deeper())), "",
        r"generator=ddp,\*=ddp, or name layers that its forward calls: Player\(..., blocks=\['0.a', '0.b'\]\)$",
    ),
}  # fmt: skip


def refusal(name):
    """By name, because not every game can be sent to a rank."""
    game, options, _ = REFUSALS[name]
    policy = options if "=" in options else f"generator=pipeline{options},*=ddp"
    return refused(game, policy=policy, world=2, steps=2)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_pipeline_cannot_do_is_refused_by_name(name, ranks):
    message, other = ranks(2).run(refusal, name)
    _, options, words = REFUSALS[name]
    assert message is not None and message == other
    assert f"player '{options.partition('=')[0] if '=' in options else 'generator'}'" in message
    assert re.search(words, message), message


class Leaving(nn.Linear):
    def forward(self, x):
        self.left = super().forward(x)
        return self.left


class Reading(Chained):
    def __init__(self):
        super().__init__()
        self.one = Leaving(4, 8)

    def between(self, x):
        return x + self.one.left


def read_elsewhere():
    try:
        train(partial(Painting, Reading), policy="generator=pipeline,*=ddp", world=2, steps=1)
    except Exception as error:  # noqa: BLE001, that of the rank that has no such attribute, or of the other
        return str(error), error.__notes__


def test_an_error_of_the_authors_forward_has_a_note_of_what_differs_in_a_pipeline(ranks):
    for error, notes in ranks(2).run(read_elsewhere):
        assert "has no attribute 'left'" in error
        assert "while player 'generator' was tried under policy pipeline. Each rank runs its forward" in notes[0]
        assert notes[0].endswith("type --strategy generator=zero3,*=ddp")


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


# ---- what the trial of a step finds ----


def through_a_broken_engine():
    slopes = passes.BackwardPass.slopes

    def scaled(self):
        return [None if each is None else 1.01 * each for each in slopes(self)]

    with mock.patch.object(passes.BackwardPass, "slopes", scaled):
        return refused(HeadsInTurn, policy="generator=pipeline,*=ddp", world=2, steps=1, check=True)


def test_one_device_computes_the_network_without_stages_in_a_trial(ranks):
    """So a fault of the pipeline itself is found, which a network in stages would have too."""
    for message in ranks(2).run(through_a_broken_engine):
        assert "player 'generator'" in message and "would not train as one device does" in message
