"""Values of a checkpoint as JSON, in a file that has a checksum of itself.

Numbers, text, None, lists, and dicts with names are in it as they are. Every other kind is a dict of one item, such as
{"$tuple": [1, 2]}. Tensors are elsewhere. So reading runs no code: what can be read is what this table has.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gan.files.errors import Damaged, UserError, explained, reading
from gan.files.tensors import crc32

VALUES = "values.json"
Key = tuple[str | int, ...]  # the path of a value in a tree
SIMPLE = (bool, int, float, str, type(None))
DICTS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
LISTS = {kind.__name__: kind for kind in (tuple, torch.Size, set, frozenset)}
KINDS = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}

# How values of other kinds are written as simpler ones, and made of them.
OTHERS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    torch.device: (str, torch.device),
    torch.dtype: (lambda value: str(value).removeprefix("torch."), KINDS.__getitem__),
}
# Numbers of NumPy, as a schedule by hand leaves them in an optimizer's groups.
NUMBERS = (np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
OTHERS |= {kind: (lambda value: value.item(), kind) for kind in (*NUMBERS, np.float16, np.float32, np.float64)}
MADE = {kind.__name__: make for kind, (_, make) in OTHERS.items()}
COMPLEX = "view_as_complex"  # a tensor of complex numbers, as one of twice as many real ones

# Where in a checkpoint a value stands says who put it there, and so what to type.
ADVICE = {
    "hyper_parameters": "type self.save_hyperparameters(ignore=['{last}']), or save plain values",
    "datamodule_hyper_parameters": "type self.save_hyperparameters(ignore=['{last}']), or save plain values",
    "callbacks": "let the callback's state_dict() return plain values",
    "state_dict": "let the module's get_extra_state() return plain values",
}
PLAIN = "numbers, text, lists, dicts, tensors; str(path) for a path"


def encode(value: Any, other: Callable[[Key, Any], Any], key: Key = ()) -> Any:
    """A value as JSON has it. `other` gives what stands for one of another kind, or None: then it cannot be saved."""
    kind = type(value)
    if kind in SIMPLE:
        return value
    if kind is list:
        return [encode(each, other, (*key, number)) for number, each in enumerate(value)]
    if kind is dict and all(type(name) is str and not name.startswith("$") for name in value):
        return {name: encode(each, other, (*key, name)) for name, each in value.items()}
    if kind in DICTS.values():
        items = [[encode(name, other, key), encode(each, other, (*key, name))] for name, each in value.items()]
        return {f"${kind.__name__}": items}
    if kind in LISTS.values():
        return {f"${kind.__name__}": encode(list(value), other, key)}
    if kind in OTHERS:
        return {f"${kind.__name__}": OTHERS[kind][0](value)}
    if kind is Tensor and value.is_complex() and value.layout == torch.strided:
        return {f"${COMPLEX}": encode(torch.view_as_real(value.detach().resolve_conj()), other, key)}
    found = other(key, value)
    if found is None:
        raise _unsaveable(key, value)
    return found


def _unsaveable(key: Key, value: Any) -> UserError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    name = f"{name} of {value.dtype} ({value.layout})" if isinstance(value, Tensor) else name
    advice = ADVICE.get(str(key[0]) if key else "", "save plain values").format(last=key[-1] if key else "")
    return UserError(
        f"'{'/'.join(map(str, key))}' is a {name}, which could not be loaded again without running code; {advice} "
        f"({PLAIN})"
    )


def decode(node: Any, other: Callable[[str, Any], Any]) -> Any:
    """The value that `encode` has written. `other` makes a value of the kind, and of what was written, of others."""
    if isinstance(node, list):
        return [decode(each, other) for each in node]
    if not isinstance(node, dict):
        return node
    kind = next(iter(node), "")
    if not kind.startswith("$"):
        return {name: decode(each, other) for name, each in node.items()}
    (content,), kind = node.values(), kind[1:]
    if kind in DICTS:
        return DICTS[kind]({decode(name, other): decode(each, other) for name, each in content})
    if kind in LISTS:
        return LISTS[kind](decode(content, other))
    if kind == COMPLEX:
        return torch.view_as_complex(decode(content, other))
    return MADE[kind](content) if kind in MADE else other(kind, content)


def text_of(values: Any) -> bytes:
    # Python writes no integer of more than 4300 digits.
    with explained("the values cannot be written as JSON: {why}", ValueError):
        return json.dumps(values).encode()


def sealed(about: Mapping[str, Any], values: bytes) -> bytes:
    """The content of the file: what is said about the values, the text of them, and in front a checksum of all."""
    rest = json.dumps(about)[1:-1].encode() + b', "values": ' + values + b"}"
    return b'{"crc32": "' + crc32(rest).encode() + b'", ' + rest


def unsealed(content: bytes) -> dict[str, Any]:
    """What `sealed` was given, as JSON has it."""
    rest = content[len(b'{"crc32": "........", ') :]
    if content != b'{"crc32": "' + crc32(rest).encode() + b'", ' + rest:
        raise Damaged(f"{VALUES} is damaged: it is not what was written")
    with reading(VALUES, "it holds no values"):
        found = json.loads(content)
        files = {name: str(checksum) for name, checksum in dict(found["files"]).items()}
        return {"format": int(found["format"]), "files": files, "values": dict(found["values"])}
