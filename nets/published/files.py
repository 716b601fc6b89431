"""Published weights: files of the published code, read into our networks and written from them.

A family hangs on here by one method of its game, `published()`. It says which files the published code writes, and
what the names of each network's weights begin with there. What lies in a part of the file has a slash before it:

    PublishedFile("latest_net_G.pth", {"": self.generator}, "*_net_G.pth")              a bare state dict
    PublishedFile("do_00000000", {"mpd/": self.mpd, "msd/": self.msd}, "do_*")       two networks in one file

Then a run has `--from PATH` (gan.runs.run.begin_with), and `gan.export --published` writes the files. No code in a
file is run.

[Note: published names]
Our modules have the published names, so a state dict fits as it is, with two exceptions. Computed weights have torch's
older names (ENDS). And a module whose weights are others than the published ones has the methods `published_state` and
`take_published`.
"""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gan.files.disk import load_plain, regular
from gan.files.errors import UserError, explained
from nets.published.pickles import Node

State = Mapping[str, Tensor]
# What may lie beside a network's weights: other parts of a file, losses of a training, and statistics of instance
# norms, which files from before 2018 have; in SEAN's file of the generator, the encoder.
BESIDE = re.compile(r".*/|loss\.|Zencoder\.|.*(running_mean|running_var|num_batches_tracked)$")
ENDS = {
    "parametrizations.weight.original0": "weight_g",
    "parametrizations.weight.original1": "weight_v",
    "parametrizations.weight.original": "weight_orig",
    "parametrizations.weight.0._u": "weight_u",
    "parametrizations.weight.0._v": "weight_v",
}


@dataclass(frozen=True)
class PublishedFile:
    """A file's name, the networks in it by what their names begin with, and other names that the file may have."""

    name: str
    networks: Mapping[str, nn.Module]
    pattern: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)  # what the published code also expects in the file
    within: str = ""  # the part of the file that has all of it
    save: Callable[[Any, Path], None] = torch.save  # of what is in it
    unlike: str = ""  # why the published code cannot load it, though a training here can begin with it

    def checked(self) -> "PublishedFile":
        """This file, if the published code can load it."""
        if self.unlike:
            raise UserError(self.unlike)
        return self

    def lies_in(self, folder: Path) -> Path | None:
        """The file in a folder; of several with other names that of the largest number."""
        if (folder / self.name).exists():
            return folder / self.name
        found = folder.glob(self.pattern) if self.pattern else []
        return max(found, key=lambda file: [int(each) for each in re.findall(r"\d+", file.name)], default=None)

    def content(self) -> dict[str, Any]:
        """What is in the file, in memory of its own."""
        content: dict[str, Any] = dict(self.others)
        for start, network in self.networks.items():
            part, _, prefix = start.rpartition("/")
            own = published_state(network).items()
            state = {f"{prefix}{name}": value.clone(memory_format=torch.contiguous_format) for name, value in own}
            content |= {part: state} if part else state
        return {self.within: content} if self.within else content

    def write(self, path: Path) -> None:
        self.save(tree_map_only(Tensor, Tensor.cpu, self.content()), path)


def latest_nets(networks: Mapping[str, nn.Module], **patterns: str) -> list[PublishedFile]:
    """The files of pix2pix, CycleGAN and CUT, by the names of their networks."""
    known = {name: f"*_net_{name}.pth" for name in networks} | patterns
    return [PublishedFile(f"latest_net_{name}.pth", {"": each}, known[name]) for name, each in networks.items()]


def published_name(name: str) -> str:
    return next((name.removesuffix(end) + theirs for end, theirs in ENDS.items() if name.endswith(end)), name)


def published_state(network: nn.Module) -> dict[str, Tensor]:
    """A network's weights by their published names. See [Note: published names]."""
    state = {published_name(name): value for name, value in network.state_dict().items()}
    for start, module in _of_another_form(network):
        state = {name: value for name, value in state.items() if not name.startswith(start)}
        state |= {f"{start}{name}": value for name, value in module.published_state().items()}
    return {name: value.detach() for name, value in state.items()}


def take_published(network: nn.Module, state: State) -> None:
    own, theirs = network.state_dict(), published_state(network)
    names = {name: published_name(name) for name in own}
    network.load_state_dict({name: state[names[name]] if names[name] in theirs else own[name] for name in own})
    for start, module in _of_another_form(network):
        module.take_published({name.removeprefix(start): state[name] for name in state if name.startswith(start)})


def _of_another_form(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules whose weights are not the published ones, with what their names begin with."""
    for name, module in network.named_modules():
        if hasattr(module, "take_published"):
            yield f"{name}." if name else "", module


def read_published(path: str | Path, files: Sequence[PublishedFile]) -> list[str]:
    """Load the weights of a published file, or of all that lie in a folder. Returns the names of those that were read.

    A single file may have any name: the first of the `files` whose networks it fits is taken. Of a file with several
    networks all but the first may be missing; these stay as they are.
    """
    path, files = Path(path).expanduser(), [each for each in files if each.networks]
    if path.is_dir():
        found = [(each, file) for each in files if (file := each.lies_in(path)) is not None]
        if not found:
            raise UserError(f"{path} has none of {', '.join(each.name for each in files)}; give the folder of one")
        for each, file in found:
            _load(file, weights_in(file), each)
        return [file.name for _, file in found]
    weights = weights_in(path)
    by_name = [each for each in files if path.name == each.name or (each.pattern and path.match(each.pattern))]
    fitting = [each for each in files if not any(_wrong(weights, *one) for one in each.networks.items())]
    _load(path, weights, (fitting or by_name or list(files))[0])
    return [path.name]


def weights_in(path: Path) -> dict[str, Tensor]:
    """The weights in a file by their names there, without DataParallel's prefix; a part's name and a slash come first.

    A checkpoint of Lightning has them in `state_dict`, which is not said.
    """
    # torch raises many kinds of errors for broken files.
    with explained(f"{path} cannot be read as published weights: {{why}}", Exception, UserError):
        regular(path)
        zipped = zipfile.is_zipfile(path)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path)) if zipped else []
        # Nodes stand in for whatever else a file names, such as Lightning's callbacks.
        stand_ins: list[Any] = [(type("Unknown", (Node,), {}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            content = load_plain(path)
    content = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds no published weights, but a {type(content).__name__}")
    parts = [("", content), *((f"{name}/", each) for name, each in content.items() if isinstance(each, Mapping))]
    return {
        start + str(name).removeprefix("module."): value
        for start, part in parts
        for name, value in part.items()
        if isinstance(value, Tensor)
    }


def _state(weights: State, start: str, network: nn.Module) -> dict[str, Tensor]:
    """The weights of a network, without what lies beside them."""
    own = published_state(network)
    found = {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
    return {name: value for name, value in found.items() if name in own or not BESIDE.match(name)}


def _wrong(weights: State, start: str, network: nn.Module) -> str:
    state, own = _state(weights, start, network), published_state(network)
    if names := sorted(own.keys() ^ state.keys()):
        return f"other networks than are made here: {names[0]} is only {'there' if names[0] in state else 'here'}"
    for name, value in state.items():
        if value.shape != own[name].shape:
            shapes = f"{list(value.shape)} there and {list(own[name].shape)} here"
            return f"networks of another size: {name} is {shapes}"
    return ""


def take_fitting(weights: State, networks: Mapping[str, nn.Module]) -> str:
    """Load weights into networks, of which all but the first may be missing. Returns why they do not fit."""
    for number, (start, network) in enumerate(networks.items()):
        if number and not _state(weights, start, network):
            continue
        if wrong := _wrong(weights, start, network):
            return wrong
        take_published(network, _state(weights, start, network))
    return ""


def _load(path: Path, weights: State, file: PublishedFile) -> None:
    if wrong := take_fitting(weights, file.networks):
        raise UserError(
            f"{path} has {wrong}; type the networks' settings, such as --width, as they were in its training, "
            f"on data of as many classes and channels: rates, losses, batch and augmentation may be others"
        )
