"""Our packages `nets`, `strategies` and `datasets`, where something else has one of these names."""

import os
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
OURS = ("nets", "strategies", "datasets")
ADVICE = "rename yours, or give this project an environment of its own"


class Ours:
    """Python asks it for modules before it looks anywhere else. What ours hides is said once, and not by each rank."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [str(HOME)]) if name in OURS else None
        found, ours = (None, None) if spec is None else (_place(PathFinder.find_spec(name)), _place(spec))
        if found not in (None, ours) and "LOCAL_RANK" not in os.environ:
            warnings.warn(f"'{name}' is gan's own package, {ours}, and hides {found}; {ADVICE}", stacklevel=2)
        return spec


def take() -> None:
    """Let our packages be found, also where others come first on Python's path. `import gan` calls it.

    Raise ImportError if another one is imported already, since a module cannot be exchanged.
    """
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
