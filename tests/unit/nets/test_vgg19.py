"""VGG-19's file in every state, and its cache."""

import os
import threading
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from filelock import FileLock
from torchvision.models import VGG19_Weights

from gan.files.errors import UserError
from nets.published import load_vgg19
from tests.support import narrow_vgg

NAME = "vgg19-dcbb9e9d.pth"


# ---- the file ----


@pytest.mark.parametrize("settings", [{}, {"classifier": False}])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_or_without_classifier_in_torchs_new_or_old_format(settings, zipped, tmp_path):
    state = narrow_vgg.state(width=3, **settings)
    torch.save(state, tmp_path / "v.pth", _use_new_zipfile_serialization=zipped)
    net = load_vgg19(str(tmp_path / "v.pth"))
    for name, tensor in net.features.state_dict(prefix="features.").items():
        assert torch.equal(tensor, state[name])


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
        (lambda path: (torch.save(without(), path), path.write_bytes(path.read_bytes()[:-99])), "cannot be read"),
        (lambda path: torch.save(Evil(), path), "cannot be read as weights"),
        (lambda path: torch.save([1, 2], path), "does not hold VGG-19 as torchvision saves it"),
        (lambda path: torch.save({"features.0.weight": 1}, path), "'features.0.weight' is missing"),
        (lambda path: torch.save({"state": 1}, path), "'features.0.weight' is missing"),
        (lambda path: torch.save(without("features.28.bias"), path), "'features.28.bias' is missing"),
        (
            lambda path: torch.save(without() | {"features.5.weight": torch.zeros(9, 2, 3, 3)}, path),
            r"'features.5.weight' is \[9, 2, 3, 3\] in place of \[4, 2, 3, 3\]",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_to_bring(spoil, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoil(tmp_path / "v.pth")
    with pytest.raises(UserError, match=message) as refused:
        load_vgg19("v.pth")
    for word in ("v.pth", NAME, VGG19_Weights.IMAGENET1K_V1.url, "--perceptual PATH", "--perceptual off"):
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Path("ran").exists()


# ---- torchvision's cache ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, where the file belongs; a download fails as without a network unless a test replaces it."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def offline(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    return tmp_path / "hub" / "checkpoints" / NAME


def test_weights_in_the_cache_need_no_network(cache):
    cache.parent.mkdir(parents=True)
    narrow_vgg.save(cache)
    assert len(load_vgg19("torchvision")(torch.zeros(1, 3, 16, 16))) == 5
    assert [path.name for path in cache.parent.iterdir()] == [NAME]  # and no lock


def test_without_cache_and_network_the_message_says_what_to_do(cache):
    with pytest.raises(UserError, match=r"their download failed .*no network") as refused:
        load_vgg19("torchvision")
    said = str(refused.value)
    for word in (VGG19_Weights.IMAGENET1K_V1.url, f"as '{cache}'", "--perceptual PATH", "--perceptual off"):
        assert word in said
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_said_too(cache):
    (cache.parents[2] / "hub").write_text("not a folder")
    with pytest.raises(UserError, match=r"their download failed .*Not a directory"):
        load_vgg19("torchvision")


def test_weights_are_downloaded_with_their_hash_where_there_is_a_network(cache, monkeypatch, capsys):
    asked = []

    def download(url, path, prefix, progress):
        asked.append((url, path, prefix))
        narrow_vgg.save(Path(path))

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    load_vgg19("torchvision")
    load_vgg19("torchvision")
    assert asked == [(VGG19_Weights.IMAGENET1K_V1.url, str(cache), "dcbb9e9d")]
    assert f"MB, to {cache}" in capsys.readouterr().err


def test_of_ranks_that_start_together_one_downloads(cache, monkeypatch):
    """This test holds the lock, as a downloading rank does: another one waits for it and then finds the file."""
    asked, found, waiting = [], [], threading.Event()

    class Lock(FileLock):
        def acquire(self, *args, **kwargs):
            waiting.set()
            return super().acquire(*args, **kwargs)

    monkeypatch.setattr("nets.vgg.FileLock", Lock)
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *_, **__: asked.append(1))
    cache.parent.mkdir(parents=True)
    other = threading.Thread(target=lambda: found.append(load_vgg19("torchvision")))
    with FileLock(cache.with_suffix(".lock")):
        other.start()
        assert waiting.wait(60)
        narrow_vgg.save(cache)
    other.join()
    assert len(found) == 1
    assert not asked
