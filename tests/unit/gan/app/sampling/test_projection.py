"""Projection on tiny networks: what a generator has drawn is found again, and a generator is tuned to a picture."""

from types import SimpleNamespace

import pytest
import torch
from torchmetrics.functional.image.lpips import _LPIPS
from torchvision import models

from gan.app.sampling import latents
from gan.app.sampling.latents import (
    Adam,
    by_discriminator,
    by_lpips,
    correlation,
    distance_from,
    drawn,
    project,
    some_w,
    tuned,
)
from gan.files.errors import UserError
from tests.support import drawers, narrow_vgg


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(latents, "SAMPLES", 300)  # to draw 10,000 latents takes most of the time of a search


@pytest.fixture(scope="module")
def drawer():
    return drawers.drawer(grain=0.1)


@pytest.fixture(scope="module")
def critic():
    torch.manual_seed(1)
    return drawers.critic()


@pytest.fixture(scope="module")
def distance(drawer, critic):
    """The distance from a picture that the generator has drawn, in the features of a discriminator."""
    return distance_from(drawer.pictures([3]), by_discriminator(critic))


def found(drawer, distance, steps=30):
    """The latent, the distance of the first picture, and that of the last."""
    seen = []
    latent = project(drawer, distance, steps, lambda picture, far: seen.append(far))
    return latent, seen[0], distance(drawn(drawer.net, latent)).item()


def test_a_drawn_picture_is_found_again(drawer, distance):
    latent, first, last = found(drawer, distance)
    assert last < first / 8
    assert latent.w.shape == (6, 6) and torch.equal(latent.w, latent.w[:1].expand(6, -1))


def test_without_learning_w_the_picture_is_not_found(drawer, distance, monkeypatch):
    monkeypatch.setattr(latents, "Adam", lambda learning, **rule: Adam(learning[1:], **rule))
    latent, first, last = found(drawer, distance)
    assert last > first / 1.5
    assert torch.equal(latent.w[0], some_w(drawer).mean(0))


def test_noise_maps_stay_white(drawer, distance):
    """Their mean is 0, their variance 1, and their neighbours tell nothing of each other."""
    latent, *_ = found(drawer, distance, 5)
    for each in latent.maps.values():
        assert each.mean().abs() < 1e-6 and each.square().mean().sub(1).abs() < 1e-5
    smooth = torch.linspace(-1, 1, 16).repeat(16, 1)
    assert correlation(smooth) > 100 * correlation(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))


def test_a_tuned_generator_draws_the_picture_at_the_same_latent(drawer, distance, critic, monkeypatch):
    monkeypatch.setattr(latents, "TUNING_RATE", 0.02)
    target = drawer.pictures([4])
    near = distance_from(target, by_discriminator(critic))
    latent, *_ = found(drawer, distance, 10)
    net = tuned(drawer.net, latent, target, near, 20, lambda *_: None)
    assert near(drawn(net, latent)) < near(drawn(drawer.net, latent)) / 2
    assert all(torch.equal(value, latent.maps[name]) for name, value in net.named_buffers() if name in latent.maps)
    assert torch.equal(net.mapping.fc0.weight, drawer.net.mapping.fc0.weight)


# ---- distances ----


@pytest.fixture(scope="module")
def vgg(tmp_path_factory):
    """Random weights of VGG-16, in the file that torchvision would have written."""
    path = tmp_path_factory.mktemp("vgg") / "vgg16.pth"
    torch.save(narrow_vgg.state16(64), path)
    return path


def pictures(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 2 - 1


def test_lpips_is_that_of_torchmetrics(vgg, monkeypatch):
    layers = models.vgg.make_layers(models.vgg.cfgs["D"])
    layers.load_state_dict({name.removeprefix("features."): each for name, each in torch.load(vgg).items()})
    monkeypatch.setattr(models, "vgg16", lambda weights: SimpleNamespace(features=layers))
    one, other = pictures(2, 3, 32, 32)
    wanted = _LPIPS(net="vgg", pnet_rand=True)(one[None], other[None]).item()
    distance = distance_from(other[None], by_lpips(vgg, torch.device("cpu")))
    assert wanted > 0 and distance(one[None]).item() == pytest.approx(wanted, rel=1e-5)
    assert distance(other[None]) == 0


def test_files_that_hold_no_vgg_are_refused(vgg, tmp_path):
    torch.save({"features.0.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="does not hold VGG-16 as torchvision saves it"):
        by_lpips(tmp_path / "other.pth", torch.device("cpu"))
    with pytest.raises(UserError, match="cannot see pictures below 16 pixels"):
        by_lpips(vgg, torch.device("cpu"))(pictures(1, 3, 8, 8))
