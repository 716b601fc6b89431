"""Projection on tiny networks: what a generator has drawn is found again, and a generator is tuned to a picture."""

import pytest
import torch

from gan.app.drawing import latents, projection
from gan.app.drawing.drawer import Drawer
from gan.app.drawing.latents import some_w
from gan.app.drawing.projection import Adam, by_discriminator, correlation, distance_from, drawn, project, tuned
from gan.games.from_noise import noise_of
from nets.stylegan import StyleDiscriminator, StyleGenerator


@pytest.fixture(scope="module")
def drawer():
    torch.manual_seed(0)
    net = StyleGenerator(16, latent=5, style=6, mapping=2, base=64, most=8).eval().requires_grad_(False)
    for name, strength in net.named_parameters():
        if name.endswith("noise_strength"):
            strength.fill_(0.1)  # so that the noise is seen
    return Drawer(net, "a net", lambda seed: noise_of(seed, 5))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(latents, "SAMPLES", 300)  # to draw 10,000 latents takes most of the time of a search


@pytest.fixture(scope="module")
def critic():
    torch.manual_seed(1)
    return StyleDiscriminator(16, base=64, most=8).eval().requires_grad_(False)


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
    monkeypatch.setattr(projection, "Adam", lambda learning, **rule: Adam(learning[1:], **rule))
    latent, first, last = found(drawer, distance)
    assert last > first / 1.5
    assert torch.equal(latent.w[0], some_w(drawer).mean(0))


def test_the_same_picture_gives_the_same_latent(drawer, distance):
    torch.manual_seed(5)
    one, *_ = found(drawer, distance, 5)
    torch.manual_seed(6)
    same, *_ = found(drawer, distance, 5)
    assert torch.equal(one.w, same.w)
    assert len(one.maps) == 5 and all(torch.equal(one.maps[name], same.maps[name]) for name in one.maps)


def test_the_generator_stays_as_it_was(drawer, distance):
    before = {name: value.clone() for name, value in drawer.net.state_dict().items()}
    latent, *_ = found(drawer, distance, 2)
    drawn(drawer.net, latent)
    tuned(drawer.net, latent, drawer.pictures([4]), distance, 2, lambda *_: None)
    assert all(torch.equal(value, before[name]) for name, value in drawer.net.state_dict().items())
    assert not any(value.requires_grad for value in drawer.net.state_dict(keep_vars=True).values())


def test_noise_maps_stay_white(drawer, distance):
    """Their mean is 0, their variance 1, and their neighbours tell nothing of each other."""
    latent, *_ = found(drawer, distance, 5)
    for each in latent.maps.values():
        assert each.mean().abs() < 1e-6 and each.square().mean().sub(1).abs() < 1e-5
    smooth = torch.linspace(-1, 1, 16).repeat(16, 1)
    assert correlation(smooth) > 100 * correlation(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))


def test_correlations_are_of_all_scales():
    """Noise that is white pixel by pixel, and not by fours."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.linspace(-1, 1, 8).repeat(8, 1).repeat_interleave(4, 0).repeat_interleave(4, 1)
    signs = torch.randint(0, 2, (32, 32), generator=generator) * 2 - 1
    hidden = coarse + 4 * signs * torch.ones(32, 32)
    assert correlation(coarse) > correlation(coarse[::4, ::4])
    assert correlation(hidden) > correlation(4.0 * signs)


def test_a_tuned_generator_draws_the_picture_at_the_same_latent(drawer, distance, critic, monkeypatch):
    monkeypatch.setattr(projection, "TUNING_RATE", 0.02)
    target = drawer.pictures([4])
    near = distance_from(target, by_discriminator(critic))
    latent, *_ = found(drawer, distance, 10)
    net = tuned(drawer.net, latent, target, near, 20, lambda *_: None)
    assert near(drawn(net, latent)) < near(drawn(drawer.net, latent)) / 2
    assert all(torch.equal(value, latent.maps[name]) for name, value in net.named_buffers() if name in latent.maps)
    assert torch.equal(net.mapping.fc0.weight, drawer.net.mapping.fc0.weight)
