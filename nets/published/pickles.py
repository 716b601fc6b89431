"""Published pickles of StyleGAN2-ADA, StyleGAN3 (its stylegan2 networks) and R3GAN: read without running code, written.

[Note: a pickle that runs nothing]
A pickle names functions and classes, and says what to call with what. Published files name few, and those are in one
table here, each with a stand-in that only keeps values. A file that names anything else is refused. Tensors are pickles
inside the pickle: torch reads those with weights_only. The source code inside of the files is never looked at.

In a file that we write, each network has the published arguments, its weights by their names, and a few lines of our
own source in place of the published one: they make the network from its arguments and load the weights.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gan.files.disk import regular
from gan.files.errors import NOT_SO, UserError, reason

DEPTH = 64  # of modules inside of modules; published networks have seven
PERSISTENT = "torch_utils.persistence._reconstruct_persistent_obj"


@dataclass(frozen=True)
class Network:
    """A network of a file: its class, what it was made with (if the file says so), and its weights by their names."""

    kind: str
    settings: dict[str, Any]
    weights: dict[str, Tensor]


def read(path: Path) -> dict[str, Network]:
    """The networks of a published file by their names there: "G", "D" and "G_ema", or some of them."""
    try:
        regular(path)
        data = path.read_bytes()
        _check_opcodes(data)
        saved = _Reader(io.BytesIO(data)).load()
        if not isinstance(saved, dict):
            raise UserError(f"it holds no networks by name, but {type(saved).__name__}")
        found = {
            name: _network(node) for name, node in saved.items() if isinstance(node, Node) and name != "augment_pipe"
        }
        if not found:
            raise UserError("it holds no network")
        return found
    except OSError as error:
        raise UserError(
            f"cannot read '{path}': {error.strerror or reason(error)}; give a published file, or a run"
        ) from error
    except (*NOT_SO, pickle.UnpicklingError, EOFError, MemoryError, RecursionError, AssertionError) as error:
        why = reason(error).rstrip(".") if isinstance(error, UserError) else "it is damaged, or something else"
        raise UserError(f"'{path}' is no file of published networks that can be used: {why}") from error


class Node:
    """Stands in for an object of any class: it keeps the state, and runs nothing."""

    kind = ""
    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> "Node":
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _persistent(meta: dict[str, Any]) -> Node:
    node = Node()
    node.kind, node.state = str(meta["class_name"]), meta["state"]
    return node


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    if not isinstance(storage, torch.storage.TypedStorage):
        raise UserError("a tensor in it has no numbers")
    flat = torch.tensor([], dtype=storage.dtype).set_(storage._untyped_storage)
    with suppress(RuntimeError):  # as_strided stays inside of the storage
        if (made := flat.as_strided(size, stride, offset)).numel() <= len(flat):
            return made
    raise UserError("a tensor in it is larger than its numbers")


class _Kind:
    """Stands in for a numpy dtype, of numbers alone."""

    def __init__(self, name: str, *_: Any) -> None:
        if not re.fullmatch(r"[<>|=]?[fiub][1248]", name):
            raise UserError(f"it holds numpy values of kind '{name}'")
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


# Modules whose classes are only kept: their names and their states.
KEPT = re.compile(r"R3GAN\.\w+|training\.networks|torch\.nn\.modules\.(container|conv|linear)")
ALLOWED: dict[str, Any] = {
    PERSISTENT: _persistent,
    "collections.OrderedDict": dict,
    "dnnlib.util.EasyDict": dict,
    "builtins.set": set,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": lambda data: torch.load(io.BytesIO(data), "cpu", weights_only=True),
    **dict.fromkeys(
        ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
        lambda kind, data: np.frombuffer(data, kind.name)[0].item(),
    ),
    "numpy.dtype": _Kind,
    **{f"torch.{name}": name for name in ("float16", "bfloat16", "float32", "float64")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """See [Note: a pickle that runs nothing]."""
        if KEPT.fullmatch(module) and name.isidentifier():
            return type(name, (Node,), {"kind": name})
        if f"{module}.{name}" not in ALLOWED:
            raise UserError(f"it would use {module}.{name}, which published networks do not need")
        return ALLOWED[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        raise UserError("its tensors are in another file")


def _check_opcodes(data: bytes) -> None:
    """Refuse what would take memory by its numbers alone: Python's reader believes the number of a memo."""
    written = 0
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            written += 1
            if int(argument or 0) > written:
                raise UserError("it counts wrongly")


def _network(node: Node) -> Network:
    weights: dict[str, Tensor] = {}

    def walk(module: Any, prefix: str, depth: int) -> None:
        if not isinstance(module, Node) or depth > DEPTH:
            raise UserError(f"'{prefix.rstrip('.')}' in it is no module")
        for kind in ("_parameters", "_buffers"):
            for name, value in module.state[kind].items():
                if isinstance(value, Tensor):
                    weights[prefix + name] = value.detach()
                elif value is not None:
                    raise UserError(f"'{prefix}{name}' in it is no tensor")
        for name, child in module.state["_modules"].items():
            if child is not None:
                walk(child, f"{prefix}{name}.", depth + 1)

    walk(node, "", 0)
    return Network(node.kind, dict(node.state.get("_init_kwargs", {})), weights)


SOURCE = """# Written by Coordinated GANs: the published network is made from its arguments, and takes the weights.
try:
    from training import networks_stylegan2 as networks
except ImportError:
    from training import networks


class Loaded:
    def __setstate__(self, state):
        arguments = dict(state["_init_kwargs"])
        if networks.__name__.endswith("stylegan2"):
            arguments.update(arguments.pop("synthesis_kwargs", {}))
        self.__init__(*state["_init_args"], **arguments)
        self.load_state_dict(state["_parameters"])
        self.eval().requires_grad_(False)


class Generator(Loaded, networks.Generator):
    pass


class Discriminator(Loaded, networks.Discriminator):
    pass
"""


def write(path: Path, networks: Mapping[str, Network]) -> None:
    """Write a file that the published code loads. It asks for "G", "D" and "G_ema"."""

    def body(value: Any) -> bytes:
        return pickle.dumps(value, 3)[2:-1]  # without the head and the stop

    module, _, function = PERSISTENT.rpartition(".")
    with path.open("wb") as file:
        file.write(b"\x80\x03}")
        for name, network in networks.items():
            state = {"_init_args": (), "_init_kwargs": network.settings, "_buffers": {}, "_modules": {}}
            state["_parameters"] = {key: value.cpu().clone() for key, value in network.weights.items()}
            meta = dict(type="class", version=6, module_src=SOURCE, class_name=network.kind, state=state)
            # The name of a function that is not here, called with what follows it.
            file.write(body(name) + f"c{module}\n{function}\n".encode() + body(meta) + b"\x85Rs")
        file.write(b".")
