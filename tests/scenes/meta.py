"""Networks that are made on the meta device, share by share."""

from tests.support.meta_games import OnMeta, Vectors
from tests.support.scene import SMALL, Refused, Scene, having

FIVE = ("zero3", "fsdp", "ddp", "zero1", "zero2")
FOUR = ("zero3+offload", "zero3+hybrid:2", "zero3+whole", "fsdp+offload", "fsdp+hybrid:2")
UNSAVED = having(Vectors, of_teacher={"saved": False})
TWO = (*FIVE, "deepspeed2", "deepspeed3", "generator=zero3,judge=fsdp,*=ddp")

META = {
    "networks_on_meta": Scene(
        OnMeta, bucket=SMALL, policies={**dict.fromkeys(TWO, 2), **dict.fromkeys(FOUR, 4)}, four=FIVE,
        often=("zero3",), checked=FOUR,
        saved=("zero3",), arrives=(("single", 1), ("fsdp", 2)),
        refused=(
            Refused(
                UNSAVED, "zero3 single", "player 'teacher': '0.weight' is on torch.device('meta'), and with saved=",
                check=False,
            ),
        ),
    )
}  # fmt: skip
