"""Process groups that run their operations one after the other, and refuse what NCCL refuses: "ordered", over gloo.

[Note: what NCCL does]
All operations of a group are on one stream, in the order in which they were called, point to point too. A send ends
when its receive does. So two ranks of which each waits for the other's receive first wait for ever. Gloo has no such
order: there what is called second may end first. Here a thread of the group takes one operation after the other, waits
for a moment that chance decides, tells the other ranks what it is about to do, and does it to its end. If a rank does
something else than the others, or does not come at all, that is an error with the ranks' numbers.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp

NAME = "ordered"
DEVICES = ["cpu"]  # whose memory is sent; where a device of the rehearsal's own computes, that alone
LIMIT = timedelta(seconds=20)  # how long an operation waits for the other ranks
SEED, LONGEST = 0, 1e-3  # of the moments, which last so many seconds at most
WORDS = 256  # bytes of what a rank says that it is about to do
KINDS = (  # of ProcessGroupNCCL.cpp's ncclDataType
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz),
)
REDUCTIONS = "SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"
OF_NCCL = REDUCTIONS[:5]
COMPLEX = "allreduce", "reduce", "broadcast"  # what looks at complex numbers as pairs of real ones


def register() -> None:
    """Let `init_process_group("ordered")` and the groups made after it be of this kind, in this process."""
    if NAME.upper() not in dist.Backend._plugins:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch's recorder looks for a group of C++
        dist.Backend.register_backend(NAME, Ordered, devices=DEVICES)


class Ordered(dist.ProcessGroup):
    """See [Note: what NCCL does]."""

    made = 0

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        Ordered.made += 1
        self.number, self.count, self.store = rank, size, store
        self.chance = random.Random(f"{SEED}: {rank} of {size} in {Ordered.made}")
        self.inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, timeout=min(timeout, LIMIT))
        self.waiting: SimpleQueue[Operation | None] = SimpleQueue()
        self.failure: BaseException | None = None
        self.done: list[str] = []
        threading.Thread(target=self._work, daemon=True, name=NAME).start()

    # ---- what torch asks of a group ----

    @property
    def _device_types(self) -> list[torch.device]:
        return list(map(torch.device, DEVICES))

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner

    def getSize(self) -> int:
        return self.count

    def getRank(self) -> int:
        return self.number

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self.name_of_group = name

    def getGroupName(self) -> str:
        return self.name_of_group

    def setGroupDesc(self, words: str) -> None:
        self.description = words

    def getGroupDesc(self) -> str:
        return self.description

    def shutdown(self) -> None:
        self.waiting.put(None)

    abort = shutdown

    # ---- operations ----

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist._Work:
        opts = opts or dist.AllreduceOptions()
        return self._reducing("allreduce", tensors, opts, lambda parts: self.inner.allreduce(parts, opts))

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        return self._reducing("reduce", tensors, opts, lambda parts: self.inner.reduce(parts, opts), opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        run = moving(tensors, (), lambda there, _: self.inner.broadcast(there, opts))
        return self._begin("broadcast", tensors, tensors, run, opts.rootRank)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist._Work:
        run = moving(outputs[0], inputs, lambda there, here: self.inner.allgather([there], here))
        return self._begin("allgather", inputs, [*inputs, *outputs[0]], run, result=outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist._Work:
        assert output.numel() == self.count * input.numel(), "all_gather_into_tensor: sizes do not fit"
        rooms, parts = [output.view(-1)], [input.view(-1)]
        run = moving(rooms, parts, lambda there, here: self.inner.allgather([[*there[0].chunk(self.count)]], here))
        return self._begin("allgather_base", [input], [input, output], run, result=[output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist._Work:
        assert input.numel() == self.count * output.numel(), "reduce_scatter_tensor: sizes do not fit"
        whole = dist.AllreduceOptions()
        whole.reduceOp = opts.reduceOp

        def run(parts: list[Tensor]) -> Any:
            work = self.inner.allreduce(parts, whole)
            work.wait()
            output.copy_(parts[0].chunk(self.count)[self.number].view_as(output))
            return work

        return self._reducing("reduce_scatter_base", [input], whole, run, also=[output], back=False)

    _reduce_scatter_base = reduce_scatter_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist._Work:
        rooms = outputs[0] if outputs else []
        run = moving(rooms, inputs, lambda there, here: self.inner.gather([there] if rooms else [], here, opts))
        return self._begin("gather", inputs, [*inputs, *rooms], run, opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist._Work:
        parts = inputs[0] if inputs else []
        run = moving(outputs, parts, lambda there, here: self.inner.scatter(there, [here] if parts else [], opts))
        return self._begin("scatter", outputs, [*outputs, *parts], run, opts.rootRank)

    def barrier(self, opts: Any = None) -> dist._Work:
        return self._begin("barrier", [], [], lambda: None)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> dist._Work:
        run = moving((), tensors, lambda _, here: self.inner.send(here, target, 0))
        return self._begin("send", tensors, tensors, run, peer=target)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist._Work:
        run = moving(tensors, (), lambda there, _: self.inner.recv(there, source, 0))
        return self._begin("recv", tensors, tensors, run, peer=source)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist._Work:
        raise ValueError("rehearsal: NCCL receives from a rank that is named")

    def _reducing(
        self,
        name: str,
        tensors: list[Tensor],
        opts: Any,
        reduce: Callable[[list[Tensor]], Any],
        root: int | None = None,
        also: Sequence[Tensor] = (),
        back: bool = True,
    ) -> dist._Work:
        """Gloo has no mean, and neither does it know booleans, which NCCL adds up as one byte."""
        asked = next(each for each in REDUCTIONS if opts.reduceOp == getattr(ReduceOp, each))
        bits = tensors[0].dtype == torch.bool
        if asked not in OF_NCCL or (bits and asked == "AVG"):
            raise ValueError(f"rehearsal: NCCL has no {asked} of {tensors[0].dtype}")
        if tensors[0].is_complex() and asked not in ("SUM", "AVG"):
            raise ValueError(f"rehearsal: NCCL has no {asked} of complex numbers")

        def run() -> None:
            if asked == "AVG":
                opts.reduceOp = ReduceOp.SUM
            elif bits and asked == "SUM":
                opts.reduceOp = ReduceOp.MAX
            with Copies(tensors, back) as parts:
                if not back:
                    parts = [part.clone() for part in parts]
                reduce([part.view(torch.uint8) if bits else part for part in parts]).wait()
                if asked == "AVG":
                    for part in [*parts, *also]:
                        part.div_(self.count, rounding_mode=None if part.is_floating_point() else "trunc")

        return self._begin(f"{name} {asked}", tensors, [*tensors, *also], run, root)

    def _begin(
        self,
        name: str,
        shown: Sequence[Tensor],
        tensors: Sequence[Tensor],
        run: Callable[[], None],
        root: int | None = None,
        peer: int | None = None,
        result: Any = None,
    ) -> dist._Work:
        """Refuse what NCCL refuses, or put an operation at the end of the line. All ranks must show the same."""
        for each in tensors:
            refuse(name, each)
        says = f"{name} of {', '.join(f'{each.dtype} {list(each.shape)}' for each in shown) or 'nothing'}"
        operation = Operation(says if root is None else f"{says} with rank {root}", run, peer, result or list(tensors))
        self.waiting.put(operation)
        return operation

    # ---- the thread of this group ----

    def _work(self) -> None:
        while (operation := self.waiting.get()) is not None:
            try:
                if self.failure is not None:
                    raise RuntimeError(f"rehearsal: an earlier operation of this group has failed: {self.failure}")
                time.sleep(LONGEST * self.chance.random() ** 3)
                self._meet(operation)
                operation.run()
            except BaseException as error:  # noqa: BLE001 - whoever waits for it shall see it
                self.failure = self.failure or error
                operation.end(error)
            else:
                self.done.append(operation.says)
                operation.end()

    def _meet(self, operation: "Operation") -> None:
        """Wait until the other ranks are about to do the same; for a send or a receive, the one that has the other."""
        own, peer = _bytes(operation.says), operation.peer
        try:
            if peer is None:
                told = [torch.empty_like(own) for _ in range(self.count)]
                self.inner.allgather([told], [own]).wait()
                others = dict(enumerate(map(_words, told)))
            else:
                told = [torch.empty_like(own)]
                sending = self.inner.send([own], peer, 1)
                self.inner.recv(told, peer, 1).wait()
                sending.wait()
                others = {self.number: operation.says, peer: _words(told[0])}
        except RuntimeError as error:
            raise RuntimeError(f"rehearsal: {self._who_waits(operation)}") from error
        kinds = sorted(words.partition(" of ")[0] for words in others.values())
        fits = kinds == ["recv", "send"] if peer is not None else len(set(kinds)) == 1
        if not fits or len({words.partition(" of ")[2] for words in others.values()}) > 1:
            parts = "; ".join(f"rank {rank}: {words}" for rank, words in sorted(others.items()))
            raise RuntimeError(f"rehearsal: what ranks do next does not fit together: {parts}")

    def _who_waits(self, operation: "Operation") -> str:
        """After the time is up: what each rank of the group waits for."""
        place = "" if operation.peer is None else f" with rank {operation.peer}"
        self.store.set(f"waits {self.number}", f"{operation.says}{place}")
        found = []
        for rank in range(self.count):
            try:
                self.store.wait([f"waits {rank}"], timedelta(seconds=2))
                found.append(f"rank {rank} waits in {self.store.get(f'waits {rank}').decode()}")
            except (RuntimeError, ValueError):
                found.append(f"rank {rank} waits in no operation of this group")
        return f"{'; '.join(found)}, and each operation waits for those before it"


class Operation(dist._Work):
    """An operation in the line of its group."""

    def __init__(self, says: str, run: Callable[[], None], peer: int | None, result: Any) -> None:
        super().__init__()
        self.says, self.run, self.peer, self.made = says, run, peer, result
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        if error is None:
            self.future.set_result(self.made)
        else:
            self.future.set_exception(RuntimeError(str(error)))
        self.ended.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.ended.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def is_success(self) -> bool:
        return self.ended.is_set() and self.error is None

    def get_future(self) -> "torch.futures.Future[Any]":
        return self.future

    def result(self) -> Any:
        return self.made


def refuse(name: str, tensor: Tensor) -> None:
    """Raise where NCCL does."""
    if tensor.device.type not in DEVICES:
        raise ValueError(f"rehearsal: {name} of a tensor on {tensor.device}, whose memory NCCL cannot send")
    if tensor.layout != torch.strided or not tensor.is_contiguous(memory_format=_format(tensor)):
        raise ValueError(f"rehearsal: {name} of a tensor {list(tensor.shape)} that is not contiguous")
    if tensor.is_complex() and name.split()[0] in COMPLEX:
        return
    if tensor.dtype not in KINDS:
        raise TypeError(f"rehearsal: {name} of {tensor.dtype}, a type that NCCL does not know")


def _format(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


class Copies:
    """Tensors as gloo can take them: on the CPU, real, and flat. With `back` they get what has become of the copies."""

    def __init__(self, tensors: Sequence[Tensor], back: bool = True) -> None:
        self.tensors, self.back = [each.detach() for each in tensors], back

    def __enter__(self) -> list[Tensor]:
        self.here = [torch.view_as_real(each) if each.is_complex() else each for each in self.tensors]
        self.copies = [each.cpu().contiguous() for each in self.here]
        return self.copies

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.back and kind is None:
            for own, copy in zip(self.here, self.copies, strict=True):
                if own.device != copy.device or own.data_ptr() != copy.data_ptr():
                    own.copy_(copy)


def moving(
    rooms: Sequence[Tensor], parts: Sequence[Tensor], call: Callable[[list[Tensor], list[Tensor]], Any]
) -> Callable[[], None]:
    """What an operation does that fills rooms from parts."""

    def run() -> None:
        with Copies(rooms) as there, Copies(parts, back=False) as here:
            call(there, here).wait()

    return run


def _bytes(words: str) -> Tensor:
    return torch.frombuffer(bytearray(words.encode()[:WORDS].ljust(WORDS)), dtype=torch.uint8)


def _words(told: Tensor) -> str:
    return bytes(told.tolist()).decode(errors="replace").strip()
