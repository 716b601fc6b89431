"""Distances between sets of pictures, compared with plain formulas; and where the networks come from."""

import pytest
import torch

from gan.app.scoring import features
from gan.files.errors import UserError
from tests.support import inception
from tests.support.posix import not_on_windows


def some(count, size, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).double()


def plain_frechet(one, other):
    """|m1 - m2|² + tr(C1 + C2 - 2 (C1^½ C2 C1^½)^½), with roots of symmetric matrices."""

    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T

    c1, c2 = one.T.cov(), other.T.cov()
    middle = root(root(c1) @ c2 @ root(c1))
    return float((one.mean(0) - other.mean(0)).square().sum() + (c1 + c2 - 2 * middle).trace())


def plain_kernel(one, other):
    """The unbiased estimate of MMD², pair by pair."""

    def kernel(x, y):
        return (float(x @ y) / len(x) + 1) ** 3

    def within(some):
        pairs = [kernel(x, y) for i, x in enumerate(some) for j, y in enumerate(some) if i != j]
        return sum(pairs) / len(pairs)

    between = [kernel(x, y) for x in one for y in other]
    return within(one) + within(other) - 2 * sum(between) / len(between)


@pytest.mark.parametrize("count", [40, 4])  # more pictures than features, and fewer
def test_the_frechet_distance_is_the_plain_formulas(count):
    one, other = some(count, 12), 1.5 * some(count, 12, seed=1) + 0.3
    assert features.frechet_distance(one, other) == pytest.approx(plain_frechet(one, other), rel=1e-6)


@pytest.mark.parametrize("count", [40, 4])
def test_a_shift_is_its_squared_length_and_equal_sets_are_at_zero(count):
    one, shift = some(count, 12), some(1, 12, seed=2)
    assert features.frechet_distance(one, one) == pytest.approx(0, abs=1e-6)
    expected = float(shift.square().sum())
    assert features.frechet_distance(one + shift, one) == pytest.approx(expected, rel=1e-6)
    assert features.frechet_distance(3 * one, one) == pytest.approx(
        float(4 * one.T.cov().trace() + (2 * one.mean(0)).square().sum()), rel=1e-6
    )


def test_the_kernel_distance_is_the_plain_formulas():
    one, other = some(6, 4), some(6, 4, seed=1) + 0.5
    value, deviation = features.kernel_distance(one, other)
    assert value == pytest.approx(plain_kernel(one, other), rel=1e-12)
    assert deviation == 0


def test_kernel_subsets_are_as_large_as_can_be_and_the_same_each_time(monkeypatch):
    assert features.kernel_subsets(64) == {"subsets": 1, "subset_size": 64}
    assert features.kernel_subsets(5000) == {"subsets": 100, "subset_size": 1000}
    monkeypatch.setattr(features, "SUBSET_SIZE", 5)
    one, other = some(20, 4), some(20, 4, seed=1) + 0.5
    before = torch.random.get_rng_state()
    first = features.kernel_distance(one, other)
    torch.randn(3)
    assert features.kernel_distance(one, other) == first
    assert first[1] > 0
    torch.random.set_rng_state(before)
    features.kernel_distance(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.fixture(scope="module")
def inception_weights(tmp_path_factory):
    """A file in the exact format, of random weights."""
    path = tmp_path_factory.mktemp("inception") / features.INCEPTION
    return path, inception.save(path)


def test_the_inception_is_torch_fidelitys_with_the_weights_of_the_file(inception_weights):
    path, network = inception_weights
    found = features.inception(path)
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = found.network(pictures)
    assert found.fid and seen.shape == (2, found.size)
    torch.testing.assert_close(seen, network(pictures)[0])
    assert not torch.allclose(seen[0], seen[1], rtol=1e-2)
    assert found.about["file"] == str(path)
    assert found.about["published"] is False and "other than the published" in found.name


@not_on_windows
def test_the_inception_of_the_cache_is_found(inception_weights, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / features.INCEPTION).symlink_to(inception_weights[0])
    assert features.inception().about["file"] == str(tmp_path / "checkpoints" / features.INCEPTION)


def test_without_weights_the_file_to_bring_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(UserError, match=rf"no {tmp_path}/checkpoints/{features.INCEPTION}; bring {features.INCEPTION}"):
        features.inception()
    with pytest.raises(UserError, match=rf"no {tmp_path}/mine.pth; bring {features.INCEPTION}"):
        features.inception(tmp_path / "mine.pth")


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('this must not run')",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no weights", "cannot be read as the Inception weights"),
        ({"fc.weight": Evil()}, "cannot be read as the Inception weights"),
        ({"step": 3}, "a state dict of only tensors"),
        ({"fc.weight": torch.zeros(3)}, "another network than FID's Inception"),
    ],
    ids=["text", "code", "number", "other network"],
)
def test_a_file_of_something_else_is_refused(content, message, tmp_path):
    path = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match=f"weights.pth .*{message}"):
        features.inception(path)


def test_without_torch_fidelity_it_says_what_to_install(inception_weights, monkeypatch):
    monkeypatch.setattr("torchmetrics.image.fid._TORCH_FIDELITY_AVAILABLE", False)
    with pytest.raises(UserError, match="pip install torch-fidelity"):
        features.inception(inception_weights[0])


def test_the_stand_in_is_a_random_vgg_that_is_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = features.vgg()
    assert found.name == "random VGG-19 relu5_1" and not found.fid
    seen = found.network(pictures)
    assert seen.shape == (2, found.size)
    assert 0.1 < seen.std() < 10  # neither vanished nor exploded after 13 layers
    torch.rand(1)
    assert torch.equal(features.vgg().network(pictures), seen)


def test_the_stand_in_is_torchvisions_vgg_where_that_is_cached(tmp_path, monkeypatch):
    random = features.vgg().network.vgg.features.state_dict()
    weights = {f"features.{name}": weight * 1.1 if name == "0.weight" else weight for name, weight in random.items()}
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save(weights, tmp_path / "checkpoints" / features.VGG)
    found = features.vgg()
    assert found.name == "VGG-19 relu5_1" and not found.fid
    assert torch.equal(found.network.vgg.features[0].weight, weights["features.0.weight"])


def test_pictures_are_seen_as_the_bytes_they_are_saved_as():
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 1.5]).view(1, 1, 1, 5).expand(1, 3, 1, 5)
    assert features.as_bytes(values)[0, 0, 0].tolist() == [0, 0, 128, 255, 255]
