"""VGG-19, and its features."""

import os
from pathlib import Path
from unittest import mock
from urllib.error import URLError

import pytest
import torch
from torch.nn import functional as F
from torchvision.models import VGG19_Weights, vgg19

from gan.files.errors import UserError
from nets.published import load_vgg19
from nets.vgg import Vgg19
from tests.support import narrow_vgg


def plain(state, image):
    """relu1_1, relu2_1, ... of Simonyan and Zisserman 2014, configuration E, layer by layer."""
    found, place, x = [], 0, image
    for convolutions in narrow_vgg.LAYERS:
        for number in range(convolutions):
            x = F.relu(F.conv2d(x, state[f"features.{place}.weight"], state[f"features.{place}.bias"], padding=1))
            found += [x] if number == 0 else []
            place += 2
        x, place = F.max_pool2d(x, 2), place + 1
    return found


@pytest.mark.parametrize("normalise", [False, True])
def test_the_features_are_those_of_the_paper(normalise):
    state = {name: tensor.double() for name, tensor in narrow_vgg.state(width=3).items()}
    image = torch.rand(2, 3, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    seen = image
    if normalise:
        mean, spread = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        seen = ((image + 1) / 2 - mean.view(3, 1, 1)) / spread.view(3, 1, 1)
    found = Vgg19(state, normalise).double()(image)
    for ours, wanted in zip(found, plain(state, seen), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-7)


def test_the_names_and_shapes_are_torchvisions():
    with torch.device("meta"):
        theirs = {name: tensor.shape for name, tensor in vgg19().features.state_dict(prefix="features.").items()}
    assert {name: tensor.shape for name, tensor in narrow_vgg.state(64, classifier=False).items()} == theirs


def test_gradient_flows_through_it_and_it_never_learns():
    random = torch.get_rng_state()
    net = Vgg19(narrow_vgg.state())
    assert torch.equal(random, torch.get_rng_state())
    image = torch.zeros(1, 3, 16, 16, requires_grad=True)
    sum(features.sum() for features in net(image)).backward()
    assert image.grad.abs().sum() > 0 and not net.training
    assert not any(parameter.requires_grad for parameter in net.parameters())
    with pytest.raises(UserError, match=r"VGG-19 cannot see pictures of 15 x 64: .* a size of 16 or more"):
        net(torch.zeros(1, 3, 15, 64))  # which cannot be halved four times


NAME = "vgg19-dcbb9e9d.pth"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def without(*names):
    return {name: tensor for name, tensor in narrow_vgg.state().items() if name not in names}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: None, "there is no file '.*v.pth' of VGG-19's weights"),
        (lambda path: path.write_text("<html>"), "cannot be read as weights"),
        (lambda path: torch.save(Evil(), path), "cannot be read as weights"),
        (lambda path: torch.save([1, 2], path), "does not hold VGG-19 as torchvision saves it"),
        (lambda path: torch.save({"features.0.weight": 1}, path), "does not hold VGG-19 as torchvision saves it"),
        (lambda path: torch.save(without("features.28.bias"), path), "torchvision saves it: 'features.28.bias'"),
        (
            lambda path: torch.save(without() | {"features.5.weight": torch.zeros(9, 2, 3, 3)}, path),
            r"size mismatch for 5.weight: .*\[9, 2, 3, 3\].*\[4, 2, 3, 3\]",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_to_bring(spoil, message, here):
    spoil(here / "v.pth")
    with pytest.raises(UserError, match=message) as refused:
        load_vgg19("v.pth")
    for word in ("v.pth", NAME, VGG19_Weights.IMAGENET1K_V1.url, "--perceptual PATH", "--perceptual off"):
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Path("ran").exists()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, where the file belongs; a download fails as without a network unless a test replaces it."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", mock.Mock(side_effect=URLError("no network")))
    return tmp_path / "hub" / "checkpoints" / NAME


@pytest.mark.parametrize("reason", ["no network", "Not a directory"])
def test_without_cache_and_network_the_message_says_what_to_do(reason, cache):
    if reason != "no network":
        (cache.parents[2] / "hub").write_text("not a folder")
    with pytest.raises(UserError, match=rf"their download failed .*{reason}") as refused:
        load_vgg19("torchvision")
    for word in (VGG19_Weights.IMAGENET1K_V1.url, f"as '{cache}'", "--perceptual PATH", "--perceptual off"):
        assert word in str(refused.value)
    assert not cache.exists()


def test_weights_are_downloaded_with_their_hash_where_there_is_a_network(cache, monkeypatch, capsys):
    download = mock.Mock(side_effect=lambda url, path, *_, **__: narrow_vgg.save(Path(path)))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    for _ in range(2):
        load_vgg19("torchvision")
    download.assert_called_once_with(VGG19_Weights.IMAGENET1K_V1.url, str(cache), "dcbb9e9d", progress=mock.ANY)
    assert f"to {cache}" in capsys.readouterr().err
