"""The storeys: a file imports only from its own storey and those below, and no room is in a circle with another."""

import ast
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gan", "nets", "datasets", "strategies", "samples", "tests")

# The ground comes first. A storey has rooms, which are folders, and files that stand alone.
STOREYS = [
    "gan/files",
    "gan",  # the words of an author
    "nets datasets",
    "gan/games gan/runs",
    "strategies/processes strategies/sharding strategies/pipelining strategies/options strategies/batches "
    "strategies/optimizers "
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


class Tree:
    """The modules of a checkout, by their dotted names, and what each of them imports."""

    def __init__(self, root: Path) -> None:
        paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        self.files = {named(path.relative_to(root)): path for path in paths}
        self.packages = {name for name, path in self.files.items() if path.name == "__init__.py"}
        self.places = {name: path.relative_to(root) for name, path in self.files.items()}
        self.source = {name: path for name, path in self.places.items() if path.parts[0] != "tests"}
        self.found: dict[str, list[tuple[str, bool]]] = {}

    def known(self, module: str) -> str:
        """The innermost place of the table that the module is in."""
        place = self.places[module]
        return next(str(each) for each in (place, *place.parents) if str(each) in STOREY)

    def room(self, module: str) -> str:
        """The folder that it is in; a file that stands alone in the table is a room of its own."""
        known = self.known(module)
        return known if known.endswith(".py") else str(self.places[module].parent)

    def imports(self, module: str, functions: bool) -> Iterator[str]:
        """The modules of ours that a module imports, also for type hints; those inside functions if asked for."""
        if module not in self.found:
            self.found[module] = [*self._imports(module)]
        return (other for other, inside in self.found[module] if functions or not inside)

    def _imports(self, module: str) -> Iterator[tuple[str, bool]]:
        """Each with whether it is inside a function."""
        pending: list[tuple[ast.AST, bool]] = [(ast.parse(self.files[module].read_text()), False)]
        while pending:
            node, inside = pending.pop()
            inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            pending += ((child, inside) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
            if isinstance(node, ast.Import):
                yield from ((alias.name, inside) for alias in node.names if alias.name in self.files)
            elif isinstance(node, ast.ImportFrom):
                base = self.base(module, node)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    if inner in self.files or base in self.files:
                        yield inner if inner in self.files else base, inside

    def base(self, module: str, node: ast.ImportFrom) -> str:
        package = module if module in self.packages else module.rpartition(".")[0]
        return resolve_name("." * node.level + (node.module or ""), package)


def named(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def upwards(tree: Tree) -> list[str]:
    """Each import from a higher storey, or from the tests."""
    return sorted(
        {
            f"{module} imports {other}"
            for module in tree.source
            for other in tree.imports(module, functions=True)
            if other not in tree.source or STOREY[tree.known(other)] > STOREY[tree.known(module)]
        }
    )


def circles(edges: Mapping[str, set[str]]) -> list[str]:
    """Each edge that leads back to where it begins."""

    def reached(start: str) -> set[str]:
        seen, pending = set(), [start]
        while pending:
            new = edges.get(pending.pop(), set()) - seen
            seen |= new
            pending += new
        return seen

    reach = {place: reached(place) for place in edges}
    leads_back = {(place, other) for place in edges for other in edges[place] if place in reach.get(other, ())}
    return sorted(f"{place} imports {other}" for place, other in leads_back)


def files_in_circles(tree: Tree) -> list[str]:
    """By imports outside of functions, within a package."""

    def own(module: str) -> set[str]:
        package = module.split(".")[0]
        others = tree.imports(module, functions=False)
        return {other for other in others if other != module and other.split(".")[0] == package}

    return circles({module: own(module) for module in tree.files})


def rooms_in_circles(tree: Tree) -> list[str]:
    """The head of a package, which only names what is in it, is left out."""
    edges: dict[str, set[str]] = {}
    for module in tree.source:
        if module in tree.packages and "." not in module:
            continue
        own = tree.room(module)
        others = {tree.room(other) for other in tree.imports(module, functions=True) if other in tree.source}
        edges.setdefault(own, set()).update(others - {own})
    return circles(edges)


def test_imports_go_down_and_no_files_and_no_rooms_import_each_other():
    assert [room for room in STOREY if not (ROOT / room).exists()] == []
    tree = Tree(ROOT)
    assert upwards(tree) == files_in_circles(tree) == rooms_in_circles(tree) == []


GOOD = {
    "gan/__init__.py": "from gan.module import GanModule",
    "gan/module.py": "from gan.files.errors import UserError\nimport torch",
    "gan/files/errors.py": "",
    "gan/export.py": "from strategies.policies import ddp\nfrom nets import unet\nfrom gan.app.run import folder",
    "gan/app/run/folder.py": "import strategies\nfrom ...files import errors\nfrom gan.games import pix2pix",
    "gan/app/sampling/grids.py": "from gan.app.run import folder",
    "gan/games/pix2pix.py": "from gan import GanModule\nfrom nets.unet import UNet",
    "nets/unet.py": "from gan.files.errors import UserError",
    "datasets/data.py": "from gan.files import errors",
    "strategies/__init__.py": "def late():\n    from strategies.policies import ddp",
    "strategies/turn.py": "from strategies.policies import ddp",
    "strategies/policies/ddp.py": "import datasets.data\nfrom nets import unet",
    "samples/page.py": "from gan.export import main",
    "tests/test_fit.py": "from gan.export import main",
}
HINTS = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from strategies.policies.ddp import Ddp"


@pytest.fixture
def tree(tmp_path):
    def make(**changes: str) -> Tree:
        for name, text in {**GOOD, **{path.replace("__", "/") + ".py": text for path, text in changes.items()}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).parent.joinpath("__init__.py").touch()
            (tmp_path / name).write_text(text)
        return Tree(tmp_path)

    return make


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"gan__module": "def load():\n    from strategies import turn"}, "gan.module imports strategies.turn"),
        ({"gan__files__errors": "from ..module import GanModule"}, "gan.files.errors imports gan.module"),
        ({"datasets__data": HINTS}, "datasets.data imports strategies.policies.ddp"),
        ({"strategies__policies__ddp": "import strategies.turn"}, "strategies.policies.ddp imports strategies.turn"),
        ({"gan__app__run__folder": "def f():\n    import tests.test_fit"}, "gan.app.run.folder imports tests.test_fit"),
    ],
)
def test_the_control_an_import_upwards_is_found(changes, found, tree):
    assert upwards(tree(**changes)) == [found]


def test_the_control_files_and_rooms_in_a_circle_are_found(tree):
    found = files_in_circles(tree(gan__files__errors="from gan import GanModule"))
    assert found == ["gan imports gan.module", "gan.files.errors imports gan", "gan.module imports gan.files.errors"]
    made = tree(gan__files__errors="", gan__app__run__start="def f():\n    from gan.app.sampling.grids import grid")
    assert rooms_in_circles(made) == ["gan/app/run imports gan/app/sampling", "gan/app/sampling imports gan/app/run"]
    assert files_in_circles(made) == upwards(made) == []
