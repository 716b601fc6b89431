"""Reading checkpoints: in parts, and into modules. Damage is in test_damage.py."""

import pytest
import torch
from torch import nn

from gan.files.checkpoint import Share, check_left_out, checksum, load, load_module_state, read
from gan.files.errors import UserError
from strategies.checkpoint.writing import save


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


@pytest.mark.parametrize("first", [0, 262_143, 262_144, 700_000])
def test_a_range_of_several_chunks_is_read(first, tmp_path):
    tensor = torch.arange(1_000_000.0)
    save(tmp_path / "x.ckpt", {"t": Share.whole(tensor)})
    part = torch.zeros(300_000)
    read({load(tmp_path / "x.ckpt")["t"]: Share(part, tensor.shape, first)})
    assert torch.equal(part, tensor[first : first + 300_000])
