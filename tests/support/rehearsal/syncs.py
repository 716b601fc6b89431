"""Counts host syncs: the moments at which the CPU waits for the device.

There is no device here, so one is made of the CPU: `cpu:0`. torch computes there as on `cpu`, and two modes remember
which tensors are in the host's own memory. Those are made without a device or on plain `cpu`, or made of such tensors
alone: an optimizer's count of steps, a table of flags, what was copied to the host. All other tensors are on the
device, and so they say if they are asked (`tensor.device`). A host sync is, as `torch.cuda.set_sync_debug_mode` has it:

- a value of the device is read: item(), bool(), tolist(), numpy(), printing;
- an operation has a result whose shape depends on values: nonzero, unique, an index of booleans, ...;
- a copy between host and device that is not `non_blocking`, in either direction: also of the numbers of
  `torch.tensor(numbers, device=...)`, and of an index that is a list;
- a synchronisation by name, of a device, a stream or an event, and a collective of Python objects.

Collectives of tensors are none: NCCL's wait on the device. What runs only on a real device's type is not seen, and a
custom kernel may wait inside. A copy of the device's tensors by C++, as DDP's, is taken for one on the device.
"""

import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies import PhaseStrategy
from strategies.policies.fsdp import FsdpBucket
from strategies.policies.policy import Policy
from strategies.training.steps import Steps

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
ROOT = Path(__file__).parents[3]
BETWEEN = "between phases"
OURS = ("gan", "nets", "datasets", "strategies", "tests")

READS = {"_local_scalar_dense", "is_nonzero", "equal"}
SHAPED_BY_VALUES = {
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    *("bincount", "repeat_interleave.Tensor", "histc"),
}
COPIES = {"copy_", "_foreach_copy_", "__setitem__"}
PYTHON_READS = {"tolist", "numpy", "__array__", "__repr__", "__format__", "__contains__"}
NAMED = (
    *((torch.accelerator, "synchronize"), (torch.cuda, "synchronize")),
    (dist.distributed_c10d, "_tensor_to_object"),  # the end of every collective of objects
)


class Syncs(threading.local):
    """The host syncs of a training, inside `counted`: for each phase that was played, the lines that caused them."""

    played: ClassVar[list[tuple[int, str, list[str]]]]  # by which thread, and which phase

    def __init__(self) -> None:
        self.now: list[str] = []  # of what this thread plays
        self.call = ""  # torch's function that runs, if Python has called it

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Inside the `with`, this is played."""
        outer, self.now = self.now, []
        yield
        self.played.append((threading.get_ident(), name, self.now))
        self.now = outer

    def add(self, what: str) -> None:
        self.now.append(f"{what} at {_place()}")

    def most(self, after: int) -> dict[str, list[str]]:
        """For each phase the play that had most. The first plays are left out: in them ranks agree on what they do."""
        found: dict[str, list[str]] = {}
        times: Counter[tuple[int, str]] = Counter()
        for thread, name, each in self.played:
            times[thread, name] += 1
            if times[thread, name] > after and len(each) >= len(found.get(name, [])):
                found[name] = each
        return found


@contextmanager
def counted() -> Iterator[Syncs]:
    """Inside the `with`, the host syncs of every training step of this process are counted, but not those of trials."""
    Syncs.played = []
    syncs, host = Syncs(), set()
    step, run = Steps._pass, Steps.run

    def counted_step(self: Steps, *args: Any, **kwargs: Any) -> Any:
        if self.watch.trial is not None:
            return step(self, *args, **kwargs)
        for policy in self.policies.values():
            _put(policy, host)
        with syncs.during(BETWEEN), _Calls(syncs, host), _Operations(syncs, host):
            return step(self, *args, **kwargs)

    def counted_run(self: Steps, phase: Any, batch: Any) -> None:
        with ExitStack() as modes:
            if self.watch.trial is None:
                modes.enter_context(syncs.during(phase.name))
            run(self, phase, batch)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Steps, "_pass", counted_step))
        patches.enter_context(mock.patch.object(Steps, "run", counted_run))
        patches.enter_context(mock.patch.object(PhaseStrategy, "root_device", DEVICE))
        clip = "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype"
        patches.enter_context(mock.patch(clip, _grouped))
        for owner, name in NAMED:
            patches.enter_context(mock.patch.object(owner, name, _told(syncs, name, getattr(owner, name))))
        yield syncs


def _told(syncs: Syncs, name: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        syncs.add(name)
        return function(*args, **kwargs)

    return call


def _put(policy: Policy, host: set[int]) -> None:
    """Say where is what was made before the first step; FSDP2 has its device from a mesh, which knows no numbers."""
    units = [bucket for bucket in policy.storage.buckets if isinstance(bucket, FsdpBucket)]
    groups = [fully_shard.state(unit.twin)._fsdp_param_group for unit in units]
    of_fsdp2 = [each for group in groups for each in (group, *group.fsdp_params)]
    for each in (*policy.storage.buckets, *of_fsdp2):
        each.device = DEVICE
    if "offload" in policy.options:
        averages = policy.ema.average if policy.ema is not None else []
        shards = [bucket.shard for bucket in policy.storage.buckets]
        host |= {memory for tensor in (*shards, *averages) if (memory := _memory(tensor))}


def _grouped(*args: Any, **kwargs: Any) -> Any:
    """C++ groups gradients by their device, and knows nothing of ours."""
    groups = _foreach_utils._group_tensors_by_device_and_dtype(*args, **kwargs)
    return {(lists[0][0].device, dtype): (lists, numbers) for (_, dtype), (lists, numbers) in groups.items()}


def _place() -> str:
    """The innermost line of ours that runs."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path != Path(__file__):
            own = path.relative_to(ROOT)
            if own.parts[0] in OURS:
                return f"{own}:{frame.lineno} {frame.name}"
    return "?"


# ---- where tensors are ----


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except Exception:  # noqa: BLE001 - a tensor without memory, such as a DTensor
        return None


class _Places:
    """What both modes do: they know the tensors that are in the host's memory."""

    syncs: Syncs
    host: set[int]

    def on_host(self, tensor: Tensor) -> bool:
        return tensor.device.type == "meta" or _memory(tensor) in self.host

    def put(self, value: Any, on_host: bool) -> None:
        for tensor in _tensors(value):
            memory = _memory(tensor)
            if memory is not None:
                (self.host.add if on_host else self.host.discard)(memory)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Operations(TorchDispatchMode, _Places):
    """Sees torch's operations, also those of autograd and of optimizers."""

    def __init__(self, syncs: Syncs, host: set[int]) -> None:
        super().__init__()
        self.syncs, self.host = syncs, host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        name = func._schema.name.partition("::")[2]
        full = f"{name}.{func._overloadname}"
        here = [tensor for tensor in given if not self.on_host(tensor)]
        shaped = {name, full} & SHAPED_BY_VALUES and kwargs.get("output_size") is None
        if here and (name in READS or shaped):
            self.syncs.add(name)
        elif here and name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            self._index(name, args)
        elif self.syncs.call in COPIES and name in COPIES and 0 < len(here) < len(given) and _waits(args[2:], kwargs):
            self.syncs.add(name)
        found = func(*args, **kwargs)
        if func._schema.name.startswith("aten::"):
            self._put_result(name, func, found, kwargs, given, here)
        return found

    def _index(self, name: str, args: Any) -> None:
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            filled = name != "index" and args[2].numel() == 1  # torch fills by a mask then
            if not filled:
                self.syncs.add(f"{name} by booleans")
        elif any(self.on_host(each) and each.dim() for each in indices):
            self.syncs.add(f"{name} by a list")

    def _put_result(self, name: str, func: Any, found: Any, kwargs: Any, given: Any, here: Any) -> None:
        if name.endswith("_") or any(each.alias_info is not None for each in func._schema.returns):
            if name in ("lift_fresh", "lift"):
                self.put(found, on_host=True)  # numbers from Python
            return  # the memory stays where it is
        device = kwargs.get("device")
        if device == DEVICE or (self.syncs.call != name and not given):  # C++ makes what it needs on the device
            self.put(found, on_host=False)
        else:
            self.put(found, on_host=device is not None or not here)


class _Calls(TorchFunctionMode, _Places):
    """Sees what is asked of tensors before it gets to operations: on a CPU some of it never does."""

    def __init__(self, syncs: Syncs, host: set[int]) -> None:
        super().__init__()
        self.syncs, self.host = syncs, host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.syncs.call = self.syncs.call, getattr(func, "__name__", "")
        try:
            return self._called(self.syncs.call, func, args, kwargs or {})
        finally:
            self.syncs.call = outer

    def _called(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "__get__" and args and getattr(func, "__self__", None) is Tensor.device:
            device = func(*args, **kwargs)
            return DEVICE if device.type == "cpu" and not self._host(args[0]) else device
        if name in ("tensor", "as_tensor", "asarray") and kwargs.get("device") is not None:
            return self._made(func, args, kwargs)
        if name in PYTHON_READS and isinstance(args[0], Tensor) and not self._host(args[0]):
            self.syncs.add(name)
        if name in ("to", "cpu", "cuda", "type") and isinstance(args[0], Tensor):
            return self._moved(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _host(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return self.on_host(tensor)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        device = torch.device(kwargs["device"])
        there = isinstance(args[0], Tensor) and not self._host(args[0])
        found = func(*args, **kwargs)
        if device == DEVICE and not there:
            self.syncs.add(func.__name__)
        self.put(found, on_host=device == HOST)
        return found

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        tensor, before = args[0], self._host(args[0])
        target = HOST if name == "cpu" else _target(args[1:], kwargs, self._host)
        if target is None or tensor.device.type != "cpu" or target.type != "cpu":
            return func(*args, **kwargs)
        to_host = target.index is None
        if to_host == before:  # nothing moves
            plain = [each for each in args[1:] if not isinstance(each, (torch.device, str))]
            others = {key: value for key, value in kwargs.items() if key != "device"}
            if any(isinstance(each, Tensor) for each in plain):
                plain = [plain[0].dtype, *plain[1:]]
            return tensor if name == "cpu" or not (plain or others) else tensor.to(*plain, **others)
        if _waits(args[1:], kwargs):
            self.syncs.add(name)
        with torch._C.DisableTorchFunction():
            dtype = next((each for each in (*args[1:], kwargs.get("dtype")) if isinstance(each, torch.dtype)), None)
            others = [each.dtype for each in args[1:] if isinstance(each, Tensor)]
            found = tensor.to(dtype or (others or [tensor.dtype])[0], copy=True)
        self.put(found, on_host=to_host)
        return found


def _waits(args: Any, kwargs: Any) -> bool:
    """Whether a copy is not `non_blocking`."""
    return not kwargs.get("non_blocking") and not any(each is True for each in args)


def _target(args: Iterable[Any], kwargs: Any, on_host: Any) -> torch.device | None:
    for each in (*args, kwargs.get("device"), kwargs.get("other")):
        if isinstance(each, Tensor):
            return HOST if on_host(each) else DEVICE
        if isinstance(each, (torch.device, str)):
            return torch.device(each)
    return None
