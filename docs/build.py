"""`make docs`: check the guides, and make the site of them in build/site.

A page's commands stand in ```sh blocks, or alone in a cell of a table. Each is read by the command's own parser. A
```python block runs, after the blocks before it on its page; a ```py block is a fragment, which is compiled. Zensical
finds dead links.
"""

import ast
import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, BUILD = ROOT / "docs", ROOT / "build"
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "strategies/README.md", *sorted(DOCS.rglob("*.md"))]
COMMANDS = ("fit", "sample", "edit", "evaluate", "compare", "export", "verify", "plan", "env")


# ---- what a page says ----


def blocks(text: str, kind: str) -> list[str]:
    """The fenced blocks of a kind, such as sh."""
    found = re.findall(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, each, body in found if each == kind]


def commands(text: str) -> list[list[str]]:
    """The words of each command of this project that a page shows, from the module's name on, and of each `make`."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    lines += re.findall(r"\| `(python -m gan\.[^`]+)` \|", text)  # those in tables
    typed = [shlex.split(line.replace("\\", "/"), comments=True) for line in lines]
    starts = [(words, i) for words in typed for i, word in enumerate(words) if word.startswith("gan.") or i == 0]
    return [words[i:] for words, i in starts if words[i] == "make" or words[i].startswith("gan.")]


def check_command(words: list[str]) -> None:
    """Let the command's own parser read what is typed. It raises what the command would say; nothing is trained."""
    module, *argv = words
    if module == "make":
        assert re.search(rf"^{argv[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"there is no make {argv[0]}"
    elif module == "gan.bench":
        importlib.import_module("gan.bench.__main__").BENCHMARKS[argv[0]](argv[1:])
    else:
        command = importlib.import_module(module)
        try:
            (command.parse if hasattr(command, "parse") else command.options.parse)(argv)
        except SystemExit as ended:
            assert not ended.code, f"{' '.join(words)} is refused"  # 0 after --help


@contextlib.contextmanager
def reader() -> Iterator[Path]:
    """Inside the `with`, we are in the folder of somebody who has followed the guide: a game, and a run."""
    from gan.app.run import options, settings_file

    before, path = Path.cwd(), list(sys.path)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(name)
        try:
            (program,) = blocks((DOCS / "guide/game.md").read_text(), "python")
            Path("my_gan.py").write_text(program)
            Path("answers.py").write_text("\n\n".join(blocks((DOCS / "guide/questions.md").read_text(), "python")))
            Path("samples").symlink_to(ROOT / "samples")
            Path("runs/001-sean-faces/checkpoints/step-000400.ckpt").mkdir(parents=True)
            Path("runs/001-sean-faces/settings.yaml").write_text(settings_file.dump(options.parse([])[0], "sean-faces"))
            yield Path(name)
        finally:
            os.chdir(before)
            sys.path[:] = path
            for own in ("my_gan", "answers", "distillation"):
                sys.modules.pop(own, None)


def check_fragments(page: Path) -> None:
    """Compile the fragments of a page, as the body of a method."""
    for code in blocks(page.read_text(), "py"):
        compile("def method(self):\n" + textwrap.indent(code, "    "), str(page), "exec")


def run_blocks(page: Path) -> None:
    """Run the programs of a page, one after the other."""
    names: dict[str, object] = {"__name__": "page"}
    for code in blocks(page.read_text(), "python"):
        exec(compile(code, str(page), "exec"), names)


def said(page: Path) -> list[str]:
    """What the first column of a page's tables quotes."""
    return re.findall(r"^\| `(.*?)` \|", page.read_text(), re.MULTILINE)


def messages() -> Iterator[str]:
    """All texts in the source, in which … stands for what is put in."""
    for path in (path for room in ("gan", "datasets", "strategies") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant):
                yield str(node.value).replace("{}", "…")


def check_quotes(page: Path) -> None:
    """Find what the page quotes in the source."""
    known = "\0".join(messages())
    missing = [quote for quote in said(page) if quote not in known]
    assert not missing, f"{page} quotes what nothing says: {missing}"


# ---- the site ----


def nav() -> list[Path]:
    """The pages, in the order of the site."""

    def pages(found: object) -> Iterator[str]:
        if isinstance(found, str):
            yield found
        for each in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
            yield from pages(each)

    return [DOCS / name for name in pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])]


def generated(page: Path) -> str:
    """The text of a page, with what the source says in it."""
    text = page.read_text()
    if page == DOCS / "reference/commands.md":
        return text + "".join(f"\n## gan.{name}\n\n```text\n{_help(name)}```\n" for name in (*COMMANDS, "bench"))
    if page == DOCS / "reference/matrix.md":
        return (ROOT / "strategies/MATRIX.md").read_text().replace("this file; do not edit it.", "this page.")
    if page == DOCS / "develop/index.md":
        return (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/develop/", "](")
    return text


def _help(command: str) -> str:
    words = [sys.executable, "-m", f"gan.{command}", "--help"]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def make_pages(folder: Path) -> None:
    """Write the pages, their pictures, and llms.txt and llms-full.txt for programs that read."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    about = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    listed, full = [f"# {about['site_name']}", "", f"> {about['site_description']}", ""], []
    for page in nav():
        name, text = page.relative_to(DOCS), generated(page)
        (folder / name).write_text(text)
        title = re.search(r"^# (.*)$", text, re.MULTILINE)
        assert title, f"{page} has no title"
        listed.append(f"- [{title[1]}]({'' if name.stem == 'index' else name.stem + '/'})")
        full.append(text)
    (folder / "llms.txt").write_text("\n".join(listed) + "\n")
    (folder / "llms-full.txt").write_text("\n\n".join(full))


def main() -> int:
    """Check all guides, and build the site strictly."""
    with reader():
        for page in GUIDES:
            check_fragments(page)
            run_blocks(page)
            for words in commands(page.read_text()):
                check_command(words)
    check_quotes(DOCS / "troubles.md")
    make_pages(BUILD / "docs")
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
