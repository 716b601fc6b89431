"""CycleGAN's losses, gradients, steps and pool equal the published ones."""

import random
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from gan import noise
from gan.games.cyclegan import CycleGan
from gan.games.pix2pix import linear_decay
from gan.pool import ImagePool
from nets.discriminator import PatchGan
from nets.resnet import ResnetGenerator
from strategies import PhaseStrategy
from tests.support import families
from tests.support.families import gradients, recorded
from tests.support.parity import trainer
from tests.unit.nets.test_resnet import pictures

NETWORKS = {"G_A": ("generators", "to_b"), "G_B": ("generators", "to_a")}
NETWORKS |= {"D_A": ("discriminators", "of_b"), "D_B": ("discriminators", "of_a")}
OURS = {"G_A": "gan_b", "G_B": "gan_a", "cycle_A": "cycle_a", "cycle_B": "cycle_b"}
OURS |= {"idt_A": "identity_b", "idt_B": "identity_a"}
CANCELLED = 1e-12  # the norm of a gradient that is zero but for rounding


@pytest.fixture(params=[6, pytest.param(9, marks=pytest.mark.slow)])
def case(request):
    """The figures, and a game with the recipe's weights and batch."""
    figures, blocks = families.load("pix2pix.pt"), request.param
    settings, golden = figures["settings"], figures[f"cyclegan_{blocks}blocks"]
    game = CycleGan(
        partial(ResnetGenerator, width=settings["cycle_ngf"], blocks=blocks),
        partial(PatchGan, 3, settings["cycle_ndf"], norm="instance"),
        linear_decay(10**9),
        pool=0,
    ).double()
    for seed, (name, (kind, which)) in enumerate(NETWORKS.items(), settings["seed"] + 10):
        keys = golden["keys"][f"{name[0]}_A"]
        net = getattr(game, kind)[which]
        assert {key: list(value.shape) for key, value in net.state_dict().items()} == keys
        net.load_state_dict(families.weights(keys, seed))
    a, b = pictures(settings["seed"] + 14, settings["cycle_batch"], settings["cycle_crop"])
    return golden, game, {"a": a, "b": b}


def without_noise(grads):
    return {name: [0.0, 0.0] if norm < CANCELLED else [norm, total] for name, (norm, total) in grads.items()}


def test_losses_and_gradients_equal_the_published_ones(case):
    golden, game, batch = case
    losses = game.fool(batch)
    total = sum(losses.values())
    game.generators.requires_grad_(True)
    total.backward()
    found = {theirs: losses[ours].item() for theirs, ours in OURS.items()} | {"G": total.item()}
    assert families.difference(found, golden["losses_g"]) < 1e-9
    for name, wanted in golden["g_grads"].items():
        kind, which = NETWORKS[name]
        assert families.difference(gradients(getattr(game, kind)[which]), without_noise(wanted)) < 1e-9
    game.zero_grad()
    game.forget_shared()
    losses = game.judge(batch)
    sum(losses.values()).backward()
    found = {"D_A": losses["gan_b"].item(), "D_B": losses["gan_a"].item()}
    assert families.difference(found, golden["losses_d"]) < 1e-9
    for name, wanted in golden["d_grads"].items():
        kind, which = NETWORKS[name]
        assert families.difference(gradients(getattr(game, kind)[which]), without_noise(wanted)) < 1e-9


def test_steps_equal_the_published_ones(case):
    golden, game, batch = case
    seen = recorded(game, "fool", "judge")
    trainer(PhaseStrategy("ddp", check=False), 1, 3).fit(game, DataLoader([batch] * 3, batch_size=None))
    found = [
        {**{theirs: fooled[ours] for theirs, ours in OURS.items()}, "D_A": judged["gan_b"], "D_B": judged["gan_a"]}
        for fooled, judged in zip(seen[::2], seen[1::2], strict=True)
    ]
    assert families.difference(found, golden["steps"]) < 1e-7


def test_steps_with_other_options_equal_the_published_ones():
    """Three steps of the published code: no identity, another weight, and discriminators of two layers."""
    wanted = {
        "gan_b": [3.014355430982091, 2.682293088799236, 2.442237910076726],
        "gan_a": [2.444329645429838, 2.134549130081722, 1.8817969119091988],
        "cycle_a": [2.9866451642510055, 2.957872929968951, 2.9267051229436185],
        "cycle_b": [3.2069983200077328, 3.165109259068612, 3.136580396679381],
        "of_b": [1.7529254605722246, 1.6272811877629514, 1.533832202322395],
        "of_a": [1.4538246602384497, 1.3430293227002124, 1.2567218926387884],
    }
    networks = partial(ResnetGenerator, width=4, blocks=6), partial(PatchGan, 3, 4, 2, norm="instance")
    game = CycleGan(*networks, linear_decay(10**9), pool=0, cycle=5.0, identity=0.0).double()
    for seed, (kind, which) in enumerate(NETWORKS.values(), 5):
        net = getattr(game, kind)[which]
        shapes = {key: list(value.shape) for key, value in net.state_dict().items()}
        net.load_state_dict(families.weights(shapes, seed))
    batch, seen = dict(zip("ab", pictures(9, 2, 32), strict=True)), recorded(game, "fool", "judge")
    trainer(PhaseStrategy("ddp", check=False), 1, 3).fit(game, DataLoader([batch] * 3, batch_size=None))
    turns = zip(seen[::2], seen[1::2], strict=True)
    found = [fooled | {"of_b": judged["gan_b"], "of_a": judged["gan_a"]} for fooled, judged in turns]
    steps = [dict(zip(wanted, step, strict=True)) for step in zip(*wanted.values(), strict=True)]
    assert families.difference(found, steps) < 1e-9


def test_the_pool_follows_the_published_rule(monkeypatch):
    """One picture at a time, as published batches have, with the published numbers."""
    figures = families.load("pix2pix.pt")
    published = random.Random(figures["settings"]["pool_seed"])
    monkeypatch.setattr(random, "Random", lambda _seed: published)
    pool, found = ImagePool(figures["settings"]["pool_size"]), []
    for number in range(24):
        with noise.at(noise.Place((number,), 0, 1, 1)):
            found.append(int(pool.query(torch.full((1, 1), float(number))).item()))
    assert [found[at : at + 2] for at in range(0, 24, 2)] == figures["pool"]


def test_a_pool_of_no_pictures_keeps_none():
    pool = ImagePool(0)
    for number in range(8):
        with noise.at(noise.Place((number,), 0, 1, 1)):
            assert pool.query(torch.full((1, 1), float(number))).item() == number
    assert not pool.slots
