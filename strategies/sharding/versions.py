"""How often a tensor was written, as autograd counts it.

[Note: ended graphs]
In a phase of second order autograd saves sharded weights themselves, and not their places. After the phase, backward
in such a graph must be an error. So each weight's version is raised, as if it was written. `version_of` leaves this
out, because saved places and recompute may still use the weight.
"""

from collections.abc import Sequence

from torch import Tensor, autograd


def version_of(tensor: Tensor) -> int:
    """How often autograd saw that this tensor was written."""
    return 0 if tensor.is_inference() else tensor._version - getattr(tensor, "_graphs_ended", 0)


def end_graphs(weights: Sequence[Tensor]) -> None:
    """From now on backward is an error in a graph that has saved one of these weights itself, not its place."""
    autograd.graph.increment_version(weights)
    for weight in weights:
        vars(weight)["_graphs_ended"] = getattr(weight, "_graphs_ended", 0) + 1


def forget_ended(weight: Tensor) -> None:
    """After training: the author's weight is as it was."""
    vars(weight).pop("_graphs_ended", None)
