"""Every backward in a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def device_threads() -> Iterator[None]:
    """Inside the `with`, each backward runs in a new thread with an empty context, and the thread that asks waits.

    So it is with the nodes of a GPU: they run in a thread that autograd has started for the device. That thread has
    neither the ContextVars nor the thread-locals of the one that asks, nor its autocast.
    """
    before = Variable._execution_engine
    Variable._execution_engine = Engine(before)
    try:
        yield
    finally:
        Variable._execution_engine = before


class Engine:
    """torch's engine, for all backwards that are asked for in Python."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.backwards = 0  # in threads of their own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        # The levels of torch.func go along to a device's thread, but nobody can do that from Python.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return self.engine.run_backward(*args, **kwargs)
        self.backwards += 1
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # these go along as well
        goes = hasattr(torch._C, "_remove_obj_from_tls")  # in a torch that lets a thread end well that has it
        context = torch._C._get_obj_in_tls("context") if goes and torch._C._is_key_in_tls("context") else None
        found: list[Any] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                if context is not None:  # with which compiled code looks up its settings
                    torch._C._stash_obj_in_tls("context", context)
                with saved_tensors_hooks(*hooks) if hooks else nullcontext():
                    found.append(self.engine.run_backward(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the thread that asks shall see it
                failed.append(error)
            finally:
                if context is not None:
                    torch._C._remove_obj_from_tls("context")

        thread = threading.Thread(target=Context().run, args=(run,), name="backward")
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]
