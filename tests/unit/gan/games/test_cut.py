"""CUT's and FastCUT's losses, gradients and steps equal the published ones."""

import numpy
import pytest
import torch

from gan import noise
from gan.games.cut import Cut, patch_nce
from gan.games.pix2pix import linear_decay
from nets.discriminator import PatchGan, PatchVectors
from nets.resnet import ResnetGenerator
from tests.support import families
from tests.support.families import gradients, recorded
from tests.unit.gan.games.test_cyclegan import pictures

KINDS = {
    "cut": {},
    "cut_all_negatives": {"all_negatives": True},
    "fastcut_plain": {"identity": False, "nce": 10.0, "flips": True},
    "fastcut_flipped": {"identity": False, "nce": 10.0, "flips": True},
}
CANCELLED = 1e-12  # the norm of a gradient that is zero but for rounding


@pytest.fixture(scope="module")
def figures():
    return families.load("cut.pt")


def case(figures, name):
    s, keys = figures["settings"], figures["cut"]["keys"]
    width = s["ngf"]
    generator = ResnetGenerator(width=width, blocks=9, smooth=True).double()
    vectors = PatchVectors([3, 2 * width, *[4 * width] * 3], s["netF_nc"]).double()
    discriminator = PatchGan(3, s["ndf"], norm="instance", smooth=True).double()
    for seed, (which, net) in enumerate({"G": generator, "F": vectors, "D": discriminator}.items(), s["seed"]):
        kept = {key: value for key, value in net.state_dict().items() if key.endswith("filt")}
        assert {key: list(value.shape) for key, value in net.state_dict().items()} == keys[which]
        net.load_state_dict(families.weights(keys[which], seed) | kept)
    game = Cut(generator, vectors, discriminator, linear_decay(10**9), patches=s["num_patches"], **KINDS[name])
    a, b = pictures(s["seed"] + 3, s["batch"], s["crop"])
    return game, {"a": a, "b": b}


def draws(figures, name, steps=1):
    """The published draws as those of gan.noise: numbers whose largest ones are at the published places."""
    s = figures["settings"]
    rng, found = numpy.random.default_rng(s["seed"] + 4), []
    for _ in range(steps):
        if KINDS[name].get("flips"):
            found.append(torch.tensor(0.0 if name.endswith("flipped") else 0.9))
        for _ in range(2 if name.startswith("cut") else 1):
            for shape, *_ in figures["cut"]["features_of_real_A"]:
                order = torch.as_tensor(rng.permutation(shape[2] * shape[3]))
                found.append(torch.empty(len(order)).index_copy_(0, order, torch.linspace(1, 0, len(order))))
    return found


def without_noise(grads):
    return {name: [0.0, 0.0] if norm < CANCELLED else [norm, total] for name, (norm, total) in grads.items()}


@pytest.mark.parametrize("name", KINDS)
def test_losses_and_gradients_equal_the_published_ones(figures, name):
    game, batch = case(figures, name)
    golden = figures[name]
    with families.drawing(draws(figures, name)):
        judged = game.judge(batch)
        fooled = game.fool(batch)
    judged["gan"].backward()
    found = {"d": judged["gan"].item(), "d_grads": gradients(game.discriminator)}
    game.zero_grad()
    sum(fooled.values()).backward()
    found |= {"g_gan": fooled["gan"].item(), "g": sum(fooled.values()).item()}
    found |= {"g_grads": gradients(game.generator), "f_grads": gradients(game.vectors)}
    parts = {"nce": "nce", "nce_y": "nce_identity"} if name.startswith("cut") else {"nce": "nce"}
    found |= {theirs: len(parts) * fooled[ours].item() for theirs, ours in parts.items()}
    wanted = {key: without_noise(golden[key]) if "grads" in key else golden[key] for key in found}
    assert families.difference(found, wanted) < 1e-9


def test_places_are_the_same_on_all_ranks(figures):
    game, _ = case(figures, "cut")
    found = []
    for rank in (0, 1):
        with noise.at(noise.Place((0,), rank, 1, 2)):
            found.append(game.places(64, torch.zeros(1)).tolist())
    assert found[0] == found[1]


def contrast_on_rank(world: int) -> torch.Tensor:
    """The loss of a rank's pictures among those of all ranks."""
    parts = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).chunk(world, 1)
    return patch_nce(*parts[torch.distributed.get_rank() if world > 1 else 0], all_negatives=True)


def test_negatives_are_those_of_all_ranks(ranks):
    assert torch.stack(ranks(2).run(contrast_on_rank, 2)).mean().item() == pytest.approx(contrast_on_rank(1).item())


def test_steps_equal_the_published_ones(figures):
    game, batch = case(figures, "cut")
    seen = recorded(game, "judge", "fool")
    with families.drawing(draws(figures, "cut", 3)):
        families.train(game, [batch] * 3)
    found = [
        [fooled["gan"], sum(fooled.values()), 2 * fooled["nce"], 2 * fooled["nce_identity"], 2 * judged["gan"]]
        for judged, fooled in zip(seen[::2], seen[1::2], strict=True)
    ]
    names = ("G_GAN", "G", "NCE", "NCE_Y")
    wanted = [[*(step[name] for name in names), step["D_real"] + step["D_fake"]] for step in figures["cut"]["steps"]]
    assert families.difference(found, wanted) < 1e-7
