"""What a checkpoint holds: its values and tensors, and what is missing or of another kind. Damage: test_damage.py."""

import json
import math
from collections import Counter, OrderedDict, namedtuple
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

from gan.files.checkpoint import Share, check_left_out, checksum, load, load_module_state, read
from gan.files.errors import UserError
from gan.files.finite import as_made, names_of, not_finite, of_players
from gan.files.tensors import write
from gan.files.values import decode, encode, text_of
from strategies.checkpoint.writing import save


def test_a_checksum_is_of_the_bits_in_a_dtype():
    tensor = torch.tensor([[0.1, -2.0], [3.0, 0.7]])
    noted = checksum(tensor)
    assert noted == checksum(tensor.clone()) == checksum(tensor.T.contiguous().T)
    assert noted == checksum(tensor.double(), torch.float32)
    assert noted != checksum(tensor.double())
    assert noted != checksum(tensor + 1e-7)
    assert checksum(tensor.bfloat16()) == checksum(tensor, torch.bfloat16)


def test_one_element_that_was_expanded_has_bytes(tmp_path):
    one = torch.ones((), dtype=torch.float64).expand(1, 1)
    assert checksum(one) == checksum(torch.ones(1, 1, dtype=torch.float64))
    write(tmp_path / "one.safetensors", {"x": Share.whole(one)})
    assert load_file(tmp_path / "one.safetensors")["x"].tolist() == [1.0]


def test_a_parameter_that_is_left_out_must_be_as_it_was():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    state = {name: value for name, value in net.state_dict().items() if not name.startswith("0.")}
    noted = {name: checksum(value) for name, value in net.named_parameters() if name not in state}
    with pytest.raises(RuntimeError, match=r"missing: 0\.weight, 0\.bias"):
        load_module_state(net, state)
    with pytest.raises(RuntimeError, match=r"^missing: none; unexpected: 0\.bias, 0\.weight, 1\.bias, \.\.\.$"):
        load_module_state(nn.Sequential(), dict(sorted(net.state_dict().items())))
    load_module_state(net, state, left_out=noted)
    check_left_out(net, noted)
    with pytest.raises(UserError, match="checkpoints leave 'other' out"):
        check_left_out(net, {"other": noted["0.bias"]})


class OldSpectral(nn.Linear):
    """As in torch 0.4, and in MUNIT: `weight` is a buffer in the memory of `weight_orig` until the first forward."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        weight = self._parameters.pop("weight")
        self.weight_orig = weight
        self.register_buffer("weight", weight.data)
        self.register_buffer("seen", torch.empty(0))
        self.register_buffer("norm", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm = self.weight_orig.detach().norm()
        self.weight = self.weight_orig / self.norm
        self.seen = torch.cat([self.seen, x.mean(0)])
        return super().forward(x)


def test_a_buffer_that_a_forward_makes_is_loaded_before_the_first_forward():
    trained, begun = OldSpectral(), OldSpectral()
    trained(torch.ones(3, 2))
    load_module_state(begun, trained.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(trained.parameters(), begun.parameters(), strict=True))
    there, loaded = dict(trained.named_buffers()), dict(begun.named_buffers())
    assert there.keys() == loaded.keys() == {"weight", "seen", "norm"}
    assert all(torch.equal(there[name], loaded[name]) for name in there)


def test_a_buffer_that_stays_in_a_weights_memory_stays_there():
    trained, begun = OldSpectral(), OldSpectral()
    load_module_state(begun, trained.state_dict())
    assert torch.equal(begun.weight, trained.weight_orig)
    assert begun.weight.data_ptr() == begun.weight_orig.data_ptr()


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    """A checkpoint of a million numbers, which has four chunks."""
    path = tmp_path_factory.mktemp("million") / "x.ckpt"
    save(path, {"t": Share.whole(torch.arange(1_000_000.0))})
    return path


@settings(max_examples=8)
@given(first=st.integers(0, 700_000), count=st.integers(1, 300_000))
@example(first=262_143, count=2)
@example(first=262_144, count=262_144)
def test_any_range_of_several_chunks_is_read(first, count, million):
    part = torch.zeros(count)
    read({load(million)["t"]: Share(part, torch.Size([1_000_000]), first)})
    assert torch.equal(part, torch.arange(float(first), first + count))
    there = torch.zeros(10, 20, 50, 100).to(memory_format=torch.channels_last)  # memory that is not contiguous
    read({load(million)["t"]: Share(there, torch.Size([1_000_000]))})
    assert torch.equal(there.reshape(-1), torch.arange(1_000_000.0))
    assert there.is_contiguous(memory_format=torch.channels_last)


# ---- values ----


Pair = namedtuple("Pair", "a b")
Small = IntEnum("Small", "one two")
Named = Enum("Named", "one two")

PLAIN = [
    *(None, True, False, 0, -7, 2**70, 0.1, -0.0, 1e-308, float("inf"), float("-inf"), "", "text", "\ud800", "\0"),
    *([], [1, [2.0, ["3"]]], (), (1, (2, [3])), {}, {"a": {"b": 1}}, {1: "a", "1": "b", None: 3, (1, 2): 4, 0.5: 5}),
    *({"$tuple": [1]}, {"$": 1, "b": 2}, {1, 2}, set(), frozenset({"a"}), b"", b"\0\xff", bytearray(b"ab"), 1 - 2j),
    *(torch.float64, torch.bfloat16, torch.complex64, torch.uint8, torch.Size([2, 3]), torch.Size([])),
    *(torch.device("cuda", 1), OrderedDict(b=1, a=(2,)), Counter("aab"), {"nested": [{1: {(2,): {3}}}]}),
    *(np.float64(0.1), np.float32(0.1), np.float16("inf"), np.int64(-7), np.uint8(200), np.bool_(True)),
]


def kinds(value):
    if isinstance(value, dict):
        return type(value), [(kinds(name), kinds(each)) for name, each in value.items()]
    return type(value), list(map(kinds, value)) if isinstance(value, list | tuple) else str(value)


@pytest.mark.parametrize("value", [*PLAIN, math.nan], ids=repr)
def test_each_kind_of_value_comes_back(value):
    back = decode(json.loads(text_of(encode(value, lambda key, value: None))), None)
    assert kinds(back) == kinds(value) and (back == value or value != value)


@pytest.mark.parametrize(
    "value",
    [
        *(object(), Pair(1, 2), Small.one, Named.one, np.float128(1), len),
        *(type("Text", (str,), {})("a"), type("Dict", (dict,), {})()),
        *(torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), nn.Parameter(torch.zeros(2, device="meta"))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_kind_is_refused_with_its_place(value, tmp_path):
    with pytest.raises(UserError, match=r"'a/1' is a .*, which could not be loaded again without running code"):
        save(tmp_path / "x.ckpt", {"a": (0, value)})
    assert not list(tmp_path.iterdir())


TENSORS = [
    *(torch.arange(6).view(2, 3).t(), torch.tensor(2.5), torch.zeros(0, 3), torch.ones(1).expand(4)),
    *(torch.randn(3).to(kind) for kind in (torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.complex128)),
    *(torch.tensor([True, False]), torch.tensor([2**40], dtype=torch.uint64), torch.randn(2, 2).conj()),
    nn.Parameter(torch.randn(2, dtype=torch.float64)),
]


def test_tensors_among_the_values_come_back_bit_for_bit(tmp_path):
    one, other = TENSORS[:2]
    save(tmp_path / "x.ckpt", {"many": TENSORS, "deep": {(1,): [(one,)]}, "1": {2: other}, 1: {"2": other}})
    tree = load(tmp_path / "x.ckpt")
    for back, tensor in zip(tree["many"], TENSORS, strict=True):
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        assert torch.equal(*(each if each.is_complex() else each.float() for each in (back, tensor)))
    assert torch.equal(tree["deep"][1,][0][0], one) and tree["1"][2] == tree[1]["2"] == other


def test_optimizers_and_schedules_come_back(tmp_path):
    optimizer = SGD([torch.zeros(1)], lr=torch.tensor(0.1))
    schedules = [MultiStepLR(optimizer, [3, 5, 5]).state_dict(), OneCycleLR(optimizer, 1.0, 10).state_dict()]
    save(tmp_path / "x.ckpt", {"schedules": schedules, "groups": optimizer.state_dict()["param_groups"]})
    tree = load(tmp_path / "x.ckpt")
    assert tree["schedules"] == schedules and type(tree["schedules"][0]["milestones"]) is Counter
    assert tree["groups"] == optimizer.state_dict()["param_groups"]


# ---- finite ----


KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_of_any_kind_is_found(kind, value):
    good = torch.ones(3, 1000).to(kind)
    tensors = {"good": good, "bad": torch.ones(3, 1000)}
    tensors["bad"][1, 999] = value
    tensors["bad"] = tensors["bad"].to(kind)
    assert not_finite(tensors) == {"bad": "NaN" if value != value else "infinity"}


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("mean", torch.zeros(2))


def test_infinities_that_the_constructor_made_are_meant():
    module = Masked()
    meant = {"net": as_made(module)}
    assert meant == {"net": {"mask"}}
    assert of_players([("net", module)], meant) == []
    module.mean[1] = torch.inf
    assert of_players([("net", module)], meant) == [("net", "mean", "infinity")]
    with torch.no_grad():
        module.weight[0, 0] = torch.nan
    said = names_of(of_players([("net", module)], meant))
    assert said == "'weight' of player 'net', and 1 more tensors have NaN or infinity"
    with torch.device("meta"):
        assert as_made(Masked()) == {"mask", "mean"}  # nobody knows
