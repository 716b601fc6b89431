"""A replica: a game once more, for another device of the same process.

By hand, because torch's replicate refuses CPU tensors, gives replicas no parameters(), and leaves attributes,
closures and lists pointing at the networks of the first device.
"""

import copy
import operator
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gan.errors import UserError
from gan.module import GanModule
from strategies.policies.policy import Policy

TENSORS = ("_parameters", "_buffers")
STRUCTURE = (*TENSORS, "_modules")
COPIED = {"numpy", "random"}  # packages whose objects may have a state, and no way to the game
SHARED = {"lightning", "torch"}  # packages whose objects, or those of classes derived from theirs, are one for all
ADVICE = "type --strategy ddp"


class Replica:
    """One device's game; the first device's is the author's own.

    [Note: what a replica shares]
    Nothing that a step could change: a replica is to its thread what a game is to a rank of ddp. Its modules are
    other objects, with weights and buffers of their own; whatever its attributes lead to is made anew as well (lists,
    objects, partials, bound methods, closures and so the phases' losses), such that it leads to the replica's
    modules. Only the trainer and what else belongs to Lightning or torch is one for all. What a step assigns stays
    with its replica; what is assigned between steps, to the author's game, goes to all, and so do buffers.
    """

    def __init__(self, game: GanModule, device: torch.device, number: int, first: torch.device) -> None:
        self.device, self.number, self.first = device, number, first
        self.name = f"replica {number} on {device}"
        self.logged: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.original = self.game = game
        self._modules: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, dict[str, tuple[Any, list[Any]]]] = {}
        if number > 0:
            self.game = self._module(game)
            self.follow()

    # ---- what it is asked ----

    def of(self, weight: Tensor) -> Tensor:
        """The replica's own of one of the author's parameters."""
        return weight if self.number == 0 else self._tensors[id(weight)][1]

    def own(self, module: nn.Module) -> nn.Module:
        """The replica's own of one of the author's modules."""
        return module if self.number == 0 else self._modules[id(module)][1]

    def stands_for(self, module: nn.Module) -> bool:
        """Whether this is one of the author's modules, of which the replica has its own."""
        return id(module) in self._modules

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for LightningModule.log, until all replicas have spoken."""
        self.logged.append((name, value, args, kwargs))

    # ---- within a step ----

    @torch.no_grad()
    def take(self, weights: Iterable[Tensor]) -> None:
        """Have the values of these weights of the author's."""
        for weight in weights:
            self._fill(self.of(weight), weight)

    def learn(self, policies: Mapping[str, Policy], learners: tuple[str, ...]) -> None:
        """Only the learners' weights require gradients."""
        for name, policy in policies.items():
            for weight in policy.requiring_grad.values():
                self.of(weight).requires_grad_(name in learners)

    @contextmanager
    def all_learning(self, policies: Mapping[str, Policy]) -> Iterator[None]:
        """As the strategy's, for the replica's weights."""
        weights = [self.of(weight) for policy in policies.values() for weight in policy.requiring_grad.values()]
        before = [weight.requires_grad for weight in weights]
        self.learn(policies, tuple(name for name, policy in policies.items() if not policy.player.frozen))
        try:
            yield
        finally:
            for weight, learning in zip(weights, before, strict=True):
                weight.requires_grad_(learning)

    # ---- between steps ----

    @torch.no_grad()
    def follow(self) -> None:
        """Have the author's weights and buffers, and what was assigned to his game since the last step."""
        known, self._tensors = self._tensors, {}
        memo: dict[int, Any] = {}
        structured: set[int] = set()
        attributed: set[int] = set()
        while todo := [pair for pair in self._modules.values() if id(pair[0]) not in attributed]:
            # Modules first: attributes lead to them. Some are found on the way, as those in plain lists.
            while new := [pair for pair in self._modules.values() if id(pair[0]) not in structured]:
                for original, own in new:
                    structured.add(id(original))
                    self._structure(original, own, known)
            for original, own in todo:
                attributed.add(id(original))
                self._attributes(original, own, memo)
        self.note()

    def note(self) -> None:
        """A step is over: what it assigned to the author's game is the first replica's alone."""
        for original, _ in self._modules.values():
            self._seen[id(original)] = {name: (value, _inside(value)) for name, value in vars(original).items()}

    def _module(self, module: nn.Module) -> nn.Module:
        if id(module) not in self._modules:
            compiled = getattr(module, "_compiled_call_impl", None) is not None
            if (
                compiled
                or isinstance(module, torch.jit.ScriptModule)
                or type(module).__module__.startswith("torch._dy")
            ):
                raise UserError(
                    f"strategy dp makes no replicas of compiled networks ({type(module).__name__}); {ADVICE}"
                )
            own = module.__new__(type(module))
            vars(own).update({kind: type(vars(module)[kind])() for kind in STRUCTURE})
            self._modules[id(module)] = (module, own)
        return self._modules[id(module)][1]

    def _structure(self, original: nn.Module, own: nn.Module, known: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Its parameters, buffers and children."""
        for kind in STRUCTURE:
            theirs, ours = vars(original)[kind], vars(own)[kind]
            for name in list(ours.keys() - theirs.keys()):
                del ours[name]
            for name, value in theirs.items():
                if isinstance(value, nn.Module):
                    ours[name] = self._module(value)
                else:
                    ours[name] = None if value is None else self._tensor(value, known)

    def _tensor(self, tensor: Tensor, known: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
        """The replica's own of a parameter or buffer, with its values."""
        if id(tensor) not in self._tensors:
            own = known[id(tensor)][1] if id(tensor) in known else self._copy(tensor)
            self._tensors[id(tensor)] = (tensor, own)
            self._fill(own, tensor)
            if isinstance(own, nn.Parameter):
                own.requires_grad_(tensor.requires_grad)
        return self._tensors[id(tensor)][1]

    def _copy(self, tensor: Tensor) -> Tensor:
        device = self.device if tensor.device == self.first else tensor.device
        own = torch.empty_like(tensor, device=device, requires_grad=False)
        return nn.Parameter(own, requires_grad=False) if isinstance(tensor, nn.Parameter) else own

    def _fill(self, own: Tensor, tensor: Tensor) -> None:
        # By `.data`, which no graph notices: a fake that phases share stays usable, as on one device.
        own.data.copy_(tensor.data, non_blocking=True)

    def _attributes(self, original: nn.Module, own: nn.Module, memo: dict[int, Any]) -> None:
        """What was assigned since the last step. See [Note: what a replica shares]."""
        seen = self._seen.get(id(original), {})
        for name in seen.keys() - vars(original).keys():
            vars(own).pop(name, None)
        for name, value in vars(original).items():
            if name not in STRUCTURE and (name not in seen or _differ([value, *_inside(value)], seen[name])):
                vars(own)[name] = self._anew(value, memo)
        if isinstance(vars(own).get("_device"), torch.device):
            vars(own)["_device"] = self.device
        if original is self.original:
            vars(own)["log"] = self.log

    # ---- whatever attributes lead to ----

    def _anew(self, value: Any, memo: dict[int, Any]) -> Any:
        """The replica's own of a value; what cannot change and leads to no module is the same."""
        if isinstance(value, nn.Module):
            return self._module(value)
        if id(value) not in memo:
            made = self._made(value, memo)
            memo.setdefault(id(value), made)
        return memo[id(value)]

    def _made(self, value: Any, memo: dict[int, Any]) -> Any:
        anew = partial(self._anew, memo=memo)
        if isinstance(value, Tensor):
            if id(value) in self._tensors:
                return self._tensors[id(value)][1]
            own = self._copy(value)
            self._fill(own, value)
            return own
        if isinstance(value, torch.Generator):
            own = torch.Generator(self.device if value.device == self.first else value.device)
            return own.set_state(value.get_state())
        if isinstance(value, types.MethodType):
            function, bound = value.__func__, value.__self__
            of_class = getattr(type(bound), function.__name__, None) is function
            return types.MethodType(function if of_class else anew(function), anew(bound))
        if isinstance(value, types.FunctionType):
            return self._function(value, memo)
        if isinstance(value, partial):
            return partial(anew(value.func), *map(anew, value.args), **{k: anew(v) for k, v in value.keywords.items()})
        if isinstance(value, weakref.ref):
            inside = value()
            return value if inside is None or anew(inside) is inside else weakref.ref(anew(inside))
        if isinstance(value, dict):
            clone = memo[id(value)] = copy.copy(value)
            clone.clear()
            clone.update({anew(key): anew(item) for key, item in value.items()})
            return clone
        if isinstance(value, list):
            clone = memo[id(value)] = copy.copy(value)
            clone[:] = map(anew, value)
            return clone
        if isinstance(value, (tuple, set, frozenset)):
            items = [anew(item) for item in value]
            if isinstance(value, tuple) and all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value).__module__.partition(".")[0] in COPIED:
            return copy.deepcopy(value)
        if not _is_plain_object(value):
            return value
        try:
            clone = memo[id(value)] = copy.copy(value)
        except TypeError:
            return value  # a lock, a file: there is no other one
        vars(clone).update({name: anew(item) for name, item in list(vars(value).items())})
        return clone

    def _function(self, function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
        """A function whose closure and defaults are the replica's."""
        cells = function.__closure__ or ()
        if not (cells or function.__defaults__ or function.__kwdefaults__):
            return function
        made = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            self._anew(function.__defaults__, memo),
            tuple(types.CellType() for _ in cells),
        )
        memo[id(function)] = made  # which may be in its own closure
        made.__kwdefaults__ = self._anew(function.__kwdefaults__, memo)
        made.__dict__.update(function.__dict__)
        for own, cell in zip(made.__closure__ or (), cells, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            own.cell_contents = self._anew(content, memo)
        return made


def _is_plain_object(value: Any) -> bool:
    """Whether it has attributes, and is neither a class or a Python module nor of Lightning or torch."""
    if isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return SHARED.isdisjoint(kind.__module__.partition(".")[0] for kind in type(value).__mro__)


def _inside(value: Any) -> list[Any]:
    """What an attribute holds, as far as one sees without looking deeper."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, set)):
        return [*value]
    if isinstance(value, Tensor):
        return [value._version]
    return [*vars(value).values()] if _is_plain_object(value) and not callable(value) else []


def _differ(now: list[Any], before: tuple[Any, list[Any]]) -> bool:
    then = [before[0], *before[1]]
    return len(now) != len(then) or any(map(operator.is_not, now, then))
