"""Messages between training ranks and serving ranks: Python objects with tensors in them."""

import io
import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gan.files.errors import UserError
from gan.noise import Place

FOREVER = timedelta(days=1000)  # a serving rank waits for calls; the lifeline ends it if a rank is lost
HERE = "the device of this rank"


@dataclass(frozen=True)
class Enter:
    """A phase that will call players begins, or `gathered()` if there is no phase."""

    phase: str | None = None
    learners: tuple[str, ...] = ()
    second_order: bool = False

    def __str__(self) -> str:
        return "gathered()" if self.phase is None else f"phase '{self.phase}'"


@dataclass(frozen=True)
class Leave:
    """What `Enter` began ends."""


@dataclass(frozen=True)
class Call:
    """A call of a module of a player, or of a method of it.

    `arguments` are packed, without their `tensors`. `key` names the call for its backward. `shared`: its graph will be
    used in several phases. `ranks` is the number of ranks that play. `changed` are attributes that the game has set,
    and `dropped` are calls through which no backward can go any more.
    """

    player: str
    module: str
    method: str | None
    arguments: bytes
    tensors: list[Tensor]
    key: int
    learns: bool
    shared: bool
    autocast: torch.dtype | None
    place: Place | None
    ranks: int
    changed: dict[tuple[str, str], Any]
    dropped: list[int]

    @property
    def called(self) -> str:
        return f"'{'.'.join(filter(None, (self.module, self.method)))}'" if self.module or self.method else "a call"

    def __str__(self) -> str:
        return f"{self.called} of player '{self.player}'{' with gradients' if self.learns else ''}"


@dataclass(frozen=True)
class Changed:
    """Attributes that the game has set, for a rank that does not get the call that says so."""

    player: str
    values: dict[tuple[str, str], Any]


@dataclass(frozen=True)
class Found:
    """What a call has returned, packed, without its `tensors`.

    `draws` counts the noise that it drew. `changed` are the attributes that it has set. `signal` has asked the serving
    rank to end.
    """

    value: bytes
    tensors: list[Tensor]
    draws: int = 0
    changed: list[tuple[str, str]] = field(default_factory=list)
    signal: int = 0


@dataclass(frozen=True)
class Slopes:
    """The gradients of the tensors that a call has returned. `keep`: another backward may go through it."""

    player: str
    key: int
    slopes: list[Tensor | None]
    keep: bool

    def __str__(self) -> str:
        return f"backward through player '{self.player}'"


@dataclass(frozen=True)
class Ready:
    """A serving rank is set up. `together`: it shares weights with others, so calls are answered in rounds."""

    together: bool


@dataclass(frozen=True)
class End:
    """No more calls will come."""


class Packed:
    """An object as bytes, and the tensors that were in it, wherever they were."""

    def __init__(self, value: Any, device: torch.device, what: str = "a message") -> None:
        self.tensors: list[Tensor] = []
        self.device = device
        numbers: dict[int, int] = {}

        def outside(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return HERE if isinstance(each, torch.device) and each == device else None
            if id(each) not in numbers:
                numbers[id(each)] = len(self.tensors)
                self.tensors.append(each)
            return numbers[id(each)]

        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = outside
        try:
            pickler.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UserError(
                f"{what} cannot be sent to another rank: {error}; use tensors, values, and functions and classes that "
                f"stand in a module"
            ) from error
        self.content = stream.getvalue()


def unpacked(content: bytes, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """The object again, with these tensors in it."""
    unpickler = pickle.Unpickler(io.BytesIO(content))
    unpickler.persistent_load = lambda number: device if number == HERE else tensors[number]
    return unpickler.load()


class Bridge:
    """Sends and receives among all ranks of the run, whatever process groups they have."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("calls", store), rank, size, timeout=FOREVER)

    def send(self, targets: Collection[int], message: Any, patience: timedelta | None = None) -> None:
        """Send a message to these ranks. Returns when all have received it, or raises after some time."""
        packed = Packed(message, self.device)
        kinds = [(each.dtype, each.shape, each.device.type == self.device.type) for each in packed.tensors]
        kinds = [(*kind, each.requires_grad) for kind, each in zip(kinds, packed.tensors, strict=True)]
        header = pickle.dumps(kinds)
        head = torch.tensor([len(header), len(packed.content)])
        parts = [head, _bytes(header), _bytes(packed.content), *map(_flat, packed.tensors)]
        works = [self.group.send([part], rank, 0) for rank in targets for part in parts if part.numel()]
        for work in works:
            work.wait() if patience is None else work.wait(patience)

    def receive(self, source: int | None = None) -> tuple[int, Any]:
        """The next message of a rank, or of any rank: who has sent it, and the message."""
        head = torch.empty(2, dtype=torch.long)
        if source is None:
            work = self.group.recv_anysource([head], 0)
            work.wait()
            source = work._source_rank()
        else:
            self.group.recv([head], source, 0).wait()
        header, content = (self._part(int(size), source).numpy().tobytes() for size in head)
        tensors = []
        for dtype, shape, here, learns in pickle.loads(header):
            flat = self._part(shape.numel() * dtype.itemsize, source)
            tensor = flat.view(dtype).view(shape).to(self.device if here else "cpu")
            tensors.append(tensor.requires_grad_(learns))
        return source, unpacked(content, tensors, self.device)

    def _part(self, size: int, source: int) -> Tensor:
        part = torch.empty(size, dtype=torch.uint8)
        if size:
            self.group.recv([part], source, 0).wait()
        return part


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _flat(tensor: Tensor) -> Tensor:
    """Its bytes, on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.view(-1).view(torch.uint8)
