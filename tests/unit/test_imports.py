"""The storeys: a file imports only from its own storey and those below, and no room is in a circle with another."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gan", "nets", "datasets", "strategies", "samples", "tests")

# The ground comes first. A storey has rooms, which are folders, and files that stand alone.
STOREYS = [
    "gan/files",
    "gan",  # the words of an author
    "nets datasets",
    "gan/games gan/runs",
    "strategies/processes strategies/sharding strategies/pipelining strategies/options strategies/batches "
    "strategies/objects strategies/optimizers "
    "strategies/advice.py strategies/private.py strategies/accelerator.py strategies/observers.py strategies/world.py",
    "strategies/policies",
    "strategies/turn.py strategies/turn_errors.py strategies/guard.py strategies/hooks.py strategies/placing "
    "strategies/checkpoint",
    "strategies/check strategies/cost",
    "strategies",
    "gan/app",
    "gan/fit.py gan/sample.py gan/edit.py gan/evaluate.py gan/export.py gan/verify.py gan/plan.py gan/env.py "
    "gan/compare.py gan/bench samples",
]
STOREY = {room: number for number, rooms in enumerate(STOREYS) for room in rooms.split()}


def named(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {named(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
SOURCE = [module for module in FILES if not module.startswith("tests")]


def storey(module: str) -> int:
    place = FILES[module].relative_to(ROOT)
    return next(STOREY[str(each)] for each in (place, *place.parents) if str(each) in STOREY)


def room(module: str) -> str:
    """The folder that it is in; a file that stands alone in the table is a room of its own."""
    place = FILES[module].relative_to(ROOT)
    return str(place if str(place) in STOREY else place.parent)


@cache
def imports(module: str) -> list[tuple[str, bool]]:
    """The modules of ours that a module imports, also for type hints, each with whether it is inside a function."""
    return [(other, inside) for other, inside in _imports(module) if other in FILES]


def _imports(module: str) -> Iterator[tuple[str, bool]]:
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(FILES[module].read_text("utf-8")), False)]
    while pending:
        node, inside = pending.pop()
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        pending += ((child, inside) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            inner = {f"{base}.{alias.name}" for alias in node.names}
            yield from ((name if name in FILES else base, inside) for name in inner)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Names of which each leads to the next one, and the last is the first."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_a_file_imports_from_no_higher_storey_and_not_from_tests():
    assert [place for place in STOREY if not (ROOT / place).exists()] == []
    pairs = ((module, other) for module in SOURCE for other, _ in imports(module))
    upwards = {pair for pair in pairs if pair[1].startswith("tests") or storey(pair[1]) > storey(pair[0])}
    assert sorted(f"{module} imports {other}" for module, other in upwards) == []


def test_no_files_of_a_package_import_each_other_when_they_are_imported():
    def own(module: str) -> set[str]:
        package = module.partition(".")[0]
        return {other for other, inside in imports(module) if not inside and other.partition(".")[0] == package}

    assert circle({module: own(module) - {module} for module in FILES}) == []


def test_no_rooms_import_each_other():
    """The head of a package, which only names what is in it, is left out."""
    edges: dict[str, set[str]] = {}
    for module in SOURCE:
        if "." in module or FILES[module].name != "__init__.py":
            own = room(module)
            edges.setdefault(own, set()).update({room(other) for other, _ in imports(module)} - {own})
    assert circle(edges) == []
