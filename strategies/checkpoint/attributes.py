"""What a game remembers in plain objects: attributes, lists, random generators, small objects of the author's.

[Note: objects that change]
When training begins, all objects that the game's code can reach are noted by their names (see reachable.py). A
checkpoint has those whose content has changed since then, as plain values. When a run is resumed, the constructor makes
the same objects again, under the same names, and what was saved is filled into them. So two names of one object stay
two names of it. A new object of the author's own class could not be made again without running code: it is named, and
not saved.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from inspect import GEN_CLOSED, GEN_CREATED, getgeneratorstate
from itertools import count
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from gan.files.errors import reading
from gan.files.values import VALUES
from gan.module import GanModule
from strategies.objects.content import CACHE, PLAIN, TORCHS, Scope, alike, content_of, copied, kind_of, noted
from strategies.objects.reachable import Reachable

LIGHTNINGS = {"_hparams", "_hparams_initial"}  # made when they are first asked for
OF_RNNS = {"_flat_weights", "_flat_weight_refs"}  # lists of the parameters of an nn.LSTM
MADE_AGAIN = TORCHS | OF_RNNS  # attributes of modules that torch saves or makes again
CODE = (nn.Module, FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, torch.Size)}
DICTS: dict[str, type[dict[Any, Any]]] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
# Constants that are keys of a cache, as a rule: how they are written as text, and made of it.
FORMATS = {str(each): each for each in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)}
CONSTANTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "memory_format": (torch.memory_format, str, FORMATS.__getitem__),
    "numpy_dtype": (np.dtype, str, np.dtype),
    "device": (torch.device, str, torch.device),
}
FACTORIES = {kind.__name__: kind for kind in (list, tuple, set, dict, int, float, str, bool)}  # of a defaultdict
JOINED = {dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum}  # how states of a metric can be joined in any order
COUNTS_ANEW = (
    "on another number of ranks, metrics of class {} count anew: only states that are sums, lists, maxima or minima "
    "can be joined"
)
LEARNING = "requires_grad"  # the name of what parameters require, beside those of objects


class Attributes:
    """The objects of a game, and what has changed in them. See [Note: objects that change]."""

    def __init__(self, game: GanModule, device: torch.device) -> None:
        self.device, self.named = device, set[str]()
        self.new: dict[int, tuple[int | None, Any]] = {}  # what training has made: numbers by ids
        self.made: dict[int, Any] = {}  # the same, made again from a checkpoint
        reachable = Reachable([game])
        self.iterators = [(name, each, progress_of(each)) for name, each in reachable.iterators()]
        torchs = {id(each) for each in [*game.parameters(), *game.state_dict(keep_vars=True).values()]}
        for module in game.modules():
            own_state = type(module).get_extra_state is not nn.Module.get_extra_state
            buffers = {"_buffers"} if module._non_persistent_buffers_set else set()  # a state dict lacks some of them
            torchs |= {id(vars(module).get(name)) for name in (vars(module) if own_state else MADE_AGAIN - buffers)}
            torchs |= {id(module)} if own_state else set()
        self.all: dict[str, Any] = {}  # by names of their own, for an object, its class and its attributes share one
        seen: Counter[str] = Counter()
        for path, value in reachable.objects.values():
            name = f"{path}:{type(value).__name__}"
            seen[name] += 1
            self.all[name if seen[name] == 1 else f"{name} {seen[name]}"] = value
        self.names = {id(value): name for name, value in self.all.items()}
        found = {n: o for n, o in self.all.items() if id(o.owner if isinstance(o, Scope) else o) not in torchs}
        self.objects = {n: o for n, o in found.items() if content_of(o) is not None and not isinstance(o, CACHE)}
        self.before = {name: noted(value) for name, value in self.objects.items()}
        self.game, self.learned = game, _learning(game)

    def state(self) -> dict[str, Any]:
        """What has changed since training began. Each thing that cannot be saved is named once."""
        now = _learning(self.game)
        turned = {name: each for name, each in now.items() if each != self.learned.get(name, each)}
        found: dict[str, Any] = {LEARNING: turned} if turned else {}
        unsaved = [name for name, each, began in self.iterators if progress_of(each) != began]
        self.new = {}
        for name, value in self.objects.items():
            for inner, part in self._changed(name, value).items():
                before = dict(self.new)
                try:
                    found.setdefault(name, {})[inner] = self._encoded(part)
                except _Unsaved:
                    self.new = before
                    unsaved.append(f"{name.rpartition(':')[0]}.{inner}".strip("."))
        self._name(
            unsaved,
            "training changes {}, and checkpoints cannot have that: a resumed run begins with what the constructor "
            "makes. They have numbers, text, tensors, arrays, and lists and dicts of them; of objects that __init__ "
            "makes, also random generators, optimizers, schedules, and attributes",
        )
        self._name(
            [name for name in now if name not in self.learned],
            "training has made the weights {}, and a resumed run has no place for them: make them in __init__",
        )
        self.new = {}  # it would hold a queue of old samples, say, a second time
        return found

    def _name(self, what: list[str], words: str) -> None:
        if new := [each for each in what if each not in self.named]:
            self.named.update(new)
            rank_zero_warn(words.format(", ".join(map(repr, new))))

    def _changed(self, name: str, value: Any) -> dict[str, Any]:
        """What has changed in an object: in a scope some names; else its whole content, under no name."""
        before, now = self.before[name], noted(value)
        if alike(before, now):
            return {}
        if not isinstance(value, Scope):
            return {"": kind_of(value).read(value)}
        left = MADE_AGAIN | LIGHTNINGS if isinstance(value.owner, nn.Module) else set()
        left = left if self.game.training else left | {"training"}  # a validation puts all modules into eval()
        changed = {n: each for n, each in now.items() if n not in before or not alike(before[n], each)}
        trainer = self.game.trainer  # it has optimizers and schedules that a checkpoint has already
        players = {id(e) for e in (*trainer.optimizers, *(each.scheduler for each in trainer.lr_scheduler_configs))}
        kept = (n for n, each in changed.items() if not isinstance(each, CODE) and id(each) not in players)
        return {n: changed[n] for n in kept if n not in left}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.made = {}
        with torch._C.DisableTorchFunctionSubclass():  # a sharded weight would ask each time whether this is allowed
            for name, weight in self.game.named_parameters():
                weight.requires_grad_(saved.get(LEARNING, {}).get(name, weight.requires_grad))
        with reading(VALUES, "its attributes are none, or of another game"):
            for name, trees in saved.items():
                if name in self.objects:
                    value, parts = self.objects[name], {inner: self._decoded(tree) for inner, tree in trees.items()}
                    kind_of(value).fill(value, value.read() | parts if isinstance(value, Scope) else parts[""])
        self.made = {}

    def load_of_ranks(self, saved: Sequence[Mapping[str, Any]], by: int, rank: int, size: int) -> None:
        """What `by` ranks have saved: what this rank had, or, on another number of ranks, what the first rank had.

        Of a metric of torchmetrics each rank has a state of its own samples. On another number of ranks the first rank
        goes on with all of these states, and the other ranks with none.
        """
        of_ranks = saved if len(saved) > 1 else [*saved] * by
        metrics = [each for each in self.game.modules() if isinstance(each, Metric)] if by != size else []
        fresh = {name: kind_of(value).read(value) for name, value in self.objects.items()} if metrics else {}
        others: list[list[dict[str, Any]]] = []
        for each in of_ranks[1:] if metrics else ():
            self.load(each)
            others.append([deepcopy(metric.metric_state) for metric in metrics])
            for name, content in fresh.items():
                kind_of(self.objects[name]).fill(self.objects[name], content)
        self.load(of_ranks[rank if by == size else 0])
        for number, metric in enumerate(metrics):
            if not JOINED.issuperset(metric._reductions.values()):
                if metric.update_called:
                    self._name([type(metric).__name__], COUNTS_ANEW)
                metric.reset()
            elif rank > 0:
                metric.reset()
            else:
                for states in others:
                    metric._reduce_states(states[number])

    def _encoded(self, value: Any) -> Any:
        """A value as a checkpoint has it. Every dict in the result says what it stands for."""
        if type(value) in (*PLAIN, torch.dtype):
            return value
        if id(value) in self.names:
            return {"same": self.names[id(value)]}
        number, _ = self.new.get(id(value), (len(self.new), None))
        if number is None:  # it is inside of itself
            raise _Unsaved
        if id(value) in self.new:
            return {"again": number}
        self.new[id(value)] = None, value  # which keeps the id its own
        content = self._content(value)
        self.new[id(value)] = number, value
        return {**content, "number": number}

    def _content(self, value: Any) -> dict[str, Any]:
        # A tensor without values stands in a pipeline for what another rank has.
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
            return {"tensor": copied(value), "on_device": value.device.type != "cpu"}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            numbers = torch.from_numpy(np.array(value).reshape(-1).view(np.uint8))  # torch has not all kinds
            how = {"dtype": str(value.dtype), "shape": list(value.shape), "scalar": isinstance(value, np.generic)}
            return {"array": numbers, **how}
        if isinstance(value, torch.device) and value == self.device:
            return {"own_device": None}  # each rank has another one
        for kind, (constant, text, _) in CONSTANTS.items():
            if isinstance(value, constant):
                return {kind: text(value)}
        factory = getattr(value, "default_factory", None)
        if type(value) in DICTS.values() and factory in (None, *FACTORIES.values()):
            pairs = [[self._encoded(key), self._encoded(each)] for key, each in value.items()]
            return {type(value).__name__: pairs, "factory": factory and factory.__name__}
        if type(value).__name__ in COLLECTIONS and isinstance(value, tuple(COLLECTIONS.values())):
            return {type(value).__name__: list(map(self._encoded, value)), "maxlen": getattr(value, "maxlen", None)}
        raise _Unsaved

    def _decoded(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        kind, value = next(iter(tree.items()))
        if kind == "same":
            return self.all[value]
        if kind != "again":
            value, self.made[tree["number"]] = tree["number"], self._made(kind, value, tree)
        return self.made[value]

    def _made(self, kind: str, value: Any, tree: Mapping[str, Any]) -> Any:
        if kind == "tensor":
            return value.to(self.device) if tree["on_device"] else value
        if kind == "array":
            made = value.numpy().view(tree["dtype"]).reshape(tree["shape"])
            return made[()] if tree["scalar"] else made
        if kind == "own_device":
            return self.device
        if kind in CONSTANTS:
            return CONSTANTS[kind][2](value)
        if kind in DICTS:
            pairs = {self._decoded(key): self._decoded(each) for key, each in value}
            return defaultdict(FACTORIES.get(tree["factory"]), pairs) if kind == "defaultdict" else DICTS[kind](pairs)
        made = COLLECTIONS[kind](map(self._decoded, value))
        return deque(made, tree["maxlen"]) if kind == "deque" else made


def _learning(game: GanModule) -> dict[str, bool]:
    """Which parameters require gradients: an author may freeze and thaw them between steps."""
    return {name: weight.requires_grad for name, weight in game.named_parameters()}


def progress_of(iterator: Iterator) -> object:
    """What is another when the iterator has given an item; where that cannot be told, it is another each time."""
    if isinstance(iterator, GeneratorType):
        state = getgeneratorstate(iterator)
        return state if state in (GEN_CREATED, GEN_CLOSED) else object()
    if isinstance(iterator, enumerate | filter | map | zip):  # they tell what they take from
        return [progress_of(each) for each in iterator.__reduce__()[1] if isinstance(each, Iterator)]
    return repr(iterator) if isinstance(iterator, count) else object()


class _Unsaved(Exception):
    """A value that no checkpoint can have."""
