"""Reading checkpoints: of the former writer, damaged, foreign or hostile ones."""

import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gan.checkpoint import Share, check_left_out, checksum, load, load_module_state, read, whole
from gan.errors import UserError
from strategies.checkpoint.folders import remove
from strategies.checkpoint.writing import save
from tests.support.saved import number_of, numbered

FORMER = Path(__file__).parents[2] / "support" / "former.ckpt"  # see test_checkpoint_io.py
BITS = "2a6e3665ad3ad2b77cc75ab5fb123670eed8ef4042d4e428ca0d084ec09aaecd"  # by the former reader


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "x.ckpt", numbered(1))
    return tmp_path / "x.ckpt"


def digest(tree):
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def test_a_checkpoint_of_the_former_writer_is_read_bit_for_bit():
    tree = whole(load(FORMER))
    assert digest(tree) == BITS
    tree["state_dict"]["net.2.weight"][0, 1] += 1e-15
    assert digest(tree) != BITS


def test_a_checksum_is_of_the_bits_in_a_dtype():
    tensor = torch.tensor([[0.1, -2.0], [3.0, 0.7]])
    noted = checksum(tensor)
    assert noted == checksum(tensor.clone()) == checksum(tensor.T.contiguous().T)
    assert noted == checksum(tensor.double(), torch.float32)
    assert noted != checksum(tensor.double())
    assert noted != checksum(tensor + 1e-7)
    assert checksum(tensor.bfloat16()) == checksum(tensor, torch.bfloat16)


def test_a_parameter_that_is_left_out_must_be_as_it_was():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    state = {name: value for name, value in net.state_dict().items() if not name.startswith("0.")}
    noted = {name: checksum(value) for name, value in net.named_parameters() if name not in state}
    with pytest.raises(RuntimeError, match=r"missing: 0\.weight, 0\.bias"):
        load_module_state(net, state)
    load_module_state(net, state, left_out=noted)
    check_left_out(net, noted)
    with torch.no_grad():
        net[0].bias += 1e-6
    with pytest.raises(UserError, match=r"checkpoints leave '0\.bias' out, for its player has saved=False"):
        check_left_out(net, noted)
    with pytest.raises(UserError, match="checkpoints leave 'other' out"):
        check_left_out(net, {"other": noted["0.bias"]})


def test_a_tensor_is_read_into_memory_that_is_not_contiguous(tmp_path):
    tensor = torch.randn(2, 3, 4, 5)
    save(tmp_path / "x.ckpt", {"t": Share.whole(tensor)})
    there = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    read({load(tmp_path / "x.ckpt")["t"]: Share.whole(there)})
    assert torch.equal(there, tensor) and there.is_contiguous(memory_format=torch.channels_last)


def test_a_file_that_is_gone_or_torn_is_noticed(path):
    (shard,) = path.glob("shard-*")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"x.ckpt cannot be read as a checkpoint"):
        number_of(path)
    shard.unlink()
    with pytest.raises(UserError, match=r"'state/a' is missing or not whole; has a file been removed\?"):
        number_of(path)
    shard.write_bytes(content)
    assert number_of(path) == 1
    (path / "values.pt").unlink()
    with pytest.raises(UserError, match=r"it has no values.pt; is it a run's folder\?"):
        number_of(path)


def test_one_that_is_replaced_while_it_is_read_is_noticed(path):
    tree = load(path)
    save(path, numbered(2))
    with pytest.raises(UserError, match="it was replaced by a newer one meanwhile; try again"):
        whole(tree)
    assert number_of(path) == 2


def test_a_later_format_is_named(path):
    saved = torch.load(path / "values.pt", weights_only=True)
    torch.save({**saved, "format": 2}, path / "values.pt")
    with pytest.raises(UserError, match="it has format 2, and this version reads 1"):
        load(path)


def test_a_checkpoint_with_a_note_in_it_is_still_one(path):
    (path / "note.txt").write_text("the good one")
    assert number_of(path) == 1
    save(path, numbered(2))
    assert number_of(path) == 2 and not (path / "note.txt").exists()
    (path / "note.txt").write_text("the good one")
    remove(path)
    assert not path.exists()


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "name", ["values.pt", ".metadata", "__0_0.distcp", "shard-00002-model-00001-of-00001.safetensors"]
)
def test_code_in_a_checkpoint_is_not_run(name, path, tmp_path):
    malice = Malice(str(tmp_path / "ran"))
    if name == "values.pt":
        torch.save({"format": 1, "values": malice, "tensors": {}}, path / name)
    else:
        (path / name).write_bytes(pickle.dumps(malice))
    if name[0] in "._":
        assert number_of(path) == 1
    else:
        with pytest.raises(UserError, match="cannot be read as a checkpoint"):
            number_of(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(malice))  # the control: it would have been
    assert (tmp_path / "ran").exists()


def test_a_checkpoint_of_one_file_is_named_as_what_it_is(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt")
    with pytest.raises(UserError, match=r"old.ckpt cannot be read .*: it is one file, and checkpoints are directories"):
        load(tmp_path / "old.ckpt")


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_in_it_is_refused_and_not_waited_for(make, which, path):
    file = sorted(path.iterdir())[which]
    file.unlink()
    make(file)
    with pytest.raises(
        UserError, match=r"x.ckpt cannot be read as a checkpoint: it is a .*, and no file: .*" + file.name
    ):
        whole(load(path))
