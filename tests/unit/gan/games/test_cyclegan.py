"""CycleGAN's losses, gradients, steps and pool equal the published ones."""

import random
from functools import partial

import numpy
import pytest
import torch

from gan import noise
from gan.games.cyclegan import CycleGan
from gan.games.pix2pix import linear_decay
from gan.pool import ImagePool
from nets.discriminator import PatchGan
from nets.resnet import ResnetGenerator
from tests.support import families
from tests.support.families import recorded

NETWORKS = {"G_A": ("generators", "to_b"), "G_B": ("generators", "to_a")}
NETWORKS |= {"D_A": ("discriminators", "of_b"), "D_B": ("discriminators", "of_a")}
OURS = {"G_A": "gan_b", "G_B": "gan_a", "cycle_A": "cycle_a", "cycle_B": "cycle_b"}
OURS |= {"idt_A": "identity_b", "idt_B": "identity_a"}


def pictures(seed, batch, side):
    rng = numpy.random.default_rng(seed)
    return tuple(torch.as_tensor(rng.uniform(-1, 1, (batch, 3, side, side))) for _ in "AB")


def game_of(settings, blocks, **rules):
    generator = partial(ResnetGenerator, width=settings["cycle_ngf"], blocks=blocks)
    discriminator = partial(PatchGan, 3, settings["cycle_ndf"], norm="instance")
    return CycleGan(generator, discriminator, linear_decay(10**9), pool=0, **rules).double()


@pytest.fixture(params=[6, pytest.param(9, marks=pytest.mark.slow)])
def case(request):
    figures = families.load("pix2pix.pt")
    settings, golden = figures["settings"], figures[f"cyclegan_{request.param}blocks"]
    game = game_of(settings, request.param)
    for seed, (name, (kind, which)) in enumerate(NETWORKS.items(), settings["seed"] + 10):
        keys = golden["keys"][f"{name[0]}_A"]
        net = getattr(game, kind)[which]
        assert {key: list(value.shape) for key, value in net.state_dict().items()} == keys
        net.load_state_dict(families.weights(keys, seed))
    a, b = pictures(settings["seed"] + 14, settings["cycle_batch"], settings["cycle_crop"])
    return golden, game, {"a": a, "b": b}


def test_steps_equal_the_published_ones(case):
    golden, game, batch = case
    seen = recorded(game, "fool", "judge")
    families.train(game, [batch] * 3)
    found = [
        {**{theirs: fooled[ours] for theirs, ours in OURS.items()}, "D_A": judged["gan_b"], "D_B": judged["gan_a"]}
        for fooled, judged in zip(seen[::2], seen[1::2], strict=True)
    ]
    assert families.difference(found, golden["steps"]) < 1e-7


def test_the_cycles_weight_is_also_that_of_the_identity_which_can_be_left_out():
    settings, batch = dict(cycle_ngf=2, cycle_ndf=2), dict(zip("ab", pictures(0, 1, 32), strict=True))
    game = game_of(settings, 1)
    for identity in (0.5, 0.0):
        other = game_of(settings, 1, cycle=5.0, identity=identity)
        other.load_state_dict(game.state_dict())
        game.forget_shared()
        losses = game.fool(batch)
        wanted = {name: loss if "gan" in name else loss / 2 for name, loss in losses.items()}
        wanted = {name: loss for name, loss in wanted.items() if identity or "identity" not in name}
        torch.testing.assert_close(other.fool(batch), wanted)


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
