"""Where the networks come from whose features tell how far one set of pictures is from another."""

import hashlib
import shutil
from unittest import mock

import pytest
import torch
import torch_fidelity.feature_extractor_inceptionv3 as fidelity
from torch import nn

from gan.app.scoring import features
from gan.files.errors import UserError
from tests.support.posix import not_on_windows


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
    path = tmp_path / features.INCEPTION
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(fidelity.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        network = fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    dice = torch.Generator().manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, generator=dice)
    torch.save(network.state_dict(), path)
    publish(monkeypatch, path)
    found = features.inception(path)
    seen = found.network(PICTURES)
    assert found.fid and seen.shape == (2, found.size)
    torch.testing.assert_close(seen, network(PICTURES)[0])
    assert not torch.allclose(seen[0], seen[1], rtol=1e-2)
    assert found.about["file"] == path.name and found.about["sha256"] == features.WEIGHTS
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


def test_pictures_are_seen_as_the_bytes_they_are_saved_as():
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 1.5]).view(1, 1, 1, 5).expand(1, 3, 1, 5)
    assert features.as_bytes(values)[0, 0, 0].tolist() == [0, 0, 128, 255, 255]


def test_grey_pictures_are_seen_in_three_colours_and_transparent_ones_on_white():
    grey = torch.full((1, 1, 1, 1), -1.0)
    assert features.as_bytes(grey).flatten().tolist() == [0, 0, 0]
    clear = torch.tensor([1.0, 0.0, -1.0, -1.0]).view(1, 4, 1, 1)
    assert features.as_bytes(clear).flatten().tolist() == [255, 255, 255]
    clear[:, 3] = 1.0
    assert features.as_bytes(clear).flatten().tolist() == [255, 128, 0]
