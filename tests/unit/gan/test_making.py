"""The first weights of networks: made on the meta device, or read from files."""

import json
import os

import pytest
import torch
from torch import nn

from gan import Player
from gan.files.checkpoint import Share
from gan.files.errors import UserError
from gan.making import Making
from gan.pretrained import WeightFiles
from tests.support.meta_games import Judge, weights_of, write_file, write_index
from tests.support.posix import not_on_windows

CPU = torch.device("cpu")


def network(make=Judge):
    with torch.device("meta"):
        return make()


def made(module, seed=3, names=None, name="net"):
    """The values of a network's tensors, or of those with these names."""
    making = Making(module, [Player(name, module)])
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    values = {key: torch.empty(state[key].shape, dtype=state[key].dtype) for key in names or state}
    making.make({state[key]: Share.whole(value) for key, value in values.items()}, seed, CPU)
    return values


def test_they_do_not_depend_on_what_else_is_made():
    whole = made(network())
    assert whole.keys() == dict(Judge().named_parameters()).keys() | dict(Judge().named_buffers()).keys()
    for name, value in whole.items():
        assert torch.equal(made(network(), names=[name])[name], value)
    assert not torch.equal(made(network(), seed=4)["rnn.weight_ih_l0"], whole["rnn.weight_ih_l0"])
    assert not torch.equal(made(network(), name="other")["rnn.weight_ih_l0"], whole["rnn.weight_ih_l0"])


def test_a_module_that_cannot_make_its_tensors_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.empty(2))
            self.register_buffer("count", torch.empty(1, dtype=torch.int64))

    class Some(Bare):
        def reset_parameters(self):
            self.gain.zero_()

    class Wide(Bare):
        def reset_parameters(self):
            self.gain = nn.Parameter(torch.ones(3))
            self.count.zero_()

    words = {
        Bare: r"player 'net': '1.gain' is on torch.device\('meta'\), and its module \(Bare\) has no reset_param",
        Some: r"player 'net': '1.count' is on torch.device\('meta'\), and reset_parameters\(\) of its module \(Some\)",
        Wide: r"player 'net': '1.gain' is on .* does not make it, in the shape \(2,\)",
    }
    for kind, said in words.items():
        with pytest.raises(UserError, match=said):
            made(network(lambda kind=kind: nn.Sequential(nn.Linear(2, 2), kind())))
    assert made(network(lambda: nn.Sequential(nn.Linear(2, 2), Bare())), names=["0.weight"])  # who asks for no more
    with pytest.raises(UserError, match=r"'0.parametrizations.weight.original0' .* \(ParametrizationList\)"):
        made(network(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))))


# ---- pretrained ----


def teacher():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Conv1d(5, 2, 3)).double()


@pytest.fixture
def values():
    return weights_of(teacher())


def files(path, module=None):
    return WeightFiles(Player("teacher", module or teacher(), weights=path))


def refused(path):
    with pytest.raises(UserError) as error:
        files(path).tensors()
    assert str(error.value).startswith(f"player 'teacher': cannot read weights from {path}")
    return str(error.value)


def test_a_file_that_changes_meanwhile_is_refused(values, tmp_path):
    path = write_file(tmp_path / "a.safetensors", values)
    opened = files(path)
    write_file(path, {**values, "0.bias": values["0.bias"] + 1})
    for read in (opened.digest, lambda: opened.read("0.bias", Share.whole(torch.zeros(5)))):
        with pytest.raises(UserError, match="it was changed while the run was set up; start again"):
            read()


NO_BIAS = "it has no '0.bias', which the network (Sequential) has; names must be those of its state_dict()"
MORE = dict.fromkeys("abcd", torch.ones(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"0.bias": None}, NO_BIAS),
        (MORE, "it has 'a', 'b', 'c' and 1 more, which the network (Sequential) does not have"),
        ({"0.bias": torch.ones(6)}, "'0.bias' has shape (6,) there and (5,) in the network (Sequential)"),
    ],
)
def test_names_and_shapes_must_be_those_of_the_network(change, words, values, tmp_path):
    path = tmp_path / "a.safetensors"
    write_file(path, {name: value for name, value in {**values, **change}.items() if value is not None})
    assert words in refused(path)
    for name in ("model.safetensors", "model.fp16.safetensors"):
        write_file(tmp_path / name, values)
    words = f"name one: weights='{tmp_path}/a.safetensors'"
    assert "it has a.safetensors, model.fp16.safetensors, model.safetensors; " + words in refused(tmp_path)


def test_what_is_no_safetensors_file_is_refused(values, tmp_path):
    assert "there is no such file" in refused(tmp_path / "none.safetensors")
    (tmp_path / "empty").mkdir()
    assert "it has no *.safetensors and no *.safetensors.index.json" in refused(tmp_path / "empty")
    torch.save(values, tmp_path / "a.pt")
    assert "write it with safetensors.torch.save_file(weights, path)" in refused(tmp_path / "a.pt")
    path = tmp_path / "a.safetensors"
    torch.save(values, path)
    assert "fetch it again" in refused(path)
    path.write_bytes(b"")
    assert "a.safetensors is damaged: it has no header; fetch it again" in refused(path)
    write_file(path, values)
    path.write_bytes(path.read_bytes()[:-8])
    assert "and its header says" in refused(path) and refused(path).endswith("; fetch it again")
    header = json.dumps({"0.weight": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    assert "'0.weight' in a.safetensors has numbers of kind F4; known are BOOL, U8" in refused(path)


def test_an_index_that_does_not_fit_its_files_is_refused(values, tmp_path):
    folder = write_index(tmp_path / "hub", values)
    index, second = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    where = json.loads(index.read_text())

    def told():
        with pytest.raises(UserError) as error:
            files(folder)
        return str(error.value)

    kept = second.read_bytes()
    second.unlink()
    assert f"player 'teacher': cannot read weights from {second}: No such file" in told()
    second.write_bytes(kept)
    index.write_text(json.dumps({**where, "weight_map": {**where["weight_map"], "more": second.name}}))
    assert "says that 'more' is in it, and it is not; fetch both again" in told()
    index.write_text("{}")
    assert "model.safetensors.index.json is damaged: it is no index of safetensors files" in told()


@not_on_windows
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    assert "it is a named pipe, and no file" in refused(tmp_path / "a.safetensors")
