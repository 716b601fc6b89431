"""Networks that are made on the meta device, share by share."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gan.noise import seed_for
from tests.support.meta_games import OnMeta, Vectors
from tests.support.scene import SMALL, Mutant, Refused, Scene, having, made_of, nothing


def seed_by_rank(*parts: Any) -> int:
    """Each rank makes its shares from a seed of its own."""
    return seed_for(dist.get_rank() if dist.is_initialized() else 0, *parts)


class Unmade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.gain = nn.Parameter(torch.empty(6))

    def forward(self, x):
        return self.inner(x * self.gain)


def unmade() -> nn.Module:
    with torch.device("meta"):
        return Unmade()


FIVE = ("zero3", "fsdp", "ddp", "zero1", "zero2")
FOUR = ("zero3+offload", "zero3+hybrid:2", "zero3+whole", "fsdp+offload", "fsdp+hybrid:2")
TWO = (*FIVE, "deepspeed2", "deepspeed3", "generator=zero3,judge=fsdp,*=ddp")

META = {
    "networks on meta": Scene(
        OnMeta, bucket=SMALL, policies={**dict.fromkeys(TWO, 2), **dict.fromkeys(FOUR, 4)}, four=FIVE,
        often=("zero3",), checked=FOUR,
        mutants=tuple(
            Mutant(f"{name}, {policy}", policy, replaced=replaced, slow=(policy, name) != ("zero3", "seeds by rank"))
            for policy in ("zero3", "fsdp")
            for name, replaced in (
                ("seeds by rank", {"gan.making.seed_for": seed_by_rank}),
                ("never filled", {"strategies.checkpoint.first_weights.FirstWeights.fill_shards": nothing}),
            )
        ),
        saved=("zero3",), arrives=(("single", 1), ("fsdp", 2)),
        refused=tuple(
            Refused(game, policy, f"player 'teacher': {words}", check=False)
            for policy in ("single", "zero3")
            for game, words in (
                (
                    made_of(Vectors, teacher=unmade),
                    "'gain' is on torch.device('meta'), and its module (Unmade) has no reset_param",
                ),
                (
                    having(Vectors, of_teacher={"saved": False}),
                    "'0.weight' is on torch.device('meta'), and with saved=False the game's co",
                ),
            )
        ),
    )
}  # fmt: skip
