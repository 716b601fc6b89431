"""What a run is, and what all functions that make a run need."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jsonargparse.typing import restricted_number_type, restricted_string_type

from gan.files.errors import UserError, printable, this_rank

if TYPE_CHECKING:
    from lightning import LightningDataModule
    from torch.nn import Module

    from datasets.files.pictures import MadeUp
    from gan import GanModule

HELD_OUT = 1_000_000  # the number of the first face that no run trains on
Purpose = Literal["train", "dry", "resume", "plan", "look"]
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
Pixels = restricted_string_type("Pixels", r"^[1-9]\d{0,4}(x[1-9]\d{0,4})?$", docstring="WIDTHxHEIGHT, such as 256x192")
Share = restricted_number_type("Share", float, [(">=", 0), ("<=", 0.5)])
Upsamplings = restricted_number_type("Upsamplings", int, [(">=", 2), ("<=", 6)])
P = TypeVar("P")


@dataclass(frozen=True)
class _Making:
    purpose: Purpose = "train"
    said: dict[str, Any] = field(default_factory=dict)  # see `of_file`
    shape: dict[str, Any] | None = None  # see `instead_of_data`
    ranks: int = 1  # see `shared`


_MAKING: ContextVar[_Making] = ContextVar("making")


def _making() -> _Making:
    return _MAKING.get(_Making())


class Unchosen(int):
    """The batch size that a run has by itself, if nobody has typed another: `gan.runs.build` makes it `shared`."""


@dataclass
class Run:
    """A game, its data and how long to train. `scores` are validation metrics with a description; lower is better.

    `data` is None if the game has `train_dataloader()` itself. `turns`: in so many steps each network learns once.
    `chosen` are the settings of a configuration by their names, also those that nobody typed.
    """

    game: "GanModule"
    data: "LightningDataModule | None"
    max_steps: int
    scores: dict[str, str] = field(default_factory=dict)
    turns: int = 1
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What is `chosen`, such as "config auto, batch-size 32, gamma 0.0256"."""
        return ", ".join(f"{name.rstrip('_').replace('_', '-')} {value}" for name, value in self.chosen.items())

    @property
    def batch_size(self) -> int | None:
        """The samples of a step, of all ranks together, if the data say so."""
        return getattr(self.data, "batch_size", None)


def check_size(size: tuple[int, int], upsamplings: int) -> None:
    """Refuse a size that the generator cannot reach, before data are read or networks made."""
    height, width = size
    step = 2**upsamplings
    if height % step or width % step:
        fits = max(1, round(height / step)) * step
        raise UserError(
            f"a size of {width}x{height} cannot be halved {upsamplings} times; "
            f"type --size {fits}, or fewer --upsamplings"
        )


def preset(presets: Mapping[str, P], config: str, share: int = 1, **typed: Any) -> P:
    """The published configuration of that name, with what is typed in place of its own. Its batch is `shared`."""
    if config not in presets:
        raise UserError(f"--config {config} is not known; type one of {', '.join(presets)}")
    found: Any = presets[config]
    given = {name: value for name, value in typed.items() if value is not None}
    for name in {"batch", "batch_size"} & vars(found).keys() - given.keys():
        given[name] = shared(getattr(found, name), share)
    return replace(found, **given)


def ranks() -> int:
    """The ranks that will train the run, where its batch is chosen now. Later the run's settings say the batch."""
    return _making().ranks


def shared(batch: int, share: int = 1) -> int:
    """The batch that nobody has typed, or the next larger one of which several ranks get equal multiples of `share`."""
    parts = ranks() * share if ranks() > 1 else 1
    larger = -(-batch // parts) * parts
    if larger > batch:
        say(f"batch {larger}: {ranks()} ranks cannot share the default {batch}; --batch-size for another")
    return larger


def length(max_steps: int | None, steps: float, **others: float | None) -> int:
    """The steps that are typed, or else these, which follow from other lengths. It says if those do not count."""
    typed = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in others.items() if value is not None)
    if max_steps is not None and typed:
        say(f"--max-steps {max_steps} counts, and {typed} does not")
    return max_steps or max(1, round(steps))


def begin_with(weights: str | None, game: Any) -> None:
    """Load published weights into the networks of a game, if any are typed. Later a checkpoint has them."""
    from nets.published.files import read_published

    if weights is not None and made_for("train", "dry"):
        if not callable(files := getattr(game, "published", None)):
            raise UserError(f"{type(game).__name__} has no published weights to begin with; leave --from out")
        say(f"weights: {', '.join(read_published(weights, files()))} of {weights}")


def of_file(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file says of the networks, read where the run begins. Later the run's folder says it: see `made_to`."""
    said = _making().said
    if not said:
        said.update(read())
    return dict(said)


@contextmanager
def made_to(
    purpose: Purpose, said: dict[str, Any] | None = None, shape: dict[str, Any] | None = None, ranks: int = 1
) -> Iterator[None]:
    """Inside the `with`, runs are made for this. A plan needs no weights of VGG, and no pictures if there are none.

    `said` is what a file has said of the networks, by JSON's values; if that is empty, it gets what the file says now.
    `shape` is that of the run's data, in case they cannot be opened; then "gone" in it says why. So many `ranks` share
    a batch that nobody has typed.
    """
    token = _MAKING.set(_Making(purpose, {} if said is None else said, shape, ranks))
    try:
        yield
    finally:
        _MAKING.reset(token)


def instead_of_data(error: UserError, **planned: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `MadeUp` gets where data cannot be opened, for samples to train on and held-out ones: in a plan `planned`,
    and in a run that is only looked at what its folder says. Then reading a sample is the error. Else it is raised.
    """
    shape = _making().shape
    if made_for("plan"):
        return planned, planned
    if not shape:
        raise error
    advice = "" if "--data" in str(error) else "; if the run's data have moved, type --data and their folder"
    gone = shape.setdefault("gone", f"{error}{advice}")
    train, val = ((each or {}) | {"gone": gone} for each in (shape["train"], shape["val"]))
    return train, val if shape["val"] else None


def made_up(error: UserError, **planned: Any) -> "tuple[MadeUp, Any]":
    """What stands for data that cannot be opened: see `instead_of_data`."""
    from datasets.files.pictures import MadeUp

    train, val = instead_of_data(error, **planned)
    return MadeUp(**train), None if val is None else MadeUp(**val)


def made_for(*purposes: Purpose) -> bool:
    """Whether runs are made for one of these now. A new training is "train" or "dry", one that goes on "resume"."""
    return _making().purpose in purposes


def decodes() -> bool:
    """Whether all pictures are decoded into the cache. A plan and a dry run look at their headers alone."""
    return not made_for("plan", "dry")


def perceptual_loss(typed: str, network: Callable[[], "Module"], load: Callable[[Any], P]) -> P | None:
    """What `load` makes of the weights of VGG, or of where to find them. None if there is no such loss, or if the run
    is only looked at: only training needs it, and the file of the weights may be gone. A dry run downloads none.
    """
    if typed == "off" or made_for("look"):
        return None
    if made_for("dry") and typed == "torchvision":
        say("perceptual: the training takes VGG's weights from torchvision's cache, or else downloads them")
    elif not made_for("plan"):
        return load(typed)
    return load(network().state_dict())


def say(text: str) -> None:
    """Say what a run is made of, on the first rank of a training. Who looks at the run later has read it."""
    if this_rank() == 0 and not made_for("plan", "look"):
        print(printable(text), file=sys.stderr, flush=True)
