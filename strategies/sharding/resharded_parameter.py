"""A parameter whose values are not on this rank, because it is sharded. Reading it is an error that says what to do."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, autograd, nn

from gan.files.errors import UserError

# What works without the values, such as a size or a hook. Properties, such as `.shape`, work too, except `.data`.
HARMLESS = {
    getattr(Tensor, name)
    for name in (
        *("__hash__", "__len__", "_is_zerotensor", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
        *("is_floating_point", "is_inference", "is_signed", "nelement", "ndimension", "numel", "register_hook"),
        *("register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride"),
        "untyped_storage",
    )
}
# pyrefly: ignore[missing-attribute]  # torch declares `data` for tensors, and its descriptor not
DATA = (Tensor.data.__get__, Tensor.data.__set__)


class ReshardedParameter(nn.Parameter):
    """The class of an author's parameter while it is resharded. The object stays the same; only its class changes.

    torch changes the class of its lazy parameters in the same way. While it is resharded, the parameter contains NaN.
    Without this class, code could compute with NaN, or save it.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this in place of every function that gets such a parameter."""
        if function in HARMLESS or (type(function).__name__ == "method-wrapper" and function not in DATA):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        shapes = [tuple(each.shape) for each in args if isinstance(each, cls)]
        if elsewhere := [vars(each)["_elsewhere"] for each in args if "_elsewhere" in getattr(each, "__dict__", ())]:
            raise UserError(f"a weight{f' of shape {shapes[0]}' if shapes else ''} is read here, and {elsewhere[0]}")
        raise UserError(
            f"a weight{f' of shape {shapes[0]}' if shapes else ''} is sharded: its values are not on this rank now. In "
            f"a loss a module gathers its weights when it reads them, under every policy but pipeline (type zero3); "
            f"where a network keeps them in a list, type zero3+whole. Elsewhere read weights inside `with "
            f"trainer.strategy.gathered():`, on all ranks; write them inside gathered(write=True), the same on all "
            f"ranks; save them with trainer.save_checkpoint(path), or on all ranks, inside gathered(), by torch.save. "
            f"After a training, load a checkpoint"
        )

    def __repr__(self) -> str:
        return f"<sharded parameter of shape {tuple(self.shape)}>"


def resharded(tensor: Tensor) -> TypeGuard[ReshardedParameter]:
    return isinstance(tensor, ReshardedParameter)


def hide(weight: nn.Parameter, values: Tensor, elsewhere: str | None = None) -> None:
    """Replace the parameter's values by the one element of `values`. `elsewhere`: where they are, in errors."""
    if elsewhere is not None:
        vars(weight)["_elsewhere"] = elsewhere
    weight.__class__ = vars(weight).setdefault("_class", type(weight))
    weight.data = values.expand(weight.shape)
    weight.__class__ = ReshardedParameter


@contextmanager
def withheld(weights: Iterable[nn.Parameter], why: str) -> Iterator[None]:
    """Inside the `with`, to read one of these is an error that says `why`. Values stay where they are."""
    weights = list(weights)
    taken = [weight for weight in weights if not resharded(weight)]
    for weight in weights:
        vars(weight)["_elsewhere"] = why
    for weight in taken:
        vars(weight)["_class"], weight.__class__ = type(weight), ReshardedParameter
    yield
    for weight in weights:
        vars(weight).pop("_elsewhere", None)
    for weight in taken:
        weight.__class__ = vars(weight).pop("_class", type(weight))


def show(weight: nn.Parameter, values: Tensor) -> None:
    """Let the parameter use a flat piece of memory for its values."""
    weight.__class__ = vars(weight).pop("_class", type(weight))
    vars(weight).pop("_elsewhere", None)
    weight.data = values.view(weight.shape)


# ---- how often a tensor was written, as autograd counts it ----


def version_of(tensor: Tensor) -> int:
    """How often autograd saw that this tensor was written.

    [Note: ended graphs]
    In a phase of second order autograd saves sharded weights themselves, and not their places. After the phase,
    backward in such a graph must be an error. So each weight's version is raised, as if it was written. `version_of`
    leaves this out, because saved places and recompute may still use the weight.
    """
    return 0 if tensor.is_inference() else tensor._version - getattr(tensor, "_graphs_ended", 0)


def end_graphs(weights: Sequence[Tensor]) -> None:
    """From now on backward is an error in a graph that has saved one of these weights itself, not its place."""
    autograd.graph.increment_version(weights)
    for weight in weights:
        vars(weight)["_graphs_ended"] = getattr(weight, "_graphs_ended", 0) + 1


def forget_ended(weight: Tensor) -> None:
    """After training: the author's weight is as it was."""
    vars(weight).pop("_graphs_ended", None)
