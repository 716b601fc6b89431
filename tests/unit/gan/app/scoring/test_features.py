"""Networks whose features tell how far one set of pictures is from another, and the distances, by plain formulas."""

import hashlib
import shutil
from unittest import mock

import pytest
import torch
import torch_fidelity.feature_extractor_inceptionv3 as fidelity
from torch import nn
from torchmetrics.image.inception import InceptionScore

from gan.app.scoring import features
from gan.app.scoring.features import Known
from gan.files.errors import UserError
from tests.support.posix import not_on_windows


def frechet(made, truth):
    return features.frechet_distance(Known.of(made), Known.of(truth))


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
    assert frechet(one, other) == pytest.approx(plain_frechet(one, other), rel=1e-6)
    assert frechet(one, one) == pytest.approx(0, abs=1e-6)


def test_the_kernel_distance_is_the_plain_formulas():
    one, other = some(6, 4), some(6, 4, seed=1) + 0.5
    value, deviation = features.kernel_distance(one, other)
    assert value == pytest.approx(plain_kernel(one, other), rel=1e-12)
    assert deviation == 0


def test_kernel_subsets_are_as_large_as_can_be_and_the_same_each_time(monkeypatch):
    assert features.kernel_subsets(64, 64) == {"subsets": 1, "subset_size": 64}
    assert features.kernel_subsets(8, 40) == {"subsets": 100, "subset_size": 8}  # which are not all of both
    assert features.kernel_subsets(5000) == {"subsets": 100, "subset_size": 1000}
    monkeypatch.setattr(features, "SUBSET_SIZE", 5)
    one, other = some(20, 4), some(20, 4, seed=1) + 0.5
    before = torch.random.get_rng_state()
    first = features.kernel_distance(one, other)
    assert first[1] > 0 and torch.equal(torch.random.get_rng_state(), before)
    torch.randn(3)
    assert features.kernel_distance(one, other) == first


def test_precision_and_recall_are_the_plain_formulas():
    one, other = some(30, 3), 0.7 * some(40, 3, seed=1) + 0.4

    def inside(points, others):
        reach = [sorted((x - y).norm() for y in others)[3] for x in others]
        return sum(any((p - x).norm() <= r for x, r in zip(others, reach, strict=True)) for p in points) / len(points)

    found = features.precision_recall(one, other)
    assert found == pytest.approx((inside(one, other), inside(other, one)), abs=1e-12)
    assert 0 < found[0] < 1 and found[0] != found[1]
    far = [(100 + 1e-3 * each).float() for each in (one, other)]  # of a generator that makes nearly one picture
    assert features.precision_recall(*far) == (inside(*map(torch.Tensor.double, far)), inside(far[1], far[0]))
    assert features.precision_recall(one, one) == (1, 1)


def test_the_inception_score_is_that_of_torchmetrics():
    rows, head = some(40, 6), some(5, 6, seed=1)
    found = features.inception_score(rows, head)
    metric = InceptionScore(feature=torch.nn.Identity(), splits=1).double()
    parts = []
    for part in (rows @ head.T).split(4):
        metric.reset()
        metric.update(part)
        parts.append(metric.compute()[0])
    values = torch.stack(parts)
    assert found == pytest.approx((values.mean().item(), values.std(correction=0).item()), rel=1e-6)
    assert features.inception_score(100 * torch.eye(5)[torch.arange(50) % 5], torch.eye(5))[0] == pytest.approx(5)


@pytest.fixture
def small_file(tmp_path):
    """A file of weights that are not Inception's."""
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "small.pth")
    return tmp_path / "small.pth"


def publish(monkeypatch, path, kind="WEIGHTS"):
    """Take this file for the published one."""
    monkeypatch.setattr(features, kind, hashlib.sha256(path.read_bytes()).hexdigest())


PICTURES = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_the_inception_is_torch_fidelitys_with_the_weights_of_the_file(tmp_path, monkeypatch):
    path, dice = tmp_path / features.INCEPTION, torch.Generator().manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(fidelity.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        network = fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, generator=dice)
    torch.save(network.state_dict(), path)
    publish(monkeypatch, path)
    found = features.inception(path)
    seen = found.network(PICTURES)
    assert found.fid and seen.shape == (2, found.size) and not torch.allclose(seen[0], seen[1], rtol=1e-2)
    torch.testing.assert_close(seen, network(PICTURES)[0])
    assert (found.about["file"], found.about["sha256"]) == (path.name, features.WEIGHTS)
    assert torch.equal(found.head, network.fc.weight)


class Scripted(nn.Module):
    """As NVIDIA's file is called."""

    def forward(self, pictures: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        return pictures.float().mean((2, 3)) if return_features else pictures


def test_nvidias_program_is_run_for_its_features_if_it_is_the_published_one(tmp_path, monkeypatch):
    path = tmp_path / "inception-2015-12-05.pt"
    torch.jit.script(Scripted()).save(path)
    with pytest.raises(UserError, match="is not the published Inception of FID"):
        features.inception(path)
    publish(monkeypatch, path, "TORCHSCRIPT")
    found = features.inception(path)
    assert found.fid and torch.equal(found.network(PICTURES), PICTURES.float().mean((2, 3)))


@not_on_windows
@pytest.mark.parametrize("name", [features.INCEPTION, "pt_inception-2015-12-05-6726825d.pth"])
def test_the_inception_of_the_cache_is_found_by_either_name(name, small_file, tmp_path, monkeypatch):
    publish(monkeypatch, small_file)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(features, "_weights", lambda file: nn.ModuleDict({"fc": nn.Linear(2, 2)}))
    (tmp_path / "checkpoints").mkdir()
    assert not features.best().fid
    (tmp_path / "checkpoints" / name).symlink_to(small_file)
    assert features.best().about["file"] == name


def test_without_weights_the_file_to_bring_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    with pytest.raises(UserError, match=rf"no {tmp_path}/checkpoints/{features.INCEPTION}; type --inception torch-"):
        features.inception()
    with pytest.raises(UserError, match=rf"no {tmp_path}/mine.pth; type --inception torch-fidelity, which downloads"):
        features.inception(tmp_path / "mine.pth")


def test_the_inception_of_torch_fidelity_is_downloaded_once(small_file, tmp_path, monkeypatch, capsys):
    publish(monkeypatch, small_file)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(features, "_weights", lambda file: nn.ModuleDict({"fc": nn.Linear(2, 2)}))
    there = features.cached(features.INCEPTION)
    there.parent.mkdir()
    download = mock.Mock(side_effect=lambda *_, **__: shutil.copy(small_file, there))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    for _ in range(2):
        assert features.inception(features.DOWNLOADED).about["file"] == features.INCEPTION
    (url,), how = download.call_args
    assert download.call_count == 1 and url.endswith(features.INCEPTION) and how["check_hash"] and how["weights_only"]
    there.unlink()
    download.side_effect = OSError("no network")
    with pytest.raises(UserError, match=rf"the download of .* failed \(no network\); bring https://.* as '{there}'"):
        features.best(features.DOWNLOADED)


def test_without_torch_fidelity_it_says_what_to_install(small_file, monkeypatch):
    publish(monkeypatch, small_file)
    monkeypatch.setattr("torchmetrics.image.fid._TORCH_FIDELITY_AVAILABLE", False)
    with pytest.raises(UserError, match="pip install torch-fidelity"):
        features.inception(small_file)


@pytest.mark.parametrize(
    ("pixel", "seen"),
    [
        ([-2.0, 0.0, 1.5], [0, 128, 255]),  # as they are saved
        ([-1.0], [0, 0, 0]),  # grey pictures in three colours
        ([1.0, 0.0, -1.0, -1.0], [255, 255, 255]),  # transparent ones on white
        ([1.0, 0.0, -1.0, 1.0], [255, 128, 0]),
    ],
)
def test_pictures_are_seen_as_bytes_of_three_colours(pixel, seen):
    assert features.as_bytes(torch.tensor(pixel).view(1, -1, 1, 1)).flatten().tolist() == seen
