"""How often a tensor was written, as autograd counts it.

[Note: ended graphs]
Where weights must stay whole for a phase, autograd saves the weights themselves. When they are resharded, backward in
such a graph must be an error from then on. So their versions are raised, as if they had been written. They were not:
a graph that has saved places, or a block that recompute will run again, may go on. `version_of` leaves these out.
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
        weight._graphs_ended = getattr(weight, "_graphs_ended", 0) + 1


def forget_ended(weight: Tensor) -> None:
    """After training: the author's weight is as it was."""
    vars(weight).pop("_graphs_ended", None)
