"""Values come back from JSON as they were, in their kinds, and what has no kind there is refused."""

import json
import math
from collections import Counter, OrderedDict, namedtuple
from datetime import timedelta
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

from gan.files.checkpoint import load
from gan.files.errors import UserError
from gan.files.values import decode, encode, text_of
from strategies.checkpoint.writing import save

Pair = namedtuple("Pair", "a b")
Small = IntEnum("Small", "one two")
Named = Enum("Named", "one two")

PLAIN = [
    *(None, True, False, 0, -7, 2**70, 0.1, -0.0, 1e-308, float("inf"), float("-inf"), "", "text", "\ud800", "\0"),
    *([], [1, [2.0, ["3"]]], (), (1, (2, [3])), {}, {"a": {"b": 1}}, {1: "a", "1": "b", None: 3, (1, 2): 4, 0.5: 5}),
    *({"$tuple": [1]}, {"$": 1, "b": 2}, {1, 2}, set(), frozenset({"a"}), b"", b"\0\xff", bytearray(b"ab"), 1 - 2j),
    *(torch.float64, torch.bfloat16, torch.complex64, torch.uint8, torch.Size([2, 3]), torch.Size([])),
    *(torch.device("cuda", 1), OrderedDict(b=1, a=(2,)), Counter("aab"), {"nested": [{1: {(2,): {3}}}]}),
]


def there_and_back(value):
    return decode(json.loads(text_of(encode(value, lambda key, value: None))), None)


def kinds(value):
    if isinstance(value, dict):
        return type(value), [(kinds(name), kinds(each)) for name, each in value.items()]
    return type(value), list(map(kinds, value)) if isinstance(value, list | tuple) else None


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_value_comes_back_in_its_kind(value):
    back = there_and_back(value)
    assert back == value and kinds(back) == kinds(value)
    assert math.copysign(1, back) == math.copysign(1, value) if value == 0.0 and type(value) is float else True


def test_no_number_comes_back_as_none():
    assert math.isnan(there_and_back({"a": math.nan})["a"])


@pytest.mark.parametrize(
    "value",
    [
        *(object(), Pair(1, 2), Small.one, Named.one, np.float64(1), np.arange(2), timedelta(1), range(3), len, int),
        *(type("Text", (str,), {})("a"), type("Dict", (dict,), {})(), nn.ReLU(), torch.Generator(), slice(1)),
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
    save(
        tmp_path / "x.ckpt",
        {"many": TENSORS, "deep": {(1,): [(TENSORS[0],)]}, "1": {2: TENSORS[1]}, 1: {"2": TENSORS[1]}},
    )
    tree = load(tmp_path / "x.ckpt")
    for back, tensor in zip(tree["many"], TENSORS, strict=True):
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        assert (
            back.float().tolist() == tensor.float().tolist() if not tensor.is_complex() else torch.equal(back, tensor)
        )
    assert torch.equal(tree["deep"][1,][0][0], TENSORS[0]) and tree["1"][2] == tree[1]["2"] == TENSORS[1]


def test_optimizers_and_schedules_come_back(tmp_path):
    optimizer = SGD([torch.zeros(1)], lr=torch.tensor(0.1))
    schedules = [MultiStepLR(optimizer, [3, 5, 5]).state_dict(), OneCycleLR(optimizer, 1.0, 10).state_dict()]
    save(tmp_path / "x.ckpt", {"schedules": schedules, "groups": optimizer.state_dict()["param_groups"]})
    tree = load(tmp_path / "x.ckpt")
    assert tree["schedules"] == schedules and type(tree["schedules"][0]["milestones"]) is Counter
    assert tree["groups"] == optimizer.state_dict()["param_groups"]
