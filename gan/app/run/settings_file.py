"""Reads a file of settings, such as a run's settings.yaml. A person may have edited it, or may have named another file.

Whatever the file is, reading takes little time and memory, runs no code, and no error shows what is in the file, except
names of settings and values that are wrong.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import jsonargparse
import yaml

from gan.files.disk import read_text
from gan.files.errors import UserError

MOST = 100_000  # bytes
DEEPEST = 20
LARGEST = 2**63
NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}")  # not a line of another file, which an error would show


class Loader(yaml.SafeLoader):
    """Plain YAML: no tags of Python, no aliases, no key twice, nothing nested deeply; a date is text.

    A few lines of aliases of aliases stand for more values than any memory holds.
    """

    yaml_implicit_resolvers: ClassVar = {
        first: [each for each in resolvers if not each[0].endswith("timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Build a value. Refuse an alias, and what is nested too deeply."""
        where = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(None, None, "an alias (*) is not read; write the value itself", where)
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.MarkedYAMLError(None, None, f"it is nested more than {DEEPEST} deep", where)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that is there twice: only one of the two values would count."""
        found = set()
        for key, _ in node.value:
            name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else key.value
            if name in found:
                raise yaml.MarkedYAMLError(None, None, "a name is there twice", key.start_mark)
            found.add(name)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Refuse numbers that no setting can have. They take long to read, and longer to print."""
        value = super().construct_yaml_int(node) if len(node.value) <= 100 else LARGEST
        if abs(value) >= LARGEST:
            raise yaml.MarkedYAMLError(None, None, "a number is too large", node.start_mark)
        return value


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


def read(path: Path) -> dict[str, Any]:
    """The settings in a file, by name. If there is a run among them, it is text."""
    try:
        found = yaml.load(read_text(path, MOST), Loader)
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


def _checked(text: str) -> Any:
    """As jsonargparse reads what is typed after an option, but within the limits of `Loader`."""
    yaml.compose(text, Loader)
    return _jsonargparse_reads(text)


_jsonargparse_reads = jsonargparse.get_loader("yaml")


def limit_typed_values() -> None:
    """Let jsonargparse read values, of the command line and of strings in files, within the limits of `Loader`."""
    jsonargparse.set_loader("yaml", _checked, (yaml.YAMLError,))
