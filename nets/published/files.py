"""Published weights of networks that have the published names: read and written as they are.

A family hangs on here by one method of its game, `published()`. It says which files the published code writes, and
which network is where in them:

    [PublishedFile("latest_net_G.pth", {"": self.generator}, "*_net_G.pth"), ...]         a bare state dict
    [PublishedFile("do_00000000", {"mpd": self.mpd, "msd": self.msd}, "do_*"), ...]    two networks in one file

Then a run calls `read_published(path, game.published())` for its `--from PATH`, and `gan.export --published` writes the
files. No code in a file is run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gan.files.disk import load_plain, regular
from gan.files.errors import UserError, reason

State = Mapping[str, Tensor]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
ADVICE = "type the networks' settings as they were in its training"


@dataclass(frozen=True)
class PublishedFile:
    """A file's name, the networks in it by their keys ("" where the file is one state dict), and other names of it."""

    name: str
    networks: Mapping[str, nn.Module]
    pattern: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)  # what the published code also expects in the file
    text: str = ""  # of a file without networks

    def lies_in(self, folder: Path) -> Path | None:
        """The file in a folder; of several with other names that of the largest number."""
        if (folder / self.name).exists():
            return folder / self.name
        found = folder.glob(self.pattern) if self.pattern else []
        return max(found, key=lambda file: [int(each) for each in re.findall(r"\d+", file.name)], default=None)

    def write(self, path: Path) -> None:
        if self.text:
            path.write_text(self.text, "utf-8")
            return
        content: dict[str, Any] = dict(self.others)
        for key, network in self.networks.items():
            state = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
            content |= {key: state} if key else state
        torch.save(content, path)


def read_published(path: str | Path, files: Sequence[PublishedFile]) -> list[str]:
    """Load the weights of a published file, or of all that lie in a folder. Returns the names of those that were read.

    A single file may have any name: the first of the `files` whose networks it fits is taken.
    """
    path, files = Path(path).expanduser(), [each for each in files if each.networks]
    if path.is_dir():
        found = [(each, file) for each in files if (file := each.lies_in(path)) is not None]
        if not found:
            raise UserError(f"{path} has none of {', '.join(each.name for each in files)}; give the folder of one")
        for each, file in found:
            _load(file, _content(file), each)
        return [file.name for _, file in found]
    content = _content(path)
    by_name = [each for each in files if path.name == each.name or (each.pattern and path.match(each.pattern))]
    fitting = [each for each in files if all(_fits(content, *one) for one in each.networks.items())]
    _load(path, content, (fitting or by_name or list(files))[0])
    return [path.name]


def _content(path: Path) -> Mapping[str, Any]:
    try:
        regular(path)
        content = load_plain(path)
    except (OSError, UserError) as error:
        raise UserError(f"{path} cannot be read as published weights: {reason(error)}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds no published weights, but a {type(content).__name__}")
    return content


def _state(content: Mapping[str, Any], key: str, network: nn.Module) -> dict[str, Any]:
    """The state dict at a key, without DataParallel's prefix, and without statistics that the network has not.

    Files from before 2018 have them for instance norms.
    """
    found: Any = content.get(key, {}) if key else content
    found = {name.removeprefix("module."): value for name, value in found.items() if isinstance(value, Tensor)}
    own = network.state_dict()
    return {name: value for name, value in found.items() if name in own or not name.endswith(STATISTICS)}


def _fits(content: Mapping[str, Any], key: str, network: nn.Module) -> bool:
    state, own = _state(content, key, network), network.state_dict()
    return {name: value.shape for name, value in state.items()} == {name: value.shape for name, value in own.items()}


def _load(path: Path, content: Mapping[str, Any], file: PublishedFile) -> None:
    for key, network in file.networks.items():
        state, own = _state(content, key, network), network.state_dict()
        if wrong := sorted(own.keys() ^ state.keys()):
            where = "only there" if wrong[0] in state else "only here"
            raise UserError(f"{path} has other networks than this run makes: {wrong[0]} is {where}; {ADVICE}")
        for name, value in state.items():
            if value.shape != own[name].shape:
                shapes = f"{list(value.shape)} there and {list(own[name].shape)} here"
                raise UserError(f"{path} has networks of another size: {name} is {shapes}; {ADVICE}")
        network.load_state_dict(state)
