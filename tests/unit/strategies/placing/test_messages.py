"""Objects as bytes and tensors: any container, one tensor once, devices, and what cannot be sent."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gan.files.errors import UserError
from strategies.placing.messages import Packed, unpacked

CPU = torch.device("cpu")


@dataclass
class Own:
    inner: dict[str, Tensor]
    count: int


def test_tensors_are_found_in_any_container():
    one, other = torch.ones(2), torch.zeros(3)
    packed = Packed(([Own({"a": one}, 2)], {"b": (one, other)}, None), CPU)
    assert [each is tensor for each, tensor in zip(packed.tensors, (one, other), strict=True)] == [True, True]
    found = unpacked(packed.content, [one + 1, other + 1], CPU)
    assert found[0][0].count == 2 and found[0][0].inner["a"] is found[1]["b"][0]
    assert torch.equal(found[1]["b"][1], torch.ones(3)) and found[2] is None


def test_the_rank_s_device_becomes_the_other_s():
    packed = Packed([torch.device("cuda", 1), torch.device("cpu")], torch.device("cuda", 1))
    assert unpacked(packed.content, [], torch.device("cuda", 3)) == [torch.device("cuda", 3), CPU]


def test_what_cannot_be_sent_is_named():
    with pytest.raises(UserError, match="what it is called with cannot be sent"):
        Packed(lambda x: x, CPU, "what it is called with")
