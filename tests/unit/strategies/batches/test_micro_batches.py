"""What is a sample's, and what is a rank's."""

import random
from collections import UserDict, defaultdict
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import Precision
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from gan import GanModule, Phase
from gan.files.errors import UserError
from strategies import PhaseStrategy, turn
from strategies.batches import random_state
from strategies.batches.micro_batches import Batches
from strategies.turn import Training
from strategies.world import World
from tests.support.hard_games import One
from tests.support.parity import distance, train, trainer, vectors

PLAIN = Batches()  # of one loader, with no list in its batches


class Pair(NamedTuple):
    image: torch.Tensor
    caption: list


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    caption: tuple
    scale: float = 2.0


def x(rows=4):
    """Rows that tell their number."""
    return torch.arange(float(rows))


def clips(*lengths):
    """Tensors of these lengths that tell their number."""
    return [torch.full((length,), float(number)) for number, length in enumerate(lengths)]


def test_micro_batches_share_constants():
    constants = {"scale": torch.tensor(2.0), "bias": torch.tensor([3.0]), "size": (256, 256), "set": "train"}
    batch = {"x": x(), "pair": (torch.arange(8).reshape(4, 2), 5), **constants}
    first, second = PLAIN.split(batch, PLAIN.rows(batch), 2, "phase")
    assert second["pair"][0].tolist() == [[2, 3], [6, 7]] and second["pair"][1] == 5
    assert all(first[name] == second[name] == value for name, value in constants.items())


class Squared(One):
    """SGD, which shows how large a gradient is, as Adam does not."""

    of_net: ClassVar = {"optimizer": partial(torch.optim.SGD, lr=0.1)}


def test_gradients_of_micro_batches_are_averaged():
    in_parts = type("Parts", (Squared,), {"of_play": {"micro_batches": 4}})
    assert distance(train(Squared, policy="single"), train(in_parts, policy="single")) < 1e-12


@pytest.mark.parametrize(
    ("batch", "get"),
    [
        (x(), lambda part: part),
        ([x(), x()], lambda part: part[1]),
        ((x(), tuple("abcd")), lambda part: part[0]),
        (UserDict(x=x()), lambda part: part["x"]),
        (MappingProxyType({"x": x()}), lambda part: part["x"]),
        (defaultdict(list, x=x()), lambda part: part["x"]),
        (Pair(x(), list("abcd")), lambda part: part.image),
        (Sample(x(), tuple("abcd")), lambda part: part.image),
        ({"deep": [{"x": x()}, {"x": x()}]}, lambda part: part["deep"][1]["x"]),
        ({"x": x().numpy()}, lambda part: part["x"]),
        ({"crops": [x(), x()]}, lambda part: part["crops"][1]),
        ({"named": ("photo", x())}, lambda part: part["named"][1]),
        # Lists with an item for each sample: the first number of the item tells which.
        ({"clips": clips(5, 7, 7, 3)}, lambda part: [clip[0] for clip in part["clips"]]),
        ({"clips": clips(3, 3, 3, 3), "x": x()}, lambda part: [clip[0] for clip in part["clips"]]),
        ({"boxes": [{"at": at} for at in clips(1, 2, 3, 4)]}, lambda part: [each["at"][0] for each in part["boxes"]]),
        (["0", "1", "2", "3"], lambda part: list(map(int, part))),
        (("0", "1", "2", "3"), lambda part: list(map(int, part))),
    ],
)
def test_all_kinds_of_batches_are_cut_alike(batch, get):
    assert PLAIN.rows(batch) == 4
    first, second = PLAIN.split(batch, PLAIN.rows(batch), 2, "phase")
    assert [*map(int, get(first))] == [0, 2]
    assert [*map(int, get(second))] == [1, 3]
    assert type(first) is (dict if isinstance(batch, MappingProxyType) else type(batch))


@given(each=st.integers(1, 5), parts=st.integers(1, 5))
def test_micro_batches_are_every_kth_row_and_parts_of_dp_are_neighbours(each, parts):
    total = each * parts
    batch = {"x": x(total), "names": tuple(map(str, range(total)))}
    micro, dealt = PLAIN.split(batch, total, parts, "phase"), [PLAIN.deal(batch, k, parts) for k in range(parts)]
    for number in range(parts):
        assert micro[number]["x"].tolist() == [*map(int, micro[number]["names"])] == [*range(number, total, parts)]
        neighbours = [*range(number * each, (number + 1) * each)]
        assert dealt[number]["x"].tolist() == [*map(int, dealt[number]["names"])] == neighbours
    assert parts > 1 or micro[0] is batch
    assert torch.equal(PLAIN.join(dealt)["x"], x(total))


def words():
    return torch.nested.nested_tensor([torch.ones(1 + number, 2) for number in range(4)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": x(8), "b": x()}, r"has 8 samples and batch\['b'\] is of 4 rows, .*loaders of one batch belong"),
        ({"x": x(), "y": np.zeros(3)}, r"batch\['y'\] is of 3 rows"),
        ({"x": x(), "names": ["one", "two"]}, r"batch\['names'\] is a list of 2 strings, .*can be an attribute of the"),
        ({"x": x(), "labels": [1, 2, 3, 4]}, r"batch\['labels'\] is a list of 4 numbers, .*; return a tensor"),
        ({"x": x(), "clips": clips(2, 3)}, r"batch\['clips'\] is a list of 2 with 2 and 3 rows in its items"),
        ({"x": x(), "clips": clips(3, 3)}, r"batch\['clips'\]\[0\] is of 3 rows"),
        ({"x": x(), "clips": clips(4, 4, 4, 4)}, r"batch\['clips'\] is a list of 4 with 4 rows in each item, .*a dict"),
        ({"x": x(), "graph": x().to_sparse()}, r"batch\['graph'\] is a sparse or nested tensor, .*; return dense"),
        ({"x": x(), "words": words()}, r"batch\['words'\] is a sparse or nested tensor"),
        ({"x": x(), "net": torch.nn.Linear(1, 1)}, r"batch\['net'\] is a Linear, which cannot be cut, .*; return tens"),
    ],
)
def test_what_is_ambiguous_is_refused_by_its_key(batch, message):
    with pytest.raises(UserError, match=f"phase 'fool': the batch .*{message}"):
        PLAIN.split(batch, PLAIN.rows(batch), 2, "fool")
    with pytest.raises(UserError, match="strategy dp: the batch"):
        PLAIN.deal(batch, 0, 2)
    assert PLAIN.rows(batch) >= 4  # but a whole batch may hold anything


class Bag:
    """A batch of a class of one's own, in which nothing is found."""

    def __init__(self, step):
        self.x = vectors(step)["x"]


class OfBags(Squared):
    def play(self, batch):
        return super().play(vars(batch))


def test_one_device_trains_on_a_batch_of_any_class_and_does_not_cut_it():
    bags, parted = DataLoader([Bag(0)], batch_size=None), type("Parted", (OfBags,), {"of_play": {"micro_batches": 2}})
    trainer(PhaseStrategy("single"), 1, 1).fit(OfBags(), bags)
    with pytest.raises(UserError, match="the batch is a Bag that holds nothing with a row for each sample; return a"):
        trainer(PhaseStrategy("single"), 1, 1).fit(parted(), bags)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="phase 'fool': a rank's batch of 5 does not divide into 2 micro-batches"):
        PLAIN.split(torch.zeros(5, 3), 5, 2, "fool")
    with pytest.raises(UserError, match="a batch of 5 does not divide among the 2 ranks of strategy dp"):
        PLAIN.deal(torch.zeros(5, 3), 0, 2)


def test_rows_are_those_of_the_first_tensor_before_lists_and_single_rows():
    assert PLAIN.rows((torch.tensor(1.0), torch.zeros(7, 2))) == 7
    assert PLAIN.rows({"scale": torch.ones(1), "x": torch.zeros(7)}) == 7
    assert PLAIN.rows({"names": ["a", "b"], "crops": [x(3), x(3)], "x": torch.zeros(7)}) == 7
    assert PLAIN.rows({"crops": [x(3), x(3)], "names": ["a", "b"]}) == 2
    assert PLAIN.rows({"x": torch.zeros(1, 3)}) == 1
    assert PLAIN.row_counts({"a": [x(8), x(8)], "b": [x(4), x(4)]}) == [8, 4]  # a second loader
    assert PLAIN.row_counts([{"image": x(4)}, {"image": x(8)}]) == [4, 8]
    packed = pack_padded_sequence(torch.zeros(4, 3, 2), torch.tensor([3, 3, 2, 1]), batch_first=True)
    assert PLAIN.rows(packed) == PLAIN.rows({"packed": packed}) == 4
    with pytest.raises(UserError, match="the batch is a dict that holds nothing with a row for each sample"):
        PLAIN.rows({"name": "a", "size": (3, 4)})


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_a_tuple_of_tensors_of_one_row_has_one_sample(columns):
    batch = tuple(torch.arange(2.0).view(2, 1) + number for number in range(columns))
    parts = PLAIN.split(batch, PLAIN.rows(batch), 2, "phase")
    assert [PLAIN.row_counts(part) for part in parts] == [[1], [1]]
    assert all(torch.equal(whole, column) for whole, column in zip(PLAIN.join(parts), batch, strict=True))


def test_a_list_once_read_by_items_is_read_so_in_parts_and_columns_stay_columns():
    batches = Batches()
    for columns in ({"pair": [x(2), x(2)]}, {"pair": [x(8), x(8)], "x": x(8)}, [x(3), x(3)], {"triple": [x(5)] * 3}):
        assert batches.learn_lists(columns, 2) is None and not any(batches.lists.values())
    assert batches.learn_lists({"crops": [x(), x()]}, 2) == "batch['crops']" and not any(batches.lists.values())
    batches.learn_lists({"clips": clips(3, 3, 3, 3), "images": [clip[:, None, None] for clip in clips(3, 3, 3, 3)]}, 4)
    for batch in ({"clips": clips(3, 3, 3, 3)}, {"clips": clips(4, 4, 4, 4)}, {"images": [torch.ones(3, 5, 5)] * 4}):
        assert batches.rows(batch) == 4
        parts = batches.split(batch, 4, 2, "phase")
        assert [batches.rows(part) for part in parts] == [2, 2]
        assert batches.rows(batches.join(parts)) == 4
    assert batches.rows({"clips": [torch.ones(3, 1), torch.ones(3, 2)]}) == 3  # padded, with a mask, by a hook


def test_whether_a_list_has_an_item_for_each_sample_other_lengths_show():
    batches = Batches()
    batches.learn_lists({"clips": clips(4, 4, 4, 4)}, 4)
    assert not any(batches.lists.values()) and batches.learn_lists({"clips": clips(3, 3, 3, 3)}, 4) == "batch['clips']"
    assert batches.rows({"clips": clips(3, 3, 3, 3)}) == 3
    assert batches.learn_lists({"clips": clips(2, 4, 3, 4)}, None) is None
    assert batches.learn_lists({"clips": clips(3, 3, 3, 3)}, 4) is None
    assert batches.rows({"clips": clips(3, 3, 3, 3)}) == 4


def test_a_list_of_one_item_is_that_of_the_one_sample_of_a_rank():
    batches, own = Batches(), [{"clips": clips(length)} for length in (3, 1, 4)]
    assert [batches.learn_lists(each, 1) for each in own] == [None] * 3
    assert [batches.rows(each) for each in own] == [1, 1, 1] and batches.rows(batches.join(own)) == 3


@pytest.mark.parametrize(
    ("loaders", "batch", "half"),
    [
        ({"a": 4, "b": 2}, {"a": [x(4), x(4)], "b": x(2)}, {"a": [x(4)[::2], x(4)[::2]], "b": x(1)}),
        ({"a": 4, "b": 2}, {"a": x(4), "b": {"of": ["p", "q"]}}, {"a": x(4)[::2], "b": {"of": ["p"]}}),
        ({"a": 4, "b": 2}, {"a": x(4), "b": {"y": clips(3, 5)}}, {"a": x(4)[::2], "b": {"y": clips(3)}}),
        ({"a": [2, 4], "b": 2}, {"a": [x(2), x(4)], "b": x(2)}, {"a": [x(1), x(4)[::2]], "b": x(1)}),
        ([2, [6, 2]], [x(2), [x(6), x(2)]], [x(1), [x(6)[::2], x(1)]]),
    ],
)
def test_batches_of_several_loaders_are_cut_in_the_ratio_of_their_sizes(loaders, batch, half):
    batches = Batches()
    batches.begin(tree_map(lambda size: SimpleNamespace(batch_size=size), loaders))
    assert batches.learn_lists(batch, None) is None
    total = batches.row_counts(batch)[0]
    assert repr(batches.split(batch, total, 2, "play")[0]) == repr(half)
    assert repr(batches.join([batches.deal(batch, rank, 2) for rank in range(2)])) == repr(batch)


# ---- random state ----


def test_states_of_dice_have_the_same_sign_in_every_process():
    with random_state.untouched():
        random.seed(3)
        np.random.seed(3)
        assert random_state.sign_of(random_state.dice()) == (467634435910507146, None, 606853292, 624, 0, 0.0)


def test_a_micro_batch_has_the_places_of_its_rows():
    phase = Phase("play", lambda batch: batch, "net", micro_batches=2)
    found = []
    for rank in range(2):
        training = Training(GanModule(), {}, Precision(), World(2, rank, torch.device("cpu")))
        found += [[*turn._place(phase, [4], part, 0, training).numbers(2)] for part in range(2)]
    assert found == [[0, 2], [1, 3], [4, 6], [5, 7]]
