"""R3GAN's phases, schedules and training equal the published ones."""

import pytest
import torch

from gan.games.r3gan import R3Gan
from nets.ada import Augmentation
from tests.support import families
from tests.unit.nets.test_r3 import golden_networks, inputs


@pytest.fixture(params=["cifar", pytest.param("ffhq", marks=pytest.mark.slow)])  # without classes, and larger
def golden(request):
    return families.load("r3gan.pt")[request.param]


def game_of(golden, **settings):
    nets = golden_networks(golden["settings"], golden["settings"]["classes"])
    return R3Gan(*nets, batch_size=golden["settings"]["batch"], **settings)


def batch_of(given):
    return {"image": given["real"], **({"class": given["c"]} if given["c"].shape[1] else {})}


def sizes(tensors):
    return families.sizes((f"Model.{name}", value) for name, value in tensors.items())


@pytest.mark.parametrize("which", ["G", "D"])
def test_augmented_phases_equal_the_published_ones(golden, which):
    """The training is without augmentation."""
    settings, given, wanted = golden["settings"], inputs(golden), golden[f"{which}_augmented"]
    augment = Augmentation("r3gan", settings["augment_p"]).double()
    game = game_of(golden, gamma=(settings["gamma"], 0), augment=augment)
    kinds = ("fake", "real") if which == "G" else ("real", "fake")
    recipe = families.Recipe(settings["seed"] + 2)
    draws = [each for kind in kinds for each in recipe.augmentation(f"{which}.{kind}.", settings["batch"])]
    with families.drawing([given["z"], *draws]):
        losses = {"G": game.fool, "D": game.judge}[which](batch_of(given))
    net = {"G": game.generator, "D": game.discriminator}[which]
    grads = torch.autograd.grad(sum(losses.values()), list(net.parameters()))
    mean = lambda key: sum(wanted["reports"][key]) / settings["batch"]  # noqa: E731
    found = [losses["relativistic"].item(), *(losses[slope].item() for slope in ("r1", "r2") if which == "D")]
    slopes = [settings["gamma"] / 2 * mean(f"Loss/{slope}_penalty") for slope in ("r1", "r2") if which == "D"]
    assert families.difference(found, [mean(f"Loss/{which}/loss"), *slopes]) < 1e-9
    names = (key for key, _ in net.named_parameters())
    assert families.difference(sizes(dict(zip(names, grads, strict=True))), wanted["grads"]) < 1e-9


def test_training_equals_the_published_one(golden):
    settings, training = golden["settings"], golden["training"]
    rule = {name: each.values() for name, each in training["schedulers"].items()}
    rules = {"rate": "lr", "beta2": "beta2", "gamma": "gamma", "ema": "ema"}
    rules = {ours: tuple(rule[f"{theirs}_scheduler"])[:2] for ours, theirs in rules.items()}
    game = game_of(golden, **rules, images=training["schedulers"]["lr_scheduler"]["total_nimg"])
    nets = {"G": game.generator, "D": game.discriminator}
    before = {which: {key: value.clone() for key, value in net.state_dict().items()} for which, net in nets.items()}
    given = [inputs(golden, prefix=f"step{step}.{which}.") for step in range(settings["steps"]) for which in "DG"]
    with families.drawing([each["z"] for each in given]):
        families.train(game, [batch_of(each) for each in given])
    after = {which: dict(net.state_dict()) for which, net in nets.items()}
    with game.averaged(), torch.no_grad():
        image = game.generator(inputs(golden)["z"], inputs(golden)["c"])
        after["G_ema"] = {key: value.clone() for key, value in game.generator.state_dict().items()}
    for which, tensors in after.items():
        learned = {key: value for key, value in tensors.items() if not key.endswith("Kernel")}
        moved = {key: value - before[which[0]][key] for key, value in learned.items()}
        for kind, found in (("final", learned), ("moved", moved)):
            wanted = {key: size for key, size in training[kind][which].items() if not key.endswith("Kernel")}
            assert families.difference(sizes(found), wanted) < 1e-7
    wanted = training["image_ema"]
    assert families.difference([families.size(each) for each in image], wanted["each"]) < 1e-7
    assert families.difference(image[: len(wanted["first"])], wanted["first"]) < 1e-7


@pytest.mark.parametrize("name", ["CIFAR10", "FFHQ-64"])
def test_schedules_equal_the_published_ones(name):
    figures = families.load("r3gan.pt")
    preset, wanted = figures["presets"][name], figures["schedules"][name]
    game = R3Gan(torch.nn.Identity(), torch.nn.Identity(), batch_size=1)
    ours = {"lr": "lr", "beta2": "beta2", "gamma": "gamma", "ema_nimg": "ema", "augment_p": "aug"}
    for key, scheduler in ours.items():
        first, last, game.images = preset[f"{scheduler}_scheduler"].values()
        assert families.difference([game.at((first, last), nimg) for nimg in wanted["nimg"]], wanted[key]) < 1e-12
    game.ema, game.batch_size = (preset["ema_scheduler"]["base_value"], preset["ema_scheduler"]["final_value"]), 512
    game.images = preset["ema_scheduler"]["total_nimg"]
    decays = [game.decay(nimg / 512) for nimg in wanted["nimg"]]
    assert families.difference(decays, wanted["ema_beta_batch_512"]) < 1e-9
