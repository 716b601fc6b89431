"""Imports run one way: gan/*.py, then nets and datasets, then strategies, then the commands; and in no circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("gan", "nets", "datasets", "strategies", "samples", "tests")

MAY_IMPORT = {  # "core" is gan/*.py; "commands" are all other files of gan/, and samples/
    "core": {"core"},
    "nets": {"core", "nets"},
    "datasets": {"core", "datasets"},
    "strategies": {"core", "nets", "datasets", "strategies"},
    "commands": {"core", "nets", "datasets", "strategies", "commands"},
}


class Tree:
    """The modules of a checkout, by their dotted names, and what each of them imports."""

    def __init__(self, root: Path) -> None:
        paths = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
        self.files = {named(path.relative_to(root)): path for path in paths}
        self.packages = {name for name, path in self.files.items() if path.name == "__init__.py"}

    def kind(self, module: str) -> str:
        room, *rest = module.split(".")
        if room == "gan":
            inside = len(rest) > 1 or module in self.packages - {"gan"}
            return "commands" if inside or rest == ["export"] else "core"
        return "commands" if room == "samples" else room

    def imports(self, module: str, functions: bool) -> Iterator[str]:
        """The modules of ours that a module imports, also for type hints; those inside functions if asked for."""
        pending: list[ast.AST] = [ast.parse(self.files[module].read_text())]
        while pending:
            node = pending.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not functions:
                continue
            pending += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.files)
            elif isinstance(node, ast.ImportFrom):
                base = self.base(module, node)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    if inner in self.files or base in self.files:
                        yield inner if inner in self.files else base

    def base(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parents = module.split(".") if module in self.packages else module.split(".")[:-1]
        parents = parents[: len(parents) - node.level + 1]
        return ".".join([*parents, *([node.module] if node.module else [])])


def named(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def against_the_direction(tree: Tree) -> list[str]:
    return sorted(
        {
            f"{module} imports {other}"
            for module in tree.files
            if tree.kind(module) != "tests"
            for other in tree.imports(module, functions=True)
            if tree.kind(other) not in MAY_IMPORT[tree.kind(module)]
        }
    )


def in_circles(tree: Tree) -> list[str]:
    """Each import that leads back to its own module, by imports outside of functions and within a package."""
    edges = {
        module: {
            other
            for other in tree.imports(module, functions=False)
            if other != module and other.split(".")[0] == module.split(".")[0]
        }
        for module in tree.files
    }

    def reached(start: str) -> set[str]:
        seen, pending = set(), [start]
        while pending:
            new = edges[pending.pop()] - seen
            seen |= new
            pending += new
        return seen

    reach = {module: reached(module) for module in tree.files}
    return sorted(f"{module} imports {other}" for module in edges for other in edges[module] if module in reach[other])


def test_imports_run_one_way():
    assert against_the_direction(Tree(ROOT)) == []


def test_no_modules_import_each_other():
    assert in_circles(Tree(ROOT)) == []


# ---- controls ----

GOOD = {
    "gan/__init__.py": "from gan.module import GanModule",
    "gan/module.py": "from gan.errors import UserError\nimport torch",
    "gan/errors.py": "",
    "gan/export.py": "from strategies import ddp\nfrom nets import unet",
    "gan/fit/__init__.py": "from gan.fit.command import main",
    "gan/fit/command.py": "import strategies\nfrom .. import errors\nfrom gan.games import pix2pix",
    "gan/games/__init__.py": "",
    "gan/games/pix2pix.py": "from gan import GanModule\nfrom nets.unet import UNet",
    "nets/__init__.py": "",
    "nets/unet.py": "from gan.errors import UserError",
    "datasets/__init__.py": "",
    "datasets/files.py": "from gan import errors",
    "strategies/__init__.py": "def late():\n    from strategies import ddp",
    "strategies/ddp.py": "import strategies\nimport datasets.files\nfrom nets import unet",
    "samples/page.py": "from gan.fit import main",
    "tests/test_fit.py": "from gan.fit import main",
}
HINTS = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from strategies.ddp import Ddp"


@pytest.fixture
def tree(tmp_path):
    def make(**changes: str) -> Tree:
        for name, text in {**GOOD, **{path.replace("__", "/") + ".py": text for path, text in changes.items()}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return Tree(tmp_path)

    return make


def test_what_may_be_imported_is_not_complained_of(tree):
    assert against_the_direction(tree()) == in_circles(tree()) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"gan__module": "def load():\n    from strategies import ddp"}, "gan.module imports strategies.ddp"),
        ({"gan__module": "import nets.unet"}, "gan.module imports nets.unet"),
        ({"gan__module": "from gan.games.pix2pix import x"}, "gan.module imports gan.games.pix2pix"),
        ({"gan__errors": "from . import export"}, "gan.errors imports gan.export"),
        ({"nets__unet": "from datasets import files"}, "nets.unet imports datasets.files"),
        ({"datasets__files": "import nets"}, "datasets.files imports nets"),
        ({"datasets__files": HINTS}, "datasets.files imports strategies.ddp"),
        ({"strategies__ddp": "from gan.games import pix2pix"}, "strategies.ddp imports gan.games.pix2pix"),
        ({"gan__fit__command": "def f():\n    import tests.test_fit"}, "gan.fit.command imports tests.test_fit"),
        ({"samples__page": "from tests import test_fit"}, "samples.page imports tests.test_fit"),
    ],
)
def test_the_control_a_wrong_direction_is_found(changes, found, tree):
    assert against_the_direction(tree(**changes)) == [found]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"gan__errors": "from gan import GanModule"}, ["gan imports gan.module", "gan.module imports gan.errors"]),
        ({"strategies__base": HINTS, "strategies__ddp": "from .base import Base"}, ["strategies.base imports"]),
    ],
)
def test_the_control_a_circle_is_found(changes, found, tree):
    complaints = in_circles(tree(**changes))
    assert len(complaints) == len(found) + 1
    for words in found:
        assert any(words in each for each in complaints)
