"""VQGAN's published files are read without running code, and written."""

import os
from pathlib import Path

import pytest
import torch

from gan.files.errors import UserError
from gan.games.vqgan import VqGan
from nets.discriminator import PatchGan
from nets.published.files import published_state, read_published, weights_in
from nets.vqgan import VqAutoencoder
from tests.support import families
from tests.unit.gan.games.test_vqgan import game_of


class Callback:
    """What old checkpoints of Lightning hold beside the weights."""


class Harmful:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


def game(seed=0, norm="batch", learning="learned"):
    torch.manual_seed(seed)
    net = VqAutoencoder(1, 32, (1, 2), 1, (1,), 6, 5, 7, learning=learning)
    return VqGan(net, PatchGan(1, 4, 2, norm), rate=1e-4, start=10)


def state_of(game):
    (file,) = game.published()
    networks = file.networks.items()
    return {f"{start}{name}": value for start, each in networks for name, value in published_state(each).items()}


@pytest.mark.parametrize(("norm", "learning"), [("batch", "learned"), ("act", "ema")])
def test_a_file_gives_the_weights_back(tmp_path, norm, learning):
    one, other = (game(seed, norm, learning) for seed in (0, 1))
    picture = torch.rand(2, 1, 16, 16)
    one.discriminator(picture), one.autoencoder(picture)  # codes and ActNorm begin with these
    one.published()[0].write(tmp_path / "last.ckpt")
    assert read_published(tmp_path, other.published()) == ["last.ckpt"]
    for each in (one, other):
        each.eval()
    torch.testing.assert_close(other.autoencoder(picture)[0], one.autoencoder(picture)[0])
    torch.testing.assert_close(other.discriminator(picture), one.discriminator(picture))


@pytest.mark.parametrize("norm", ["batch", "act"])
def test_the_names_are_the_published_ones(norm):
    figures = families.load("vqgan.pt")
    keys = {key: shape for key, shape in figures["legacy"]["keys"].items()}
    if norm == "act":
        keys = {key: shape for key, shape in keys.items() if "loss." not in key} | figures["actnorm"]["keys"]
    keys = {key: list(shape) for key, shape in keys.items() if "perceptual" not in key}
    assert {key: list(value.shape) for key, value in state_of(game_of(figures, norm)).items()} == keys


def test_no_code_in_a_file_is_run_and_what_is_no_weight_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = game()
    state = state_of(made) | {"loss.perceptual_loss.lin0.model.1.weight": torch.ones(1)}
    torch.save({"state_dict": state, "callbacks": {Callback: 1, "one": Callback()}, "epoch": 3}, "any.ckpt")
    assert read_published("any.ckpt", made.published()) == ["any.ckpt"]
    torch.save({"state_dict": state, "callbacks": Harmful()}, "last.ckpt")
    with pytest.raises(UserError, match="cannot be read"):
        weights_in(Path("last.ckpt"))
    assert not Path("ran").exists()


def test_a_file_without_a_discriminator_gives_the_autoencoder(tmp_path):
    one, other = game(), game(1)
    torch.save({"state_dict": published_state(one.autoencoder)}, tmp_path / "last.ckpt")
    before = {name: value.clone() for name, value in other.discriminator.state_dict().items()}
    read_published(tmp_path, other.published())
    found, wanted = (each.autoencoder.state_dict() for each in (other, one))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert all(torch.equal(value, before[name]) for name, value in other.discriminator.state_dict().items())


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no weights")
    torch.save([1], tmp_path / "list")
    for name, words in (("text", "cannot be read"), ("list", "holds no published weights"), ("none", "cannot be read")):
        with pytest.raises(UserError, match=words):
            weights_in(tmp_path / name)
    made = game()
    torch.save(
        {"state_dict": state_of(made) | {"encoder.mid.block_1.conv1.weight": torch.ones(1)}}, tmp_path / "last.ckpt"
    )
    with pytest.raises(UserError, match=r"another size: encoder.mid.block_1.conv1.weight is \[1\] there"):
        read_published(tmp_path, made.published())
