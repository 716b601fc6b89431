"""VQGAN's published files are read without running code, and written."""

import os
from pathlib import Path

import pytest
import torch

from gan.files.errors import UserError
from nets.norm import ActNorm
from nets.patch import PatchGan
from nets.published.files import published_state, read_published, weights_in
from nets.published.vqgan import JUDGE, last_ckpt
from nets.published.vqgan import networks as networks_of
from nets.vqgan import VqAutoencoder
from tests.support import families


class Callback:
    """What old checkpoints of Lightning hold beside the weights."""


class Harmful:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


def networks(norm="batch", learning="learned"):
    torch.manual_seed(0)
    net = VqAutoencoder(1, 32, (1, 2), 1, (1,), 6, 5, 7, learning=learning)
    return net, PatchGan(1, 4, 2, norm)


def state_of(net, judge):
    return published_state(net) | {f"{JUDGE}{name}": value for name, value in published_state(judge.model).items()}


@pytest.mark.parametrize(("norm", "learning"), [("batch", "learned"), ("act", "ema")])
def test_a_file_gives_the_networks_back(tmp_path, norm, learning):
    net, judge = networks(norm, learning)
    picture = torch.rand(2, 1, 16, 16)
    judge(picture), net(picture)  # codes and ActNorm begin with these
    last_ckpt(net, judge).write(tmp_path / "last.ckpt")
    found, of_judge = networks_of(weights_in(tmp_path / "last.ckpt"), learning)
    assert read_published(tmp_path, [last_ckpt(found, of_judge)]) == ["last.ckpt"]
    torch.testing.assert_close(found.eval()(picture)[0], net.eval()(picture)[0])
    torch.testing.assert_close(of_judge.eval()(picture), judge.eval()(picture))
    assert sum(isinstance(each, ActNorm) for each in of_judge.modules()) == (2 if norm == "act" else 0)


@pytest.mark.parametrize("which", ["batchnorm", "actnorm"])
def test_the_names_are_the_published_ones(which):
    figures = families.load("vqgan.pt")
    keys = {key: shape for key, shape in figures["legacy"]["keys"].items()}
    if which == "actnorm":
        keys = {key: shape for key, shape in keys.items() if "loss." not in key} | figures["actnorm"]["keys"]
    keys = {key: shape for key, shape in keys.items() if "perceptual" not in key}
    net, judge = networks_of(families.weights(keys, 1))
    state = state_of(net, judge)
    assert {key: list(value.shape) for key, value in state.items()} == {key: list(keys[key]) for key in keys}


def test_no_code_in_a_file_is_run_and_what_is_no_weight_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, judge = networks()
    state = state_of(net, judge) | {"loss.perceptual_loss.lin0.model.1.weight": torch.ones(1)}
    torch.save({"state_dict": state, "callbacks": {Callback: 1, "one": Callback()}, "epoch": 3}, "any.ckpt")
    assert read_published("any.ckpt", [last_ckpt(net, judge)]) == ["any.ckpt"]
    torch.save({"state_dict": state, "callbacks": Harmful()}, "last.ckpt")
    with pytest.raises(UserError, match="cannot be read"):
        weights_in(Path("last.ckpt"))
    assert not Path("ran").exists()


def test_a_file_without_a_discriminator_gives_the_autoencoder(tmp_path):
    net, judge = networks()
    weights = published_state(net)
    torch.save({"state_dict": weights}, tmp_path / "last.ckpt")
    other, of_file = networks_of(weights)
    before = published_state(judge.model)
    read_published(tmp_path, [last_ckpt(other, judge)])
    assert of_file is None and all(torch.equal(published_state(other)[name], weights[name]) for name in weights)
    assert all(torch.equal(published_state(judge.model)[name], before[name]) for name in before)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no weights")
    torch.save([1], tmp_path / "list")
    for name, words in (("text", "cannot be read"), ("list", "holds no published weights"), ("none", "cannot be read")):
        with pytest.raises(UserError, match=words):
            weights_in(tmp_path / name)
    net, judge = networks()
    state = state_of(net, judge)
    with pytest.raises(UserError, match=r"'quantize.embedding.weight' is missing"):
        networks_of({key: value for key, value in state.items() if "embedding" not in key})
    torch.save({"state_dict": state | {"encoder.mid.block_1.conv1.weight": torch.ones(1)}}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"another size: encoder.mid.block_1.conv1.weight is \[1\] there"):
        read_published(tmp_path, [last_ckpt(net, judge)])
