"""Networks that are made on the meta device, share by share."""

from typing import Any

import torch.distributed as dist

from gan.noise import seed_for
from tests.support.meta_games import OnMeta
from tests.support.scene import SMALL, Mutant, Scene, nothing


def seed_by_rank(*parts: Any) -> int:
    """Each rank makes its shares from a seed of its own."""
    return seed_for(dist.get_rank() if dist.is_initialized() else 0, *parts)


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
                ("never filled", {"strategies.first_weights.FirstWeights.fill_shards": nothing}),
            )
        ),
    )
}  # fmt: skip
