"""VQGAN's published files are read without running code, and written."""

import os
from pathlib import Path

import pytest
import torch

from gan.files.errors import UserError
from nets.norm import ActNorm
from nets.patch import PatchGan
from nets.published.vqgan import LastCkpt, ours, read
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


@pytest.mark.parametrize("norm", ["batch", "act"])
@pytest.mark.parametrize("learning", ["learned", "ema"])
def test_a_file_gives_the_networks_back(tmp_path, norm, learning):
    net, judge = networks(norm, learning)
    picture = torch.rand(2, 1, 16, 16)
    judge(picture), net(picture)  # codes and ActNorm begin with these
    LastCkpt(net, judge).write(tmp_path / "last.ckpt")
    found, of_judge = ours(read(tmp_path / "last.ckpt"), learning)
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
    net, judge = ours(families.weights(keys, 1))
    state = LastCkpt(net, judge).state()
    assert {key: list(value.shape) for key, value in state.items()} == {key: list(keys[key]) for key in keys}


def test_no_code_in_a_file_is_run_and_what_is_no_weight_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = LastCkpt(*networks()).state() | {"loss.perceptual_loss.lin0.model.1.weight": torch.ones(1)}
    torch.save({"state_dict": state, "callbacks": {Callback: 1, "one": Callback()}, "epoch": 3}, "last.ckpt")
    assert ours(read(Path("last.ckpt")))[1] is not None
    torch.save({"state_dict": state, "callbacks": Harmful()}, "last.ckpt")
    with pytest.raises(UserError, match="cannot be read"):
        read(Path("last.ckpt"))
    assert not Path("ran").exists()


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no weights")
    torch.save([1], tmp_path / "list")
    for name, words in (("text", "cannot be read"), ("list", "holds no weights"), ("none", "cannot be read")):
        with pytest.raises(UserError, match=words):
            read(tmp_path / name)
    state = LastCkpt(*networks()).state()
    with pytest.raises(UserError, match=r"'quantize.embedding.weight' is missing"):
        ours({key: value for key, value in state.items() if "embedding" not in key})
    with pytest.raises(UserError, match="another network"):
        ours(state | {"encoder.mid.block_1.conv1.weight": torch.ones(1)})
