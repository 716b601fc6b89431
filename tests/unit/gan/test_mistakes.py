"""What all commands say to a mistake: answers.txt, word for word. A mistake leaves nothing behind."""

import contextlib
import importlib
import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from strategies.policies import POLICIES
from tests.support.posix import only_on_linux

GOLDEN, FOLDER = Path(__file__).with_name("answers.txt"), Path(__file__).with_name("mistakes")
FOUND = re.findall(r"^\$ (.*)\n((?:    .*\n)*)", GOLDEN.read_text("utf-8"), re.MULTILINE)


@pytest.fixture(autouse=True)
def _own_policies(monkeypatch):
    """Without the controls that other tests of this process have added."""
    for name in [name for name, policy in POLICIES.items() if policy.__module__.startswith("tests.")]:
        monkeypatch.delitem(POLICIES, name)


@pytest.fixture
def here(here, monkeypatch):
    """A copy of the folder of mistakes."""
    shutil.copytree(FOLDER, here, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (here / "broken.py").write_text("import my_paint\nb = = 2\n")
    (here / "not_text.py").write_bytes(b"# coding: ascii\na = '\xe4'\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return here


def answer(typed: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command says that is typed there."""
    words = shlex.split(typed)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    name = words[2]
    module = importlib.import_module("gan.bench.__main__" if name == "gan.bench" else name)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
        sys.exit(module.main(words[3:]))
    assert ended.value.code == 2
    text = re.sub(r"(usage: .*?\n(?! ))|(tip: .*?\n)", "", said.getvalue(), flags=re.DOTALL).strip()
    for path, name in ((str(here), "HERE"), (str(Path(importlib.__file__).parents[1]), "PYTHON")):
        text = text.replace(path, name)
    return text


def files(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.promise("options that are misspelt, cut short or empty", "one line that says what to type")
@only_on_linux
@pytest.mark.parametrize(("typed", "said"), FOUND, ids=[typed for typed, _ in FOUND])
def test_a_mistake_is_answered_with_what_to_type(typed, said, here, monkeypatch, request):
    before = files(here)
    lines = "".join(f"    {line}\n" for line in answer(typed, here, monkeypatch).splitlines())
    assert files(here) == before
    if request.config.getoption("--regenerate"):
        block = re.compile(rf"^{re.escape(f'$ {typed}')}\n(?:    .*\n)*", re.MULTILINE)
        GOLDEN.write_text(block.sub(lambda _: f"$ {typed}\n{lines}", GOLDEN.read_text("utf-8")), "utf-8")
    else:
        assert lines == said
