"""Directions of w."""

import numpy as np
import pytest
import torch

from gan.app.drawing.drawer import Drawer
from gan.app.drawing.latents import Latent, by_pca, by_weights, directions, some_w
from gan.app.drawing.projection import drawn
from gan.games.from_noise import noise_of
from nets.stylegan import StyleGenerator


@pytest.fixture(scope="module")
def drawer():
    torch.manual_seed(0)
    net = StyleGenerator(16, latent=5, style=6, mapping=2, base=64, most=8).eval().requires_grad_(False)
    return Drawer(net, "a net", lambda seed: noise_of(seed, 5))


def along(one, other):
    """Whether the rows are the same directions; either of two opposite vectors may be found."""
    return np.allclose(np.abs((one * other).sum(1)), 1, atol=1e-5)


def test_directions_by_weights_are_the_svd_of_the_affine_weights(drawer):
    state = drawer.net.state_dict()
    names = [f"synthesis.b{side}.conv{k}.affine.weight" for side in (4, 8, 16) for k in (0, 1) if side > 4 or k]
    _, values, wanted = np.linalg.svd(np.concatenate([state[name].numpy() for name in names]).astype(np.float64))
    assert np.diff(values).max() < -1e-3  # so there is one order of them
    found = by_weights(drawer.net).numpy()
    assert along(found, wanted)
    assert (np.take_along_axis(found, np.abs(found).argmax(1)[:, None], 1) > 0).all()


def test_directions_by_pca_are_those_in_which_w_differ_most(drawer):
    known = some_w(drawer)
    values, vectors = np.linalg.eigh(np.cov(known.numpy().astype(np.float64).T))
    assert along(by_pca(known).numpy(), vectors.T[::-1])
    lengths = directions(drawer, "pca").norm(dim=1).numpy()
    np.testing.assert_allclose(lengths, np.sqrt(values[::-1]), rtol=1e-3)


@pytest.mark.parametrize("way", ["weights", "pca"])
def test_a_step_is_a_standard_deviation_of_w_and_none_changes_nothing(drawer, way):
    step = directions(drawer, way)[1]
    np.testing.assert_allclose((some_w(drawer) @ (step / step.norm())).std(), step.norm(), rtol=1e-4)
    w = drawer.w_of([2])[0]
    assert torch.equal(drawn(drawer.net, Latent(w + 0 * step, {})), drawer.pictures([2]))
    assert not torch.equal(drawn(drawer.net, Latent(w - 2 * step, {})), drawer.pictures([2]))
