"""Draws by torch's own functions, in losses: they follow the sample, as those of gan.noise do.

[Note: draws that follow the sample]
A published network draws by torch.randn, x.normal_(), F.dropout and so on. All of them end in a few kernels of torch's
dispatcher. While a training runs, these kernels are ours. In a loss they make the sample's own numbers, and elsewhere
they call torch's. Nothing else in torch is slower for it.

    in place, number by number     normal_, bernoulli_ ...    blocks of rows, as for gan.noise; or for all ranks
    made of these                  normal(mean, std) ...      from our own kernels
    row by row                     multinomial, poisson ...   a seed for each row
    without rows                   randperm                   one draw for the whole batch

Where samples are not the first dimension (the dropout of nn.LSTM draws [time, samples, features]), and where the
author passes a generator, which must be the same on all ranks, each rank draws for the samples of all ranks and takes
its own. So the author's generator moves on alike everywhere. Other draws from it, such as randperm's, are left alone.
After torch.manual_seed in a loss it is torch's generator that draws so, until the loss ends or a saved state returns.
What torch draws inside larger kernels, such as the dropout of attention on a GPU, cannot be followed; a trial of the
first step notices it by the generator's state.

[Note: a forward that is run again]
torch.utils.checkpoint runs a forward again in backward, where no place is set. It saves torch's random state before
the first one, and restores it for the second. So the place and its count are part of that state, and in backward also
the ranks that add up together. See [Note: the world of a forward] in gan/ranks.py.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from torch import Tensor
from torch.distributions import VonMises
from torch.utils.weak import WeakTensorKeyDictionary

from gan import noise, ranks
from gan.files.errors import UserError
from gan.noise import Drawn, Place, Site
from gan.ranks import World
from strategies import private
from strategies.batches.draws import BY_GENERATOR

IN_PLACE = (
    *("normal_", "uniform_", "random_", "random_.from", "random_.to", "bernoulli_.float"),
    *("exponential_", "cauchy_", "log_normal_", "geometric_"),
)
Kernel = Callable[..., Any]
BY_ROWS = {  # how many dimensions a single draw has
    **{"multinomial": 1, "_sample_dirichlet": 1, "rrelu_with_noise": 0, "rrelu_with_noise_": 0},
    **{"poisson": 0, "binomial": 0, "_standard_gamma": 0},
}
ROW_BY_ROW = 16  # so many draws for each sample from one row of weights may be of the samples; it takes long
# Where losses, and hooks of a batch, are called.
STRATEGIES = os.path.dirname(os.path.dirname(__file__))
CALLERS = {os.path.join(STRATEGIES, *name) for name in (("turn.py",), ("training", "incoming.py"))}
FOLDERS = tuple(os.path.join(each, "") for each in (STRATEGIES, os.path.dirname(str(torch.__file__))))


_torchs = torch.get_rng_state, torch.set_rng_state, torch.manual_seed  # its own functions
_running = 0  # trainings of this process, which share the kernels
_put_back = ExitStack()


@contextmanager
def draws_follow(device: torch.device) -> Iterator[None]:
    """Inside the `with`, what torch draws in a loss follows the samples."""
    global _running
    if _running == 0:
        _put_back.callback(_library({"CPU", torch._C._dispatch_key_for_device(device.type)})._destroy)
        _put_back.enter_context(torch._inductor.config.patch(fallback_random=True))  # draws as eager
        _put_back.enter_context(private.redraws(_as_one_call))
        _put_back.enter_context(mock.patch.object(VonMises, "sample", _of_whole_batch(VonMises.sample)))
        ours = {"get_rng_state": _state, "set_rng_state": _set_state, "manual_seed": _manual_seed}
        for module in (torch, torch.random):
            _put_back.enter_context(mock.patch.multiple(module, **ours))
    _running += 1
    try:
        yield
    finally:
        _running -= 1
        if _running == 0:
            _put_back.close()


def _as_one_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """How often it draws depends on what a rank has drawn for its own samples."""

    def called(*args: Any, **kwargs: Any) -> Any:
        place = noise.here()
        with place.one_call() if place is not None and place.follows and not place.seeded else nullcontext():
            return function(*args, **kwargs)

    return called


def _of_whole_batch(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """It draws for all samples until each is accepted, and accepted ones anew."""

    def called(*args: Any) -> Tensor:
        place = noise.here()
        if place is not None and place.follows and place.rows < place.total:
            raise UserError(
                "torch.distributions.VonMises draws until all samples of a batch are accepted, so ranks and "
                "micro-batches would draw other numbers than one device; draw a fixed number of candidates by "
                "torch.rand, and take the first good one of each sample"
            )
        return sample(*args)

    return called


# ---- torch's kernels ----


def _library(keys: set[str]) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    made = {
        **dict.fromkeys(IN_PLACE, _in_place),
        **dict.fromkeys(BY_ROWS, _by_rows),
        "multinomial": _multinomial,
        **dict.fromkeys(("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"), _normal),
        "bernoulli_.Tensor": _bernoulli,
    }
    # Between the blocks of a pipeline, ranks without a tensor compute with its stand-in, and must count its draws.
    kernels = [(name, "Meta", _kernel(name, "Meta", _counted)) for name in (*made, "bernoulli", "bernoulli.p")]
    made |= {"native_dropout": _dropout, "randperm.generator_out": _randperm}
    kernels += [(name, key, _kernel(name, key, own)) for name, own in made.items() for key in sorted(keys)]
    with warnings.catch_warnings():  # torch 2.11 warns of what is meant
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, key, kernel in kernels:
            library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    return library


def _kernel(name: str, key: str, own: Kernel) -> Kernel:
    """Torch's kernel of an operation. In a loss it is `own`, which gets torch's, the place and the name first."""
    original, short = torch.library.get_kernel(f"aten::{name}", key), name.partition(".")[0]
    by_any = own in (_in_place, _normal, _bernoulli)  # follows by any generator

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        place = noise.here()
        given = kwargs.get("generator") is not None or any(type(arg) is torch.Generator for arg in args)
        if place is None or not place.follows:
            return original.call_boxed(keyset, *args, **kwargs)
        if place.seeded and not given:
            given = own is not _dropout  # which is made of another draw
            if by_any:
                kwargs["generator"] = private.default_generator(next(a.device for a in args if isinstance(a, Tensor)))
        if given and not by_any and own is not _counted:
            place.drawn[place.next_call()] = Drawn(short + BY_GENERATOR, (), place.samples, None, whole=True)
            return original.call_boxed(keyset, *args, **kwargs)
        if not given:
            kwargs.pop("generator", None)
        return own(partial(original.call_boxed, keyset), place, short, *args, **kwargs)

    return kernel


def _site(place: Place) -> Site:
    """The calls of a loss that have led here, without torch's and ours. Empty on one device, which needs no site."""
    frame: FrameType | None = sys._getframe(1) if place.rows < place.total else None
    found: list[str | int] = []
    while frame is not None and frame.f_code.co_filename not in CALLERS:
        if not _is_ours(frame.f_code.co_filename):
            found += frame.f_code.co_qualname, frame.f_lasti
        frame = frame.f_back
    return tuple(found)


@cache
def _is_ours(file: str) -> bool:
    return file.startswith(FOLDERS)


def _in_place(
    original: Kernel, place: Place, name: str, self: Tensor, *args: Any, generator: torch.Generator | None = None
) -> Tensor:
    # In float64 the numbers of float32, so that every precision draws the same.
    halved = self.dtype is torch.float64 and name != "random_" and generator is None
    dtype = torch.float32 if halved else self.dtype
    whole = self.is_contiguous() and not halved
    call = place.next_call()
    drawn = place.drawn_by_network(call, name if generator is None else name + BY_GENERATOR, self.shape, _site(place))
    dim, parts = drawn.dim, place.parts_of(drawn)

    def draw(part: Tensor, generator: torch.Generator) -> Tensor:
        return original(part, *args, generator=generator)

    if generator is not None and parts is None:
        return draw(self, generator)
    if parts is None or (dim == 0 and generator is None):
        out = self if whole else torch.empty(self.shape, dtype=dtype, device=self.device)
        noise.fill(out, draw, place, call, parts)
        return self if whole else self.copy_(out)
    assert dim is not None  # there are parts
    # The author's generator draws for this micro-batch of all ranks, others for the whole batch.
    stride = 1 if generator is None else place.stride
    shape = [*self.shape[:dim], place.whole(self.shape[dim]) // stride, *self.shape[dim + 1 :]]
    out = torch.empty(shape, dtype=dtype, device=self.device)
    if generator is None:
        noise.fill(out, draw, place, call, None)
    else:
        draw(out, generator)
    rows = out.movedim(dim, 0)
    taken = torch.cat([rows[part.start // stride : part.stop // stride : part.step // stride] for part in parts])
    return self.copy_(taken.movedim(0, dim))


def _by_rows(original: Kernel, place: Place, name: str, self: Tensor, *args: Any) -> Tensor:
    call, device, n = place.next_call(), self.device, len(self) if self.dim() > BY_ROWS[name] else 0
    drawn = place.drawn_by_network(call, name, self.shape if n else (), _site(place))
    parts = place.parts_of(drawn) if drawn.dim == 0 else None
    with noise.at(None):  # what it is made of draws by this generator
        if not n:
            return original(self, *args, generator=noise.seeded(device, place.seed(call, 0)))
        found = []
        for row, number in enumerate(range(n) if parts is None else chain(*parts)):
            own = [a[row : row + 1] if isinstance(a, Tensor) and a.dim() and len(a) == n else a for a in (self, *args)]
            found.append(original(*own, generator=noise.seeded(device, place.seed(call, number))))
    return self if name.endswith("_") else torch.cat(found)


def _multinomial(original: Kernel, place: Place, name: str, self: Tensor, count: int, again: bool = False) -> Tensor:
    """From one row of weights, with replacement, each draw is one of its own: so many rows, as for classes of fakes."""
    if not again or self.numel() != self.shape[-1] or count > ROW_BY_ROW * place.rows:
        return _by_rows(original, place, name, self, count, again)
    return _by_rows(original, place, name, self.expand(count, -1), 1, True).view(*self.shape[:-1], count)


def _normal(original: Kernel, place: Place, name: str, mean: Any, std: Any = 1.0, **generator: Any) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std
    shapes = [each.shape for each in (mean, std) if isinstance(each, Tensor)]
    return like.new_empty(torch.broadcast_shapes(*shapes)).normal_(**generator).mul_(std).add_(mean)


def _bernoulli(original: Kernel, place: Place, name: str, self: Tensor, p: Tensor, **generator: Any) -> Tensor:
    dtype = p.dtype if generator else torch.float32
    return self.copy_(torch.rand(self.shape, dtype=dtype, device=self.device, **generator) < p)


def _dropout(
    original: Kernel, place: Place, name: str, x: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False:
        return original(x, p, train)
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p)
    return x * mask * (1 / (1 - p) if p < 1 else 0), mask


def _randperm(original: Kernel, place: Place, name: str, n: int, out: Tensor) -> Tensor:
    call = place.next_call()
    place.drawn[call] = Drawn(name, (n,), place.samples, None, place.samples == place.total)
    return original(n, generator=noise.seeded(out.device, place.seed(call, 0)), out=out)


def _counted(original: Kernel, place: Place, name: str, *args: Any, **generator: Any) -> Tensor:
    if any(type(arg) is Tensor for arg in args):  # and not one that torch.compile traces with
        place.next_call()
    if name == "_standard_gamma":  # torch 2.12 has no such kernel
        return torch.empty_like(args[0])
    with noise.at(None):  # what it is made of is not counted
        return original(*args, **generator)


# ---- torch's random state: see [Note: a forward that is run again] ----

_places: MutableMapping[Tensor, tuple[Place | None, int, bool, World | None]] = WeakTensorKeyDictionary()


def _manual_seed(seed: int) -> torch.Generator:
    place = noise.here()
    if place is not None:
        place.seeded = True
    return _torchs[2](seed)


def _state() -> Tensor:
    state, place = _torchs[0](), noise.here()
    calls, seeded = (0, False) if place is None else (place.calls, place.seeded)
    _places[state] = place, calls, seeded, ranks.here()
    return state


def _set_state(new_state: Tensor) -> None:
    _torchs[1](new_state)
    if new_state not in _places:  # one of the author's, from a file, say
        if (place := noise.here()) is not None:
            place.seeded = True
    else:
        place, calls, seeded, world = _places[new_state]
        noise.go_to(place, calls, seeded)
        if private.in_backward():
            ranks.go_to(world)
