"""A call that serving ranks answer, as one step of a training rank's graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gan.errors import UserError
from strategies import private
from strategies.placing.messages import Call, Found, Slopes, unpacked
from strategies.placing.servers import Servers


class Remote:
    """One call. While its graph lives here, the serving rank keeps the graph there."""

    def __init__(self, servers: Servers, call: Call, gone: list[int], enter: Callable[[], None]) -> None:
        """When the graph is gone, the call's key is put into `gone`. `enter` is called before the backward."""
        self.servers, self.call, self.gone, self.enter = servers, call, gone, enter
        self.answer: Found

    def returned(self) -> Any:
        tensors = list(_Step.apply(self, *self.call.tensors)) if self.call.learns else self.forward()
        return unpacked(self.answer.value, tensors, self.servers.bridge.device)

    def forward(self) -> list[Tensor]:
        self.answer = self.servers.ask(self.call)
        return self.answer.tensors

    def backward(self, slopes: list[Tensor | None]) -> list[Tensor | None]:
        if torch.is_grad_enabled():
            raise UserError(
                f"player '{self.call.player}': a loss differentiates a gradient that goes through it, and that does "
                f"not go through other ranks; leave @{self.servers.where} out"
            )
        self.enter()
        return self.servers.ask(Slopes(self.call.player, self.call.key, slopes, private.keeps_graph()))

    def __del__(self) -> None:
        if self.call.learns:
            self.gone.append(self.call.key)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, remote: Remote, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        ctx.remote = remote
        ctx.set_materialize_grads(False)
        found = remote.forward()
        made = tuple(each.detach() for each in found)
        ctx.mark_non_differentiable(*(n for n, each in zip(made, found, strict=True) if not each.requires_grad))
        return made

    @staticmethod
    def backward(ctx, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        return None, *ctx.remote.backward(list(slopes))
