"""Reads a file of settings, such as a run's settings.yaml. A person may have edited it, or may have named another file.

Whatever the file is, reading takes little time and memory, runs no code, and no error shows what is in the file, except
names of settings and values that are wrong.
"""

import re
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

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
