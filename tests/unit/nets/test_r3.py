"""R3GAN's networks, which the tests of the game compare with the published ones."""

import pytest
import torch

from nets.r3 import R3Discriminator, R3Generator
from tests.support import families


def golden_networks(settings, classes):
    rule = dict(widths=settings["widths"], blocks=2, groups=settings["cardinality"], classes=classes)
    generator = R3Generator(settings["noise"], embedding=settings.get("g_embedding", 64), **rule).double()
    discriminator = R3Discriminator(**rule, embedding=settings.get("d_embedding")).double()
    for seed, net in enumerate((generator, discriminator), settings["seed"]):
        recipe = families.Recipe(seed)
        weights = {name: recipe.normal(f"Model.{name}", *value.shape) for name, value in net.state_dict().items()}
        for name, value in weights.items():
            weights[name] = value / value[0].numel() ** 0.5 if value.dim() > 1 else 0.1 * value
            if name.endswith("Kernel"):
                weights[name] = net.state_dict()[name]
        net.load_state_dict(weights)
    return generator, discriminator


@pytest.fixture(params=["cifar", "ffhq"])
def golden(request):
    return families.load("r3gan.pt")[request.param]


def inputs(golden, *, prefix=""):
    settings, recipe = golden["settings"], families.Recipe(golden["settings"]["seed"] + 2)
    batch, side = settings["batch"], golden["resolution"]
    return {
        "z": recipe.normal(f"{prefix}z", batch, settings["noise"]),
        "c": recipe.labels(f"{prefix}real_c" if prefix else "c", batch, settings["classes"]),
        "real": recipe.pictures(f"{prefix}real", batch, 3, side, side),
    }


def test_initial_values_have_the_published_size(golden):
    torch.manual_seed(0)
    settings = golden["settings"]
    rule = dict(widths=settings["widths"], groups=settings["cardinality"], classes=settings["classes"])
    nets = R3Generator(settings["noise"], **rule), R3Discriminator(**rule)
    for net, wanted in zip(nets, (golden["init_std"]["G"], golden["init_std"]["D"]), strict=True):
        for name, value in net.named_parameters():
            std, size = wanted[f"Model.{name}"], value.detach().square().mean().sqrt().item()
            assert size == pytest.approx(std, rel=6 / value.numel() ** 0.5), name


def test_the_named_stages_compute_in_bfloat16():
    torch.manual_seed(0)
    nets = R3Generator(5, (8, 8, 4), low=2), R3Discriminator((8, 8, 4), low=2)
    seen = []
    for net in nets:
        for stage in net.MainLayers:
            stage.Layers[1].register_forward_hook(lambda _module, _given, made: seen.append(made.dtype))
    image = nets[0](torch.randn(2, 5))
    scores = nets[1](image)
    (slope,) = torch.autograd.grad(scores.sum(), image, create_graph=True)
    slope.square().sum().backward()
    full, low = torch.float32, torch.bfloat16
    assert seen == [full, low, low, low, low, full] and scores.dtype == full
