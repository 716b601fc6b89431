"""Networks that are made on the meta device, share by share."""

from typing import Any

import torch.distributed as dist

from gan.noise import seed_for
from tests.support.meta_games import OnMeta, Vectors
from tests.support.scene import SMALL, Mutant, Refused, Scene, having


def seed_by_rank(*parts: Any) -> int:
    """Each rank makes its shares from a seed of its own."""
    return seed_for(dist.get_rank() if dist.is_initialized() else 0, *parts)


FIVE = ("zero3", "fsdp", "ddp", "zero1", "zero2")
FOUR = ("zero3+offload", "zero3+hybrid:2", "zero3+whole", "fsdp+offload", "fsdp+hybrid:2")
UNSAVED = having(Vectors, of_teacher={"saved": False})
TWO = (*FIVE, "deepspeed2", "deepspeed3", "generator=zero3,judge=fsdp,*=ddp")

META = {
    "networks on meta": Scene(
        OnMeta, bucket=SMALL, policies={**dict.fromkeys(TWO, 2), **dict.fromkeys(FOUR, 4)}, four=FIVE,
        often=("zero3",), checked=FOUR,
        mutants=(Mutant("seeds by rank", "zero3", replaced={"gan.making.seed_for": seed_by_rank}),),
        saved=("zero3",), arrives=(("single", 1), ("fsdp", 2)),
        refused=tuple(
            Refused(
                UNSAVED, policy, "player 'teacher': '0.weight' is on torch.device('meta'), and with saved=False the g",
                check=False,
            )
            for policy in ("zero3", "single")
        ),
    )
}  # fmt: skip
