"""Something else has the name of one of our packages: ours is found all the same, or one sentence names both places."""

import os
from pathlib import Path

import pytest

from tests.support import commands

ROOT = Path(__file__).parents[2]
MINE = """
from nets{part} import Mine

def my_run(): ...
"""
ADVICE = "rename yours, or give this project an environment of its own"


def ran(here: Path, *words: str, path: tuple[Path, ...] = (ROOT,)) -> tuple[int, str, list[str]]:
    """The exit status, what was printed, and the lines that were said."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    environ.pop("LOCAL_RANK", None)
    done = commands.run(*words, cwd=here, env=environ)
    return done.returncode, done.stdout, [line for line in done.stderr.splitlines() if ADVICE in line]


@pytest.fixture
def taken(tmp_path):
    """A folder with a package that has the name of ours."""
    (tmp_path / "theirs" / "datasets").mkdir(parents=True)
    (tmp_path / "theirs" / "datasets" / "__init__.py").write_text("def load_dataset(): ...")
    return tmp_path / "theirs"


def test_a_command_finds_ours_beside_a_file_of_that_name(tmp_path):
    for name in ("datasets", "nets", "strategies"):
        (tmp_path / f"{name}.py").write_text("X = 1")
    status, printed, said = ran(tmp_path, "-m", "gan.fit", "--list-runs")
    assert (status, len(said)) == (0, 3) and "sean-faces" in printed
    ours = ROOT / "nets" / "__init__.py"
    (nets,) = [line for line in said if "nets.py" in line]
    assert nets.endswith(f"'nets' is gan's own package, {ours}, and hides {tmp_path}/nets.py; {ADVICE}")


@pytest.mark.parametrize("part", ["", ".parts"])
def test_a_run_that_needs_its_own_is_told_so(part, tmp_path):
    (tmp_path / "nets").mkdir()
    for name in ("mine.py", *(["nets/__init__.py", "nets/parts.py"] if not part else ["nets/parts.py"])):
        (tmp_path / name).write_text(MINE.format(part=part) if name == "mine.py" else "Mine = 1")
    (tmp_path / "elsewhere").mkdir()
    status, _, said = ran(tmp_path / "elsewhere", "-m", "gan.plan", "../mine.py:my_run")
    theirs = tmp_path / "nets" / ("" if part else "__init__.py")
    assert (status, len(said)) == (2, 1)
    assert said[0].startswith("error: ") and f"'nets' is gan's own package, {ROOT}/nets, and hides {theirs};" in said[0]


USES = (
    "import gan; from datasets.batches import check_divides as ours; import nets.norm, strategies; "
    "print(ours.__module__)"
)
PRINTS = "datasets.batches\n"


def test_a_program_finds_ours_wherever_a_package_of_that_name_is(taken):
    """Also if its path changes later."""
    uses = f"import sys; sys.path.remove(''); {USES}"
    assert ran(taken, "-c", uses, path=(ROOT, taken)) == (0, PRINTS, [])
    later = uses.replace("gan; ", f"gan; sys.path.insert(0, {str(taken)!r}); ")
    for program, path in ((uses, (taken, ROOT)), (later, (ROOT,))):
        status, printed, said = ran(taken, "-c", program, path=path)
        assert (status, printed, len(said)) == (0, PRINTS, 1) and f"hides {taken}/datasets/__init__.py" in said[0]


def test_one_that_is_imported_already_is_refused(taken):
    status, _, said = ran(taken, "-c", f"import datasets; {USES}")
    ours = ROOT / "datasets" / "__init__.py"
    words = f"'datasets' is {taken}/datasets/__init__.py here, and gan needs its own, {ours}; {ADVICE}"
    assert (status, said) == (1, [f"ImportError: {words}"])


def test_a_folder_of_data_hides_nothing_of_an_editable_install(tmp_path):
    """Such an install finds our packages after everything that is on the path."""
    (tmp_path / "datasets").mkdir()
    finder = (
        "import sys; from importlib.machinery import PathFinder as P; sys.path[:] = "
        f"[p for p in sys.path if p != {str(ROOT)!r}]; "
        f"find = lambda name, *_: P.find_spec(name, [{str(ROOT)!r}]); "
        "sys.meta_path.append(type('Finder', (), {'find_spec': staticmethod(find)}))"
    )
    assert ran(tmp_path, "-c", f"{finder}; {USES}", path=()) == (0, PRINTS, [])
