"""Latent files: what is no such file is refused. That they draw the same to the bit: test_edits.py."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gan.app.sampling.latents import Latent, directions, noise_maps, some_w
from gan.files.errors import UserError
from tests.support import drawers
from tests.support.drawers import generator


@pytest.fixture
def latent():
    torch.manual_seed(0)
    maps = {name: torch.randn_like(each) for name, each in noise_maps(generator()).items()}
    return Latent(torch.randn(6, 6), maps)


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot be read as a latent file"),
        (partial(torch.save, {"codes": torch.zeros(1)}), "me.pt' is damaged: it holds no latent; make one with"),
        (partial(torch.save, [torch.zeros(1)]), "it holds no latent; make one with"),
        (partial(torch.save, {"w": 1, "maps": []}), "it holds no latent"),
        (partial(torch.save, {"w": Path("x")}), "holds more than tensors and plain values"),
        (Path.unlink, "cannot be read as a latent file: No such file or directory; make one"),
    ],
)
def test_damaged_and_foreign_files_are_refused(latent, tmp_path, deed, said):
    path = tmp_path / "me.pt"
    latent.save(path)
    deed(path)
    with pytest.raises(UserError, match=said):
        Latent.load(path, generator())


@pytest.mark.parametrize("other", [generator(style=7), generator(size=32)])
def test_a_latent_of_another_network_is_refused(latent, tmp_path, other):
    latent.save(tmp_path / "me.pt")
    with pytest.raises(UserError, match="has styles of length 6 for 6 layers, and this network has"):
        Latent.load(tmp_path / "me.pt", other)


# ---- directions ----


@pytest.fixture(scope="module")
def drawer():
    return drawers.drawer()


def along(one, other):
    """Whether the rows are the same directions; either of two opposite vectors may be found."""
    return np.allclose(np.abs((one * other).sum(1)), 1, atol=1e-5)


def test_directions_by_weights_are_the_svd_of_the_affine_weights(drawer):
    state = drawer.net.state_dict()
    names = [f"synthesis.b{side}.conv{k}.affine.weight" for side in (4, 8, 16) for k in (0, 1) if side > 4 or k]
    _, values, wanted = np.linalg.svd(np.concatenate([state[name].numpy() for name in names]).astype(np.float64))
    assert np.diff(values).max() < -1e-3  # so there is one order of them
    found = F.normalize(directions(drawer, "weights")).numpy()
    assert along(found, wanted)
    assert (np.take_along_axis(found, np.abs(found).argmax(1)[:, None], 1) > 0).all()


def test_directions_by_pca_are_those_in_which_w_differ_most(drawer):
    known = some_w(drawer)
    values, vectors = np.linalg.eigh(np.cov(known.numpy().astype(np.float64).T))
    found = directions(drawer, "pca")
    assert along(F.normalize(found).numpy(), vectors.T[::-1])
    np.testing.assert_allclose(found.norm(dim=1).numpy(), np.sqrt(values[::-1]), rtol=1e-3)
