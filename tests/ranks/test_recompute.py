"""The option recompute: the same training to the last bit, with less kept for backward."""

import copy
import gc
import weakref
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import Adam
from torch.utils import _pytree as pytree

from gan import Player, noise
from gan.files.errors import UserError
from gan.ranks import summed_by
from nets.norm import synchronised
from strategies.options.blocks import LayerGroups, find_blocks
from strategies.options.recompute import Recompute
from tests.ranks.test_games import GAMES
from tests.scenes.updates import Assigning, Counting, Featured, InARow, Keeping, Tossing
from tests.support.counted import Counted
from tests.support.hard_games import HARD, BatchNorms, Plain, TwoHeads, mlp
from tests.support.parity import distance, often, train
from tests.support.watch import moved

WHOLE = {"SharedLayer": "discriminator", "TwoPhases": "discriminator"}  # players that have no block

# ---- parity ----


class Noisy(Plain):
    """Noise of both kinds inside the networks, and two of their forwards before a backward."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), Grain(), nn.Dropout(0.5), nn.Linear(8, 6))

    def fool(self, batch):
        return super().fool(batch) + super().fool(batch)


class Grain(nn.Module):
    def forward(self, x):
        return torch.tanh(x * (1 + noise.randn(x.shape, like=x)))


class SharedScore(Plain):
    """A score made with the graph of both players, of whom only one learns when it is differentiated."""

    def configure_phases(self):
        discriminator, generator = super().configure_phases()
        yield generator
        yield discriminator

    def fool(self, batch):
        return softplus(-self.shared("score", lambda x: self.discriminator(self.fake(x)), batch["x"])).mean()


class Named(HARD["TwoPhases"]):
    """Blocks that the network's own methods call several times."""

    def configure_players(self):
        generator, discriminator = super().configure_players()
        yield generator
        yield replace(discriminator, blocks=["trunk", "left"])


MORE = {"Noisy": Noisy, "SharedScore": SharedScore, "Named": Named}
MORE |= {"Tossing": Tossing, "Counting": Counting, "Assigning": Assigning, "Keeping": Keeping, "Featured": Featured}
OFTEN = ["Penalty", "SometimesReached", "Noisy", "SharedScore", "Tossing", "Counting", "Assigning", "Keeping"]
MORE |= {"InARow": InARow}
OFTEN += ["Featured", "InARow"]


@pytest.mark.parametrize("name", often(HARD | MORE, OFTEN))
def test_one_device_trains_the_same_to_the_last_bit(name):
    """Under other policies: test_rehearsal.py, test_contract.py and scenes."""
    game, policy = (HARD | MORE)[name], {"*": "single+recompute"}
    policy |= {WHOLE[name]: "single"} if name in WHOLE else {}
    assert distance(train(game, policy=policy, steps=4), train(game, policy="single", steps=4)) == 0


# ---- what ranks are asked ----


def test_ranks_are_asked_nothing_twice(ranks):
    expected = ranks(2).run(moved, BatchNorms, "ddp", 2, 1)
    assert ranks(2).run(moved, BatchNorms, "ddp+recompute", 2, 1) == expected


# ---- one network by itself ----


def recomputing_copy(net, **kwargs):
    """A copy of a network that recomputes, beside the network that does not."""
    made = copy.deepcopy(net)
    return made, Recompute(Player("net", made, partial(Adam, lr=1e-3), **kwargs))


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(
        spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 6), nn.Tanh()
    ).double()


def slopes(net, x, order):
    """Gradients of the weights, of a loss with a gradient of this order in it; and the buffers afterwards."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = net(1 * x).sum() + net(2 * x).square().sum()
    for _ in range(order):
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        y = slope.square().sum()
    y.backward()
    return [w.grad for w in net.parameters() if w.grad is not None], list(net.buffers())


def a_row():
    """Groups of layers, and blocks between them, one of which has its output overwritten."""
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(True), *layers(4), Overwritten(), nn.ReLU(True), *layers(2)).double()


@pytest.mark.parametrize(("make", "order"), [(two_layers, 0), (two_layers, 1), (two_layers, 2), (a_row, 0)])
def test_gradients_of_every_order_and_buffers_are_the_same(make, order):
    net, x = make(), torch.randn(8, 6, dtype=torch.float64)
    made, _ = recomputing_copy(net)
    for found, expected in zip(slopes(made, x, order), slopes(net, x, order), strict=True):
        assert len(found) == len(expected) > 0
        assert all(map(torch.equal, found, expected))


def test_a_block_that_draws_nothing_sets_no_dice():
    """That takes longer than a small block."""
    net, _ = recomputing_copy(nn.Sequential(nn.Linear(6, 6)), blocks=["0"])
    with mock.patch("numpy.random.set_state", side_effect=AssertionError):
        net(torch.ones(2, 6)).sum().backward()


def test_modes_and_number_kind_of_the_forward_come_back():
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.a(x) * torch.ones(6)  # of the default kind
            return self.b(torch.tanh(x) if self.training else torch.relu(x))

    found = []
    net = Kinds().double()
    for each in (net, recomputing_copy(net)[0]):
        torch.set_default_dtype(torch.float64)
        try:
            loss = each(torch.linspace(-1, 1, 6).double()).sum()
        finally:
            torch.set_default_dtype(torch.float32)
        each.eval()
        loss.backward()
        assert not each.a.training
        assert torch.get_default_dtype() == torch.float32
        found.append([weight.grad for weight in each.parameters()])
    assert all(map(torch.equal, *found))


def test_a_forward_without_gradients_is_the_authors_own():
    net = two_layers()
    made, _ = recomputing_copy(net)
    with mock.patch("strategies.options.recompute.checkpoint", side_effect=AssertionError("was called")):
        with torch.no_grad():
            made(torch.randn(4, 6, dtype=torch.float64))
        with pytest.raises(AssertionError, match="was called"):
            made(torch.randn(4, 6, dtype=torch.float64))
        made.requires_grad_(False)
        made(torch.randn(4, 6, dtype=torch.float64))


def test_the_graph_is_gone_with_its_loss():
    """Nothing that a recomputation keeps may keep itself."""
    made, _ = recomputing_copy(BatchNorms().discriminator.double())
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True) * 1
    ref = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        made(x).sum().backward()
        del x
        assert ref() is None
    finally:
        gc.enable()


# ---- graphs older than their weights ----


def test_a_graph_older_than_its_weights_is_the_error_of_plain_torch():
    """A bias is in no graph of plain torch, but a second forward would see it."""
    made, recompute = recomputing_copy(mlp(6, 1))
    loss = made(torch.randn(4, 6)).sum()
    with torch.no_grad():
        made[0].bias.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: weights of block '\[0:3\]' of player"):
        loss.backward()
    loss = made(torch.randn(4, 6)).sum()
    recompute.updates += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- what cannot be restored is refused ----


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)


class Overwriting(Two):
    def forward(self, x):
        return self.second(torch.relu_(x) + self.first(x))


class Asking(Two):
    def forward(self, x, layer):
        return self.second(torch.tanh(layer(self.first(x))))


class Overwritten(Two):
    """A part whose output the next layer overwrites."""

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Outside(nn.Module):
    """Its block uses a layer that it does not hold."""

    def __init__(self):
        super().__init__()
        self.block, self.layer = Asking(), spectral_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.block(x, self.layer)


@pytest.mark.parametrize(
    ("net", "blocks", "words"),
    [
        (Overwriting, None, "block '' of player 'net' overwrites its input"),
        (Outside, ["block"], r"block 'block' of player 'net' changes buffer '_u' of a _SpectralNorm"),
    ],
)
def test_a_block_that_changes_what_is_outside_of_it_is_refused(net, blocks, words):
    made, _ = recomputing_copy(net(), blocks=blocks)
    with pytest.raises(UserError, match=words):
        made(torch.randn(4, 6))


def test_torchs_own_synchronised_batch_norm_is_refused_where_it_communicates():
    net = nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6), nn.Linear(6, 6))
    with summed_by(lambda values: 2 * values, 0, 2):
        with synchronised():
            recomputing_copy(net)
        with pytest.raises(UserError, match=r"cannot run torch's SyncBatchNorm again; type Trainer\(sync_batchnorm="):
            recomputing_copy(net)


# ---- which blocks it finds ----


def blocks(module, **kwargs):
    found = find_blocks(Player("net", module, **kwargs))
    return [each for name, block in found for each in (block.names if isinstance(block, LayerGroups) else [name])]


@pytest.mark.parametrize(
    ("game", "player", "expected"),
    [
        ("sean", 0, ["model[1:10]", "model[10:16]"]),
        ("sean", 1, ["head_0", "G_middle_0", "G_middle_1", "up_0"]),
        ("sean", 2, [f"discriminator_{k}.model{n}[0:2]" for k in (0, 1) for n in ("0", "1.0")]),
        ("dmd2", 1, ["embed[0:3]", "down.0", "down.1", "middle", "up.0", "up.1"]),
        ("dmd2", 2, [""]),
    ],
)
def test_the_blocks_of_known_networks(game, player, expected):
    assert blocks(list(GAMES[game]().configure_players())[player].module) == expected


class Wrapped(nn.Module):
    """A network of attributes, without a list, in a wrapper."""

    def __init__(self):
        super().__init__()
        self.net = nn.Module()
        self.net.head, self.net.body, self.net.paint = Asking(), Asking(), nn.Linear(6, 6)


def layers(number):
    return [layer for _ in range(number) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(True))]


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Wrapped(), ["net.head", "net.body"]),
        (nn.Sequential(*layers(3)), ["[0:9]"]),
        (nn.Sequential(*layers(4)), ["[0:6]", "[6:12]"]),
        (nn.Sequential(*layers(9)), ["[0:9]", "[9:18]", "[18:27]"]),
        # What stands before the first layer with weights, such as an activation in place, is in no block.
        (nn.Sequential(nn.ReLU(True), *layers(4)), ["[1:7]", "[7:13]"]),
        (nn.Sequential(*layers(2), Asking(), nn.ReLU(True), *layers(2)), ["6", "[0:6]", "[8:14]"]),
    ],
)
def test_a_row_of_layers_runs_in_groups_and_a_wrapper_changes_nothing(net, expected):
    assert blocks(net) == expected


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (
            lambda: Player("net", TwoHeads(), blocks=["trunks"]),
            "TwoHeads has no module 'trunks' to be a block; known are",
        ),
        (
            lambda: blocks(nn.ModuleList([mlp(2, 2)]), blocks=["", "0"]),
            "block '' is a ModuleList, which has no forward",
        ),
        (lambda: blocks(Outside(), blocks=["block", "block.first"]), "block 'block.first' is inside block 'block'"),
        (
            lambda: blocks(TwoHeads()),
            r"finds no block of several layers in its TwoHeads; leave the option out for it, --strategy .*, or name",
        ),
        (lambda: blocks(nn.Linear(2, 2)), "finds no block"),
        (lambda: blocks(mlp(2, 2), blocks=[]), "finds no block"),
    ],
)
def test_what_cannot_be_a_block_is_refused(make, answer):
    with pytest.raises(UserError, match=answer):
        make()


# ---- the author's modules stay what they are ----


def test_a_forward_that_an_author_put_on_the_module_itself_stays():
    net = Asking()
    net.forward = own = lambda x: x
    Recompute(Player("net", net)).release()
    assert net.forward is own


def test_a_forward_that_the_authors_code_has_put_there_and_deleted_is_the_classs():
    net, x = Asking(), torch.ones(1, 6)
    before = net(x, torch.tanh)
    made = Recompute(Player("net", net))
    net.forward = lambda x: x
    del net.forward
    made.release()
    assert torch.equal(net(x, torch.tanh), before)


# ---- what is kept ----


def kept(net, *inputs):
    """Bytes that live between a forward and its backward."""
    gc.collect()
    rows = len(inputs[0])
    before = {tensor.untyped_storage()._cdata for tensor in (*net.state_dict().values(), *inputs)}
    with Counted() as counted, noise.at(noise.Place(("test",), 0, rows, rows)):
        out = net(*inputs)
    found = sum(storage().nbytes() for key, storage in counted.alive.items() if key not in before)
    (out if isinstance(out, torch.Tensor) else sum(each.sum() for each in pytree.tree_leaves(out))).sum().backward()
    return found


def plain_layers():
    return nn.Sequential(*[layer for _ in range(9) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh())])


def test_a_row_of_layers_keeps_what_its_groups_begin_with():
    net, x = plain_layers(), torch.randn(64, 32)
    made, _ = recomputing_copy(net)
    assert kept(net, x) > 2 * 9 * x.nbytes  # each linear layer's output and each activation's, at least
    assert kept(made, x) == 3 * x.nbytes  # the outputs of three groups, of which the last is the network's
