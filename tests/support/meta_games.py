"""Games whose networks are made on the meta device, and files of weights for them."""

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam

from gan import GanModule, Phase, Player
from tests.support.hard_games import mlp

adam = partial(Adam, lr=1e-2, betas=(0.5, 0.9))


class Shifted(nn.Module):
    """A parameter and buffers of its own, one of them not saved, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(6))
        self.register_buffer("scale", torch.empty(6), persistent=False)
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))
        self.inner = nn.Linear(6, 6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.shift, std=0.1)
        self.scale = 1 + torch.arange(6.0) / 6
        self.calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x * self.scale.to(x.dtype) + self.shift))


class Judge(nn.Module):
    """Attention, whose making reaches into a layer of its own; a layer with two names; a batch norm; an RNN."""

    def __init__(self) -> None:
        super().__init__()
        self.shifted, self.norm = Shifted(), nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.first, self.again = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight
        self.rnn, self.head = nn.GRU(6, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, self.norm(self.shifted(x)), torch.tanh(self.first(x))], 1)
        tokens, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(self.rnn(self.again(tokens))[1][0])


class OnMeta(GanModule):
    """All of its networks are made on the meta device: two learners, an average and a frozen teacher."""

    device_of_networks = "meta"
    of_generator: dict[str, Any] = {}  # noqa: RUF012
    of_teacher: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device(self.device_of_networks):
            self.generator, self.judge, self.teacher = mlp(4, 6), self.make_judge(), mlp(6, 1)
        self.slow = copy.deepcopy(self.generator)

    def make_judge(self) -> nn.Module:
        return Judge()

    def configure_players(self) -> Iterator[Player]:
        yield Player("generator", self.generator, adam, ema=0.8, clip=0.5, **self.of_generator)
        yield Player("judge", self.judge, adam)
        yield Player("slow", self.slow, follows="generator", ema=0.9)
        yield Player("teacher", self.teacher, **self.of_teacher)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("judge", self.judging, "judge")
        yield Phase("fool", self.fooling, "generator")

    def judging(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        fake, slow = self.generator(batch["x"][:, :4]), self.slow(batch["x"][:, :4])
        scores = self.judge(torch.cat([fake.detach(), slow.detach(), batch["x"]])).chunk(3)
        return {
            "fake": softplus(scores[0]).mean(),
            "slow": softplus(scores[1]).mean(),
            "real": softplus(-scores[2]).mean(),
        }

    def fooling(self, batch: dict[str, Tensor]) -> Tensor:
        fake = self.generator(batch["x"][:, :4])
        return (softplus(-self.judge(torch.cat([fake, batch["x"]])).chunk(2)[0]) + self.teacher(fake).square()).mean()


class Vectors(OnMeta):
    """The same with a judge of two layers."""

    def make_judge(self) -> nn.Module:
        return mlp(6, 1)


def weights_of(network: nn.Module, seed: int = 5) -> dict[str, Tensor]:
    """Values for a network's whole state, in float64. A weight with two names is there under the first of them."""
    generator = torch.Generator().manual_seed(seed)
    found, seen = {}, set()
    for name, value in network.state_dict(keep_vars=True).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.is_floating_point():
            found[name] = torch.randn(value.shape, generator=generator, dtype=torch.float64) / 2
        else:
            found[name] = torch.zeros(value.shape, dtype=value.dtype)
    return found


def write_file(path: Path, weights: dict[str, Tensor]) -> Path:
    save_file({name: value.contiguous().clone() for name, value in weights.items()}, path, {"format": "pt"})
    return path


def write_index(folder: Path, weights: dict[str, Tensor], files: int = 2) -> Path:
    """Several safetensors files and their index, as the hubs ship them. Returns the folder."""
    folder.mkdir(exist_ok=True)
    names = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
    where = {name: names[number % files] for number, name in enumerate(weights)}
    for file in names:
        write_file(folder / file, {name: value for name, value in weights.items() if where[name] == file})
    size = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
