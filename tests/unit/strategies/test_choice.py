"""What is typed for a strategy, and what is answered to what cannot be read."""

from unittest import mock

import pytest

from gan.files.errors import UserError
from strategies.choice import Choice, Option, choices
from strategies.policies.policy import Policy


class One(Policy):
    name = "one"
    takes = frozenset({"big", "split"})


class Other(Policy):
    name = "other"
    takes = frozenset({"split"})


KNOWN = {"one": One, "other": Other}


@pytest.fixture(autouse=True)
def options():
    known = {"big": Option("is big"), "split": Option("how many", int, default=4), "lone": Option("of no policy")}
    with mock.patch.dict("strategies.choice.OPTIONS", known, clear=True):
        yield


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("one", {"*": Choice("one")}),
        ("one+big", {"*": Choice("one", {"big": None})}),
        ("one+big+split:2", {"*": Choice("one", {"big": None, "split": 2})}),
        ("a=one+split,*=other", {"a": Choice("one", {"split": 4}), "*": Choice("other")}),
        (" a = one + big , b = other ", {"a": Choice("one", {"big": None}), "b": Choice("other")}),
        ({"a": "one+split:8", "*": "other"}, {"a": Choice("one", {"split": 8}), "*": Choice("other")}),
    ],
)
def test_a_choice_is_a_policy_and_its_options(typed, read):
    assert choices(typed, KNOWN) == read


@pytest.mark.parametrize("text", ["one", "one+big", "one+big+split:2"])
def test_a_choice_is_written_as_it_is_typed(text):
    assert str(choices(text, KNOWN)["*"]) == text


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("a=", "cannot read strategy 'a='; type e.g. ddp"),
        ("=one", "cannot read strategy '=one'"),
        ("a=one,other", "cannot read strategy 'a=one,other'"),
        ("a=one,a=other", "names a player twice"),
        ("third", "unknown strategy 'third'; known: one, other"),
        ({"a": "third+big"}, "unknown strategy 'third'"),
        ("one+small", "unknown option 'small' of strategy 'one'; known: big, split, lone"),
        ("one+", "unknown option '' of strategy 'one'"),
        ("a=other+big,*=one", r"strategy 'other' has no option 'big'; type one\+big, or leave it out"),
        ("one+big:3", r"option 'big' of strategy 'one' takes no value; type one\+big$"),
        ("other+split:x", r"option 'split:x' of strategy 'other': invalid literal"),
    ],
)
def test_what_cannot_be_is_answered_with_what_to_type(typed, answer):
    with pytest.raises(UserError, match=answer):
        choices(typed, KNOWN)
