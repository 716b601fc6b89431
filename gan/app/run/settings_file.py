"""Reads and writes a file of settings, such as a run's settings.yaml. A person may have edited it, or named another.

Whatever the file is, reading takes little time and memory, runs no code, and no error shows what is in the file, except
names of settings and values that are wrong.
"""

import re
from enum import Enum
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from jsonargparse import Namespace

from gan.files.disk import read_text
from gan.files.errors import UserError

MOST = 100_000  # bytes
DEEPEST = 20
LONGEST = 1024  # characters of a value
NAME = re.compile(r"[A-Za-z_][\w-]{0,99}")  # not a line of another file, which an error would show


def read(path: Path) -> dict[str, Any]:
    """The settings in a file, by name. If there is a run among them, it is text."""
    try:
        text = read_text(path, MOST)
        _check_size(text)
        found = yaml.safe_load(text)
    except OSError as error:
        raise _unread(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _unread(path, "it is no text in UTF-8") from error
    except yaml.reader.ReaderError as error:
        raise _unread(path, "it has characters that no text has") from error
    except yaml.MarkedYAMLError as error:
        # Others show names that are in the file.
        ours = type(error) in (yaml.MarkedYAMLError, yaml.scanner.ScannerError)
        mark = error.problem_mark or error.context_mark
        where = f"in line {mark.line + 1}, " if mark else ""
        raise _unread(path, where + (str(error.problem) if ours else "it is no YAML of plain values")) from error
    except (ValueError, TypeError, OverflowError) as error:  # such as a date that is none, or a list as a key
        raise _unread(path, "it has a value that cannot be read") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) and NAME.fullmatch(name) for name in found):
        raise _unread(path, "it does not consist of lines such as batch_size: 16")
    if "config" in found:
        raise UserError(f"'{path}' names another file of settings (config); type --config for each of the two")
    if "run" in found and not (isinstance(found["run"], str) and found["run"]):
        raise _unread(path, "its run is no text; see --list-runs, or FILE.py:FUNCTION")
    return {name.replace("-", "_"): value for name, value in found.items()}  # as an option may be typed


def _unread(path: Path, why: str) -> UserError:
    return UserError(f"cannot read settings from '{path}': {why}")


def _check_size(text: str) -> None:
    """Refuse YAML that stands for much more than is written: aliases of aliases, deep nesting, digits of base 60."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        why = ""
        if isinstance(event, yaml.AliasEvent):
            why = "an alias (*) is not read; write the value itself"
        elif depth > DEEPEST:
            why = f"it is nested more than {DEEPEST} deep"
        elif getattr(event, "tag", None) is not None:
            why = "a tag (!) is not read; write the value itself"
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST:
            why = f"a value has more than {LONGEST:,} characters"
        if why:
            raise yaml.MarkedYAMLError(None, None, why, event.start_mark)


def limit_typed_values() -> None:
    """Let jsonargparse read values, of the command line and of strings in files, within the same limits."""
    reads = jsonargparse.get_loader("yaml")

    def checked(text: str) -> Any:
        _check_size(text)
        return reads(text)

    jsonargparse.set_loader("yaml", checked, (yaml.YAMLError,))


# ---- writing ----

PASSING = ("resume", "dry_run", "list_runs", "debug", "new_data", "config", "rendezvous", "slurm", "submit", "note")


class _Dumper(yaml.SafeDumper):
    """Writes a value that is there twice twice. Aliases are not read, see `read`."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(settings: Namespace, run: str) -> str:
    """All settings as YAML, without those that belong to a single call of the command."""
    kept = {name: written(name, value) for name, value in settings.as_dict().items() if name not in PASSING}
    try:
        text = yaml.dump({**kept, "run": run}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        if text.replace("\n", "").isprintable():
            return text
        return yaml.dump({**kept, "run": run}, Dumper=_Dumper, sort_keys=False)  # what is not printable as escapes
    except yaml.YAMLError as error:
        raise UserError(f"{run} has a setting that cannot be written to settings.yaml: {error.args[-1]!r}") from error


def written(name: str, value: Any) -> Any:
    """The value as settings.yaml has it, from which it is read again by its type.

    The path of data, or of a file to begin from, is written from the root: so the run can be opened from any folder.
    """
    if isinstance(value, Enum):
        return value.name
    typed = name in ("data", "from_", "mels", "config_") and isinstance(value, str) and value
    if (typed or isinstance(value, Path)) and Path(value).exists():
        return str(Path(value).absolute())
    return str(value) if isinstance(value, Path | str) else plain(value)


def plain(value: Any) -> Any:
    """The value as a plain Python number. YAML does not know jsonargparse's types, such as PositiveInt."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value
