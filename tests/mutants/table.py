"""Reads mistakes.txt: in which file, which text becomes which, and which tests must fail then."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MISTAKES = Path(__file__).with_name("mistakes.txt")


class Mutant(NamedTuple):
    name: str
    file: str
    old: str  # is in the file once
    new: str
    tests: list[str]  # below tests/, perhaps with ::a_test; they fail together


def mutants() -> Iterator[Mutant]:
    """All mistakes, from top to bottom. A mistake without lines that come takes whole lines away."""
    file, tests = "", [""]
    rows: list[tuple[str, str, list[str], list[str], list[str]]] = []
    for number, line in enumerate(MISTAKES.read_text("utf-8").splitlines(), 1):
        match line[:2].rstrip(), line[2:]:
            case "==", text:
                file, *tests = text.split()
            case "*", name:
                rows.append((name, file, [], [], tests))
            case "-", text:
                rows[-1][2].append(text)
            case "+", text:
                rows[-1][3].append(text)
            case (("#" | ""), _):
                pass
            case _:
                raise ValueError(f"{MISTAKES.name}:{number} is no line of the table: {line}")
    for name, file, goes, comes, tests in rows:
        end = "" if comes else "\n"
        yield Mutant(name, file, "\n".join(goes) + end, "\n".join(comes), tests)
