"""A moving average (EMA) of a player's weights, and of its buffers if asked for: one tensor for each.

It is written by hand, because torch's AveragedModel and Lightning's WeightAveraging deep-copy the network, which
FSDP2 forbids. A tensor for each parameter is sharded just like the parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def half_life(images: float, batch_size: int, ramp_up: float | None = None) -> Callable[[int], float]:
    """A decay for `Player(ema=..., ema_per="step")` by which weights count half after so many more images.

    `ramp_up`: at the beginning the half-life is this part of all images so far.
    """
    return partial(_decay, images, batch_size, ramp_up)


def _decay(images: float, batch_size: int, ramp_up: float | None, steps: int) -> float:
    # As in the code of Karras et al. 2020.
    if ramp_up is not None:
        images = min(images, ramp_up * steps * batch_size)
    return 0.5 ** (batch_size / images) if images else 0.0


class Ema:
    """`decay` gets the number of updates so far, and returns the decay of the next one.

    `average` has the tensors that become the average, in the order of the parameters. Without it they are made.
    `network`: the buffers of this module are averaged too. `averages` has the tensors for that, or else they are made.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        decay: Callable[[int], float],
        average: Sequence[Tensor] | None = None,
        network: nn.Module | None = None,
        averages: dict[str, Tensor] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        clones = (parameter.detach().clone() for parameter in self.parameters.values())
        self.average = list(clones if average is None else average)
        self.decay = decay
        self.updates = 0
        self.used: float | None = None  # the decay of the last update
        self.network = network
        self.of_buffers = {n: b.detach().clone() for n, b in self.buffers.items()} if averages is None else averages

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers that are averaged, as they are now: code may have put others in their place."""
        return {} if self.network is None else dict(self.network.named_buffers())

    @torch.no_grad()
    def update(self) -> None:
        """Move the average: average = decay * average + (1 - decay) * weights. Buffers of whole numbers are copied."""
        decay = self.used = self.decay(self.updates)
        blend = get_ema_multi_avg_fn(decay)
        if self.average:  # a rank may own no element
            blend(self.average, list(self.parameters.values()), None)
        for name, buffer in self.buffers.items():
            average = self.of_buffers.setdefault(name, buffer.detach().clone())
            if buffer.is_floating_point():
                average.lerp_(buffer, 1 - decay)
            else:
                average.copy_(buffer)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the `with`, the network has the averaged weights. Buffers that are not averaged stay."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        now = {**self.parameters, **self.buffers}
        for name, average in self.state_dict().items():
            values = now[name].detach().clone()
            now[name].copy_(average)
            average.copy_(values)

    def state_dict(self) -> dict[str, Tensor]:
        return {**dict(zip(self.parameters, self.average, strict=True)), **self.of_buffers}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Load saved averages. With None, start from the present weights."""
        now = {**self.parameters, **self.buffers}
        for name, average in self.state_dict().items():
            average.copy_(now[name] if state is None else state[name])
