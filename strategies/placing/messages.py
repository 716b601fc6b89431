"""Messages between training ranks and serving ranks: Python objects with tensors in them."""

import io
import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gan.files.errors import explained
from gan.files.tensors import as_bytes
from gan.noise import Place

FOREVER = timedelta(days=1000)  # a serving rank waits for calls; the lifeline ends it if a rank is lost
HERE = "the device of this rank"
LEAVE, END = "leave", "end"  # two messages: what `Enter` began ends; no more calls will come


@dataclass(frozen=True)
class Enter:
    """A phase that will call players begins, or `gathered()` if there is no phase."""

    phase: str | None = None
    learners: tuple[str, ...] = ()
    second_order: bool = False

    def __str__(self) -> str:
        return "gathered()" if self.phase is None else f"phase '{self.phase}'"


@dataclass(frozen=True)
class Call:
    """A call of a player's network, or of a part or a method of it."""

    player: str
    name: str  # of the part or method
    arguments: bytes  # packed, without their tensors
    tensors: list[Tensor]
    key: int  # names the call for its backward
    learns: bool
    shared: bool  # its graph will be used in several phases
    autocast: torch.dtype | None
    dtype: torch.dtype  # torch's default
    place: Place | None
    ranks: int  # how many play
    training: frozenset[str]  # the modules in training mode
    dropped: list[int]  # the keys of calls through which no backward can go any more

    @property
    def called(self) -> str:
        return f"'{self.name}'" if self.name else "a call"

    def __str__(self) -> str:
        return f"{self.called} of player '{self.player}'{' with gradients' if self.learns else ''}"


@dataclass(frozen=True)
class Returned:
    """What a call has returned."""

    value: bytes  # packed, without its tensors
    tensors: list[Tensor]  # but those of the call's arguments
    draws: int  # counts the noise that the call drew
    signal: int  # has asked the serving rank to end


@dataclass(frozen=True)
class Slopes:
    """The gradients of the tensors that a call has returned. `keep`: another backward may go through it."""

    player: str
    key: int
    slopes: list[Tensor | None]
    keep: bool

    def __str__(self) -> str:
        return f"backward through player '{self.player}'"


class Packed(pickle.Pickler):
    """An object as bytes, and the tensors that were in it, wherever they were. Each rank has a device of its own.

    Who unpacks it has the `known` tensors, which come before the others there.
    """

    def __init__(self, value: Any, device: torch.device, what: str = "a message", known: Sequence[Tensor] = ()) -> None:
        super().__init__(stream := io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
        self.device, self.tensors = device, list[Tensor]()
        self.numbers = {id(each): number for number, each in enumerate(known)}
        words = (
            f"{what} cannot be sent to another rank: {{why}}; use tensors, values, and functions and classes that "
            f"stand in a module"
        )
        with explained(words, pickle.PicklingError, TypeError, AttributeError):
            self.dump(value)
        self.content = stream.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return HERE if isinstance(obj, torch.device) and obj == self.device else None
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.numbers)
            self.tensors.append(obj)
        return self.numbers[id(obj)]


class Unpacker(pickle.Unpickler):
    """Its `load()` gives what was packed."""

    def __init__(self, content: bytes, tensors: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(io.BytesIO(content))
        self.tensors, self.device = tensors, device

    def persistent_load(self, pid: Any) -> Any:
        return self.device if pid == HERE else self.tensors[pid]


class Bridge:
    """Sends and receives among all ranks of the run, whatever process groups they have."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        # Its methods are missing from torch's own types.
        self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore("calls", store), rank, size, timeout=FOREVER)

    def send(self, targets: Collection[int], message: Any, patience: timedelta | None = None) -> None:
        """Send a message to these ranks. Returns when all have received it, or raises after some time."""
        packed = Packed(message, self.device)
        kinds = [(t.dtype, t.shape, t.device.type == self.device.type, t.requires_grad) for t in packed.tensors]
        content = pickle.dumps((kinds, packed.content))
        parts = [torch.tensor([len(content)]), torch.frombuffer(bytearray(content), dtype=torch.uint8)]
        plain = (tensor.detach().resolve_conj().resolve_neg().cpu() for tensor in packed.tensors if tensor.numel())
        parts += [as_bytes(tensor.contiguous()) for tensor in plain]
        for work in [self.group.send([part], rank, 0) for rank in targets for part in parts]:
            work.wait() if patience is None else work.wait(patience)

    def receive(self, source: int | None = None) -> tuple[int, Any]:
        """The next message of a rank, or of any rank: who has sent it, and the message."""
        size = torch.empty(1, dtype=torch.long)
        if source is None:
            work = self.group.recv_anysource([size], 0)
            work.wait()
            source = work._source_rank()
        else:
            self.group.recv([size], source, 0).wait()
        kinds, content = pickle.loads(self._part(int(size), source).numpy().tobytes())
        tensors = []
        for dtype, shape, here, learns in kinds:
            flat = self._part(shape.numel() * dtype.itemsize, source)
            tensors.append(flat.view(dtype).view(shape).to(self.device if here else "cpu").requires_grad_(learns))
        return source, Unpacker(content, tensors, self.device).load()

    def _part(self, size: int, source: int) -> Tensor:
        part = torch.empty(size, dtype=torch.uint8)
        if size:
            self.group.recv([part], source, 0).wait()
        return part
