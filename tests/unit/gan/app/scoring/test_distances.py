"""Distances between sets of pictures, compared with plain formulas."""

import pytest
import torch
from torchmetrics.image.inception import InceptionScore

from gan.app.scoring import features as scores
from gan.app.scoring.features import Known


def frechet(made, truth):
    return scores.frechet_distance(Known.of(made), Known.of(truth))


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
    value, deviation = scores.kernel_distance(one, other)
    assert value == pytest.approx(plain_kernel(one, other), rel=1e-12)
    assert deviation == 0


def test_kernel_subsets_are_as_large_as_can_be_and_the_same_each_time(monkeypatch):
    assert scores.kernel_subsets(64, 64) == {"subsets": 1, "subset_size": 64}
    assert scores.kernel_subsets(8, 40) == {"subsets": 100, "subset_size": 8}  # which are not all of both
    assert scores.kernel_subsets(5000) == {"subsets": 100, "subset_size": 1000}
    monkeypatch.setattr(scores, "SUBSET_SIZE", 5)
    one, other = some(20, 4), some(20, 4, seed=1) + 0.5
    before = torch.random.get_rng_state()
    first = scores.kernel_distance(one, other)
    torch.randn(3)
    assert scores.kernel_distance(one, other) == first
    assert first[1] > 0
    torch.random.set_rng_state(before)
    scores.kernel_distance(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_precision_and_recall_are_the_plain_formulas():
    one, other = some(30, 3), 0.7 * some(40, 3, seed=1) + 0.4

    def inside(points, others):
        reach = [sorted((x - y).norm() for y in others)[3] for x in others]
        return sum(any((p - x).norm() <= r for x, r in zip(others, reach, strict=True)) for p in points) / len(points)

    found = scores.precision_recall(one, other)
    assert found == pytest.approx((inside(one, other), inside(other, one)), abs=1e-12)
    assert 0 < found[0] < 1 and found[0] != found[1]
    far = [(100 + 1e-3 * each).float() for each in (one, other)]  # of a generator that makes nearly one picture
    assert scores.precision_recall(*far) == (inside(*map(torch.Tensor.double, far)), inside(far[1], far[0]))
    assert scores.precision_recall(one, one) == (1, 1)


def test_the_inception_score_is_that_of_torchmetrics():
    features, head = some(40, 6), some(5, 6, seed=1)
    found = scores.inception_score(features, head)
    metric = InceptionScore(feature=torch.nn.Identity(), splits=1).double()
    parts = []
    for part in (features @ head.T).split(4):
        metric.reset()
        metric.update(part)
        parts.append(metric.compute()[0])
    values = torch.stack(parts)
    assert found == pytest.approx((values.mean().item(), values.std(correction=0).item()), rel=1e-6)
    assert scores.inception_score(100 * torch.eye(5)[torch.arange(50) % 5], torch.eye(5))[0] == pytest.approx(5)
