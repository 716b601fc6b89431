"""Iterators in a trial: an item that it takes cannot be put back, so who asks for one ends the trial.

Many iterators are kept and not asked: what an optimizer has used up, a counter for the names of layers. So a trial has
something else in the place of each iterator, and its end puts them back as it does all that a loss can reach.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import CellType
from typing import Any, NoReturn

from strategies.batches.reachable import Content

Named = Sequence[tuple[str, Iterator]]
Contents = Iterable[tuple[str, Content, Any, Any]]  # each object's name, its kind, itself, and its content


class MovesOn(Exception):
    """A trial would move on an iterator."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"a trial would move on the iterator '{name}', which cannot be put back; let batches come from "
            f"train_dataloader()"
        )


class StandIn:
    """Stands in the place of an iterator."""

    name, asked = "", False

    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        self.asked = True
        raise MovesOn(self.name)

    def __getattr__(self, _: str) -> NoReturn:  # such as `send` of a generator
        self.__next__()


def fixed(iterators: Named, objects: Iterable[tuple[str, Any]]) -> Named:
    """The iterators in whose place nothing can be put, because a tuple has them."""
    inside = {id(item) for _, value in objects if isinstance(value, tuple | frozenset) for item in value}
    return [(name, each) for name, each in iterators if id(each) in inside]


def take_places(iterators: Named, contents: Contents) -> list[StandIn]:
    """Put something else in the place of each iterator, wherever the objects have it."""
    others = {id(each): StandIn(name) for name, each in iterators}

    def changed(item: Any) -> Any:
        return others.get(id(item), item)

    for _, kind, value, before in contents if others else ():
        if isinstance(value, CellType) and id(before) in others:
            kind.fill(value, changed(before))
        elif isinstance(before, list) and not others.keys().isdisjoint(map(id, before)):
            kind.fill(value, [*map(changed, before)])
        elif isinstance(before, dict) and not others.keys().isdisjoint(map(id, before.values())):
            kind.fill(value, {key: changed(item) for key, item in before.items()})
    return [*others.values()]
