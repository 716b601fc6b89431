"""A run of a person's own: a function in a file or a module of theirs, named as FILE.py:FUNCTION or MODULE:FUNCTION."""

import difflib
import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gan.files.disk import regular
from gan.files.errors import UserError, reason
from gan.files.loading import ADVICE, HOME, hidden
from gan.runs.run import Run

FORM = "path/to/my_game.py:my_run or package.module:my_run"


@dataclass(frozen=True)
class OwnRun:
    """Where the function is: `module` is imported with `folder` first on Python's path, if there is a folder.

    [Note: the name of an own run]
    Its text is what settings.yaml stores, so that a later command finds the function from any folder:

        /home/me/my_game.py:my_run            a file
        /home/me/project/package.module:my_run    a module that was found in the folder in which the command was typed
        package.module:my_run                 a module that is installed, or on PYTHONPATH
    """

    folder: Path | None
    module: str
    function: str
    file: Path | None = None

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.file}:{self.function}"
        place = "" if self.folder is None else f"{self.folder}{os.sep}"
        return f"{place}{self.module}:{self.function}"

    def load(self) -> Callable[..., Run]:
        """The function. Its module is imported, which runs the code in it."""
        module = self._import()
        function, place = getattr(module, self.function, None), str(self).rpartition(":")[0]
        runs = [name for name, each in vars(module).items() if _is_run(each)]
        if function is None:
            close = difflib.get_close_matches(self.function, runs, 1)
            hint = f"did you mean {close[0]}? Or" if close else f"its runs: {', '.join(runs) or 'none'};"
            advice = f"if it has another name now, type --run {place}:NAME"
            raise UserError(f"{place} has no function '{self.function}'; {hint} {advice}")
        if not _is_run(function):
            raise UserError(
                f"'{self.function}' of {place} is no run; write def {self.function}(...) -> Run, with "
                f"`from gan.runs import Run`"
            )
        return function

    def _import(self) -> ModuleType:
        if self.file is not None:
            try:
                regular(self.file)
            except FileNotFoundError as error:
                others = [each.name for each in self.file.parent.glob("*.py")]
                close = difflib.get_close_matches(self.file.name, others, 1)
                meant = f"did you mean {close[0]}? Or " if close else ""
                raise UserError(f"there is no file {self.file}; {meant}if it has moved, type --run {FORM}") from error
            except OSError as error:
                raise UserError(f"cannot read {self.file}: {error.strerror}; type --run {FORM}") from error
        if self.folder is not None and (not sys.path or sys.path[0] != str(self.folder)):
            sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        try:
            with looking_for_its_own():
                module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if not f"{self.module}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports one that is not
            where = "here or among the installed ones" if self.folder is None else f"in {self.folder}"
            raise UserError(f"there is no module '{self.module}' {where}; type --run {FORM}") from error
        except SyntaxError as error:
            raise UserError(f"{error.filename}, line {error.lineno}: {error.msg}; correct it") from error
        found = getattr(module, "__file__", None)
        if self.folder is not None and not (found and Path(found).is_relative_to(self.folder)):
            raise UserError(
                f"the name '{self.module}' of {self} is taken by {found or 'a module of Python'}; rename the file"
            )
        return module


@contextmanager
def looking_for_its_own() -> Iterator[None]:
    """Inside the `with`, code that misses its own module, because ours has the name, is told so."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        missing = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
        name = str(missing).partition(".")[0]
        if (theirs := hidden(name)) is None:
            raise
        raise UserError(
            f"{reason(error)}: '{name}' is gan's own package, {HOME / name}, and hides {theirs}; {ADVICE}"
        ) from error


def read(text: str) -> OwnRun:
    """The run that is typed as FILE.py:FUNCTION, MODULE:FUNCTION or FOLDER/MODULE:FUNCTION."""
    place, _, function = text.rpartition(":")
    if not place or not function.isidentifier():
        raise UserError(f"cannot read run '{text}'; type {FORM}")
    path = Path(os.path.abspath(Path(place).expanduser()))
    if place.endswith(".py"):
        # A file of a package is imported by its whole name, so that its relative imports work.
        folder, names = path.parent, [path.stem]
        while (folder / "__init__.py").is_file():
            folder, names = folder.parent, [folder.name, *names]
        return OwnRun(folder, ".".join(names), function, path)
    if "/" in place or os.sep in place:
        return OwnRun(path.parent, path.name, function)
    top, here = place.partition(".")[0], Path.cwd()
    found_here = (here / top).is_dir() or (here / f"{top}.py").is_file()
    return OwnRun(here if found_here else None, place, function)


def _is_run(value: Any) -> bool:
    """Whether it is a function that says that it returns a Run, or one of a person's own that says nothing of it.

    An installed function must say so: else a file of settings, which may come from anywhere, could name any of them.
    """
    if not callable(value) or isinstance(value, type):
        return False
    try:
        returned = inspect.signature(value).return_annotation
    except (TypeError, ValueError):
        return False
    if returned is inspect.Signature.empty:
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        return inspect.isfunction(value) and file is not None and not any(map(Path(file).is_relative_to, installed))
    if isinstance(returned, str):  # from __future__ import annotations
        return returned.rpartition(".")[2] == Run.__name__
    return isinstance(returned, type) and issubclass(returned, Run)
