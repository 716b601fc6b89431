"""How packages are imported: late where they take seconds, and ours where something else has one of their names.

A command that only prints need not wait for what it does not use.

torch is imported at once, and Lightning, torchvision and torchmetrics (two seconds more) inside of functions, or by
the name of a package that stands for a class of ours: `from gan import GanModule` imports gan/module.py only then.
"""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Lightning reads its rank in the first of these when it is imported, and fails without naming it if that is no number.
# strategies/processes/launchers.py refuses it by name.
LIGHTNINGS_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

HOME = Path(__file__).resolve().parents[2]
OURS = ("nets", "strategies", "datasets")  # whose names may be those of something else
ADVICE = "rename yours, or give this project an environment of its own"


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


class Ours:
    """Python asks it for modules before it looks anywhere else. What ours hides is said once, and not by each rank."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [str(HOME)]) if name in OURS else None
        found, ours = (None, None) if spec is None else (_place(PathFinder.find_spec(name)), _place(spec))
        if found not in (None, ours) and "LOCAL_RANK" not in os.environ:
            warnings.warn(f"'{name}' is gan's own package, {ours}, and hides {found}; {ADVICE}", stacklevel=2)
        return spec


def take_names() -> None:
    """Let our packages be found before others of their names; ImportError if another one is imported already."""
    for name in OURS:
        found, ours = _place(getattr(sys.modules.get(name), "__spec__", None)), HOME / name / "__init__.py"
        if found not in (None, ours) and ours.is_file():
            raise ImportError(f"'{name}' is {found} here, and gan needs its own, {ours}; {ADVICE}", name=name)
    if Ours not in sys.meta_path:
        sys.meta_path.insert(0, Ours)


def hidden(name: str) -> Path | None:
    """What of this name, such as a person's file, is hidden by ours."""
    elsewhere = [place for place in sys.path if Path(place).resolve() != HOME]
    spec = PathFinder.find_spec(name, elsewhere) if name in OURS else None
    return None if spec is None else _place(spec) or Path(next(iter(spec.submodule_search_locations or (name,))))


def _place(spec: ModuleSpec | None) -> Path | None:
    """The file of a module. A folder of data has none."""
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()
