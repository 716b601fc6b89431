"""What takes seconds to import is imported where it is used, so that a command that only prints need not wait for it.

torch is imported at once, and Lightning, torchvision and torchmetrics (two seconds more) inside of functions, or by
the name of a package that stands for a class of ours: `from gan import GanModule` imports gan/module.py only then.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Lightning reads its rank in the first of these when it is imported, and fails without naming it if that is no number.
# strategies/processes/launchers.py refuses it by name.
LIGHTNINGS_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


@contextmanager
def loading() -> Iterator[None]:
    """Inside the `with`, torch and Lightning are imported: without a look for garbage, of which imports make none."""
    wrong = {name: os.environ.pop(name) for name in LIGHTNINGS_RANKS if not os.environ.get(name, "0").isdecimal()}
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        os.environ.update(wrong)
        if collected:
            if not gc.get_freeze_count():
                gc.freeze()  # with the next line: all that was made is old at once, and not looked through while young
                gc.unfreeze()
            gc.enable()


def by_name(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package, from its modules and the names that each of them has. See PEP 562."""
    modules = {name: module for module, names in places.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        with loading():
            return getattr(import_module(modules[name]), name)

    return get


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Let torch.compile leave a function alone. torch.compiler.disable does that too, but imports the compiler now."""
    import torch

    made = torch._disable_dynamo(function)  # imports the compiler at the first call
    vars(made)["_torchdynamo_disable"] = True  # where another function is compiled that calls it, nothing is said
    return made
