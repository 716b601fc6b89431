"""LPIPS equals the published one."""

from copy import deepcopy

import numpy
import pytest
import torch

from nets.vgg import Lpips, Vgg16
from tests.support import families


def published(keys, seed) -> Lpips:
    found = {}
    for key, value in families.weights({key: keys[key] for key in keys if "scaling" not in key}, seed).items():
        if key.startswith("lin"):
            found[key] = value.abs()
        else:  # net.slice2.4.weight is features.4.weight
            found["features." + key.split(".", 2)[2]] = value * 2**0.5 if value.dim() > 1 else value
    standard = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # so that the constants have all digits
        return Lpips(Vgg16(found, True), found)
    finally:
        torch.set_default_dtype(standard)


@pytest.fixture(scope="module")
def net():
    golden = families.load("lpips.pt")
    return published(golden["vgg"]["keys"], golden["settings"]["seed"])


def test_distances_features_and_gradients_equal_the_published_ones(net):
    golden = families.load("lpips.pt")
    settings, golden = golden["settings"], golden["vgg"]
    rng = numpy.random.default_rng(settings["seed"] + 1)
    a = rng.uniform(-1, 1, (settings["batch"], 3, settings["size"], settings["size"]))
    b = torch.as_tensor(numpy.clip(a + 0.3 * rng.standard_normal(a.shape), -1, 1))
    a = torch.as_tensor(a).requires_grad_()
    value, features = net(a, b), net.trunk(a)
    (slope,) = torch.autograd.grad(value.mean(), a)
    with torch.no_grad():
        found = {
            "value": value.flatten().tolist(),
            "per_layer": [each.mean((1, 2, 3)).tolist() for each in net.layerwise(a, b)],
            "grad_of_mean_wrt_first": families.size(slope),
            "features_of_first": [[list(each.shape), *families.size(each)] for each in features],
        }
    assert families.difference(found, {key: golden[key] for key in found}) < 1e-9


def test_it_never_learns_and_is_in_no_state_dict(net):
    assert not net.state_dict() and not any(each.requires_grad for each in net.parameters())
    picture = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(net.train()(picture, -picture), net.eval()(picture, -picture))


def test_black_features_have_finite_gradients(net):
    """Where no feature is above zero, the root of the sum of squares would have a gradient that is not a number."""
    net = deepcopy(net)
    for name, each in net.trunk.features.named_parameters():
        if name.endswith("bias"):
            each.fill_(-1e3)
    picture = torch.rand(1, 3, 32, 32, dtype=torch.float64).requires_grad_()
    net(picture, torch.zeros_like(picture)).sum().backward()
    assert picture.grad.isfinite().all()
