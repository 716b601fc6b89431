"""The option compile: a player's forward and backward run as torch.compile makes them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from gan.errors import UserError
from gan.phase import Phase, Player

BACKEND = "inductor"
RECOMPILES = 64  # of one function: blocks of one class share it, and each is compiled for every part it plays


class Compiled:
    """Compiles the calls of a player's network in place, by `Module.compile`: the same object and state-dict keys.

    What the network's `forward` does is compiled, wherever the network is called; its own methods are not, nor what
    they do with the modules inside it. Of a network without a forward, such as a ModuleDict of two or one that is only
    used by its own methods, the modules inside are compiled, each by itself.

    A compiled backward cannot be differentiated. So in a phase with `second_order=True` every player runs as it is
    written, as does what `GanModule.shared` makes in a game with such a phase; a phase that differentiates a gradient
    and does not say so is told to.

    [Note: how often it compiles]
    torch compiles a function anew for what it has not met: weights that require gradients or do not, gradients
    recorded or not, training or evaluation, a batch of another size (twice: from the second size on it is a variable).
    So a player is compiled once for every part that it plays in a step, in the first steps, and then no more. The
    values of weights may change, also to their averages and back, and their memory, as zero3's does.

    Communicates nothing. The weights are gathered before the compiled call, and a synchronised batch norm's sums over
    ranks stay outside of the compiled graphs, as does the noise of `gan.noise`; both part a graph in two. Gradients
    of a whole graph are there at once, so a reduction overlaps with less of backward.
    """

    def __init__(self, player: Player, device: torch.device, gather: Callable[[], None]) -> None:
        self.player, self.gather = player, gather
        trouble = _trouble(BACKEND, device)
        if trouble is not None:
            raise UserError(
                f"player '{player.name}': torch.compile does not work here: {trouble}; "
                f"{_cure(device)}, or leave the option compile out"
            )
        self.networks = [Network(module, self._run) for module in _networks(player.module)]
        if not self.networks:
            raise UserError(
                f"player '{player.name}': no module of its {type(player.module).__name__} has a forward to compile; "
                f"leave the option out for it, e.g. --strategy {player.name}=ddp,*=ddp+compile"
            )
        self.use(True)

    def use(self, compiled: bool) -> None:
        """Whether the network's next calls are the compiled ones."""
        for network in self.networks:
            network.use(compiled)

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Not compiled for a while."""
        before = self.networks[0].used
        self.use(False)
        try:
            yield
        finally:
            self.use(before)

    def _run(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.gather()
        with _undonated(), torch._dynamo.config.patch(recompile_limit=RECOMPILES):
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise UserError(
                    f"player '{self.player.name}': torch.compile fails on its {type(self.player.module).__name__}: "
                    f"{_first_line(error)}; leave the option compile out for it, e.g. "
                    f"--strategy {self.player.name}=ddp,*=ddp+compile"
                ) from error

    def release(self) -> None:
        """The network is called as before."""
        for network in self.networks:
            network.release()
        self.networks = []


class Network:
    """A module that is called compiled or as it is written; `run` makes a compiled call."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module = module
        self.before = vars(module).get("_compiled_call_impl")
        # Random numbers of a compiled network are those that it draws as it is written.
        module.compile(backend=BACKEND, options={"fallback_random": True} if BACKEND == "inductor" else None)
        self.call = partial(run, module._compiled_call_impl)

    @property
    def used(self) -> bool:
        """Whether the next call is a compiled one."""
        return self.module._compiled_call_impl is self.call

    def use(self, compiled: bool) -> None:
        """Whether it shall be."""
        self.module._compiled_call_impl = self.call if compiled else None

    def release(self) -> None:
        """As its author left it."""
        del self.module._compiled_call_impl
        if self.before is not None:
            self.module._compiled_call_impl = self.before


def _networks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that have a forward."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return list(dict.fromkeys(network for child in module.children() for network in _networks(child)))


@contextmanager
def played(phase: Phase, compiled: list[str]) -> Iterator[None]:
    """A phase in which these players may run compiled."""
    if not compiled:
        yield
        return
    try:
        with _undonated():
            yield
    except RuntimeError as error:
        if "does not currently support double backward" in str(error):
            raise UserError(
                f"phase '{phase.name}' differentiates a gradient, and a compiled player cannot be differentiated twice "
                f"({', '.join(compiled)}); say Phase('{phase.name}', ..., second_order=True), and in this phase they "
                f"run as they are written"
            ) from error
        raise


def _undonated() -> AbstractContextManager[Any]:
    """A compiled graph may go backward twice, as in plain torch; said when it is compiled and when it goes backward."""
    return torch._functorch.config.patch(donated_buffer=False)


@cache
def _trouble(backend: str, device: torch.device) -> str | None:
    """Why nothing can be compiled on this machine, if so: found by compiling something small."""
    try:
        torch.compile(_something, backend=backend)(torch.ones(2, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        return _first_line(error)
    return None


def _something(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def _first_line(error: Exception) -> str:
    """What went wrong, without the pages of advice behind it."""
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _cure(device: torch.device) -> str:
    if device.type == "cpu":
        return "install a C++ compiler (Debian: apt-get install g++)"
    return "see whether triton works on this device"
