"""Finds values that a checkpoint must not hold, because loading them would run code."""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gan.checkpoint import Key
from gan.errors import UserError

# Where in a checkpoint a value stands says who put it there, and so what to type.
ADVICE = {
    "hyper_parameters": "type self.save_hyperparameters(ignore=['{last}']), or save plain values",
    "datamodule_hyper_parameters": "type self.save_hyperparameters(ignore=['{last}']), or save plain values",
    "callbacks": "let the callback's state_dict() return plain values",
    "state_dict": "let the module's get_extra_state() return plain values",
}
PLAIN = "numbers, text, lists, dicts, tensors; str(path) for a path"


def check_loadable(values: Any) -> None:
    """Raise before training what a checkpoint would raise after hours."""
    if not _loads(values):
        raise unloadable(values)


def unloadable(values: Any) -> UserError:
    """The error for values that cannot be saved, or not be loaded again, without running code. It names the first."""
    key, value = next(_found(values, ()))
    kind = type(value)
    kind = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    advice = ADVICE.get(str(key[0]) if key else "", "save plain values").format(last=key[-1] if key else "")
    return UserError(
        f"'{'/'.join(map(str, key))}' is a {kind}, which could not be loaded again without running code; {advice} "
        f"({PLAIN}), or allow a class of your own by torch.serialization.add_safe_globals"
    )


def _found(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """The values that cannot be loaded, innermost first, with their places."""
    if _loads(value):
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) in (list, tuple) else ()
    for name, item in items:
        yield from _found(item, (*key, name))
    yield key, value


def _loads(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - a value may fail in any way while it is pickled
        return False
    return True
