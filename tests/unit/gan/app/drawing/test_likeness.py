"""Distances of pictures in the features of networks."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.functional.image.lpips import _LPIPS
from torchvision import models

from gan.app.drawing.projection import by_discriminator, by_lpips, distance_from
from gan.files.errors import UserError
from nets.stylegan import StyleDiscriminator


@pytest.fixture(scope="module")
def vgg(tmp_path_factory):
    """Random weights of VGG-16, in the file that torchvision would have written."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("vgg") / "vgg16.pth"
    layers = models.vgg.make_layers(models.vgg.cfgs["D"])
    torch.save({f"features.{name}": each for name, each in layers.state_dict().items()}, path)
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


def test_lpips_looks_at_256_pixels_and_at_gray_pictures(vgg):
    large = pictures(1, 1, 300, 600)
    distance = distance_from(large, by_lpips(vgg, torch.device("cpu")))
    small = F.interpolate(large, [128, 256], mode="area").expand(-1, 3, -1, -1)
    assert distance(small) < 1e-9


def test_files_that_hold_no_vgg_are_refused(vgg, tmp_path):
    torch.save({"features.0.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="does not hold VGG-16 as torchvision saves it"):
        by_lpips(tmp_path / "other.pth", torch.device("cpu"))
    with pytest.raises(UserError, match="cannot see pictures below 16 pixels"):
        by_lpips(vgg, torch.device("cpu"))(pictures(1, 3, 8, 8))


@pytest.mark.parametrize("classes", [0, 3])
def test_a_discriminator_tells_pictures_apart(classes):
    torch.manual_seed(0)
    net = StyleDiscriminator((12, 16), classes=classes, base=64, most=8).eval()
    one, other = pictures(2, 3, 12, 16)
    features = by_discriminator(net)
    distance = distance_from(other[None], features)
    assert [each.shape[2] for each in features(one[None])] == [6, 3]
    assert all(torch.allclose(each.norm(dim=1), torch.ones(()), atol=1e-4) for each in features(one[None]))
    assert distance(other[None]) == 0 < distance(one[None]) < distance(-other[None])
