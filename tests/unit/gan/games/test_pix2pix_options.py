"""pix2pix equals the published one with other networks, norms and losses too, for three steps.

The figures are what the published networks, losses and steps compute (state of November 2021), without dropout, in
float64, on weights and pictures of the recipe below. The published step never adds its cal_gradient_penalty: for
wgangp it was added to the judge's loss, with its own weight of 10.
"""

from functools import partial
from itertools import chain

import numpy
import pytest
import torch
from torch.optim import Adam

from gan.games.pix2pix import Pix2pix, linear_decay
from nets.discriminator import PatchGan, PixelGan
from nets.resnet import ResnetGenerator, UNet
from tests.support import families

SEED, SHAPE, WIDTH, STEPS = 5, (2, 3, 64, 64), 4, 3
UNET, RESNET = partial(UNet, 3, 3, WIDTH, 6, 0), partial(ResnetGenerator, 3, 3, WIDTH)
PATCHES, PIXELS = partial(PatchGan, 6, WIDTH), partial(PixelGan, 6, WIDTH)
# The generator, the judge, norm and loss. Then of the first step the judge's losses and a digest of its gradients, and
# the same of the generator; and digests of the weights and statistics of both after all steps.
CASES = {
    "wgangp": (
        (UNET, PATCHES, "batch", "wgangp"),
        ([-0.010310867419652592, 604.4971012432557], [4322.156919087448, 5987.181288048307]),
        ([-0.7842823433726189, 57.34994687912985], [13.06274025347275, 3.1128468226003507]),
        ([27.474549089740744, 35.92402533768345], [11.848101132054508, 21.15895032178754]),
    ),
    "resnet_9blocks and pixel": (
        (partial(RESNET, 9), PIXELS, "batch", "vanilla"),
        ([0.7053224231127646], [0.0882861476254043, 0.1282309034761956]),
        ([0.6935402961449791, 62.62707682773977], [49.37095656579334, 79.62767829603084]),
        ([40.70456313711006, -22.471006408451117], [4.774106807700154, 1.4499485784329154]),
    ),
    "resnet_6blocks and n_layers 2, instance": (
        (partial(RESNET, 6), partial(PATCHES, 2), "instance", "lsgan"),
        ([0.9644849686016495], [5.194404757125197, 5.204784482418519]),
        ([1.4246835188507012, 63.190647972276004], [45.84983599336511, 7.4416535129034465]),
        ([15.681119917291694, 8.996177043357068], [5.338635784189489, 1.3757206133387136]),
    ),
    "n_layers 4, instance": (
        (UNET, partial(PATCHES, 4), "instance", "vanilla"),
        ([0.798886614839321], [2.9487938792174586, 3.435717635938447]),
        ([0.941844352812754, 57.095099992958176], [12.041489286261056, 16.593885024332824]),
        ([18.453880455427335, 26.955246383779702], [9.634302827144092, 6.480408185929969]),
    ),
}


def digest(tensors):
    """The norm of all these tensors together, and their product with normal numbers that the names decide."""
    found = [(families.Recipe(99).normal(name, *each.shape), each.detach()) for name, each in tensors]
    return [sum(each.square().sum().item() for _, each in found) ** 0.5, sum((a * b).sum().item() for a, b in found)]


def learned(network):
    return digest((name, parameter.grad) for name, parameter in network.named_parameters())


def played(generator, judge, norm, loss, *, stale=False):
    """The figures of a case, from ours. `stale`: the generator learns from the judge as it was before its turn."""
    game = Pix2pix(generator(norm=norm), judge(norm=norm), linear_decay(100), loss=loss).double()
    assert [phase.second_order for phase in game.configure_phases()] == [loss == "wgangp", False]
    networks = game.generator, game.discriminator
    for seed, network in enumerate(networks, SEED):
        shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
        network.load_state_dict(families.weights(shapes, seed))
    rng = numpy.random.default_rng(SEED + 2)
    batch = {side: torch.from_numpy(rng.uniform(-1, 1, SHAPE)) for side in "ab"}
    shares = [torch.from_numpy(rng.uniform(0, 1, (SHAPE[0], 1, 1, 1))) for _ in range(STEPS)]
    paints, judges = (Adam(each.parameters(), lr=2e-4, betas=(0.5, 0.999)) for each in networks)
    found = []
    for number in range(STEPS):
        fake = game.generator(batch["a"])
        game.shared = lambda name, make, *given, fake=fake: fake
        with families.drawing(shares[number : number + 1] if loss == "wgangp" else []):
            judged = game.judge(batch)
        judges.zero_grad()
        sum(judged.values()).backward()
        if not stale:
            judges.step()
        fooled = game.fool(batch)
        paints.zero_grad()
        sum(fooled.values()).backward(inputs=list(game.generator.parameters()))
        if number == 0:
            sizes = [[value.item() for value in losses.values()] for losses in (judged, fooled)]
            found = [(sizes[0], learned(game.discriminator)), (sizes[1], learned(game.generator))]
        if stale:
            judges.step()
        paints.step()
    return [*found, tuple(digest(_state(each)) for each in networks)]


def _state(network):
    """Weights and statistics. A bias before a norm is left out: rounding noise moves the published one."""
    states = network.state_dict().items()
    return [(name, each) for name, each in states if each.is_floating_point() and not name.endswith("bias")]


def difference(found, wanted):
    pairs = zip(chain(*found), chain(*wanted), strict=True)
    return max(abs(a - b) / abs(b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_three_steps_equal_the_published_ones(name):
    settings, *wanted = CASES[name]
    assert difference(played(*settings), wanted) < 1e-9


def test_the_order_of_turns_is_seen():
    settings, *wanted = CASES["n_layers 4, instance"]
    assert difference(played(*settings, stale=True), wanted) > 1e-6
