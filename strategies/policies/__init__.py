"""The policies, one in each file. A policy decides how one player is trained on the devices."""

from collections import UserDict
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.policies.policy import Policy


class Policies(UserDict[str, "type[Policy]"]):
    """The policies by the names that are typed. The file of a policy is imported when the policy is asked for."""

    data: dict[str, Any]  # the class, or where it is: FILE.CLASS

    def __getitem__(self, name: str) -> "type[Policy]":
        found = self.data[name]
        if isinstance(found, str):
            file, _, kind = found.partition(".")
            found = self.data[name] = getattr(import_module(f"strategies.policies.{file}"), kind)
        return found


POLICIES = Policies()
POLICIES.data |= {
    "single": "policy.Policy",
    "ddp": "ddp.Ddp",
    "zero1": "zero1.Zero1",
    "zero2": "zero2.Zero2",
    "zero3": "zero3.Zero3",
    "fsdp": "fsdp.Fsdp",
    "pipeline": "pipeline.Pipeline",
    "deepspeed1": "deepspeed.DeepSpeed1",
    "deepspeed2": "deepspeed.DeepSpeed2",
    "deepspeed3": "deepspeed.DeepSpeed3",
    "dp": "ddp.Dp",
    "deepspeed": "deepspeed.DeepSpeed2",
}
ALIASES = {"deepspeed": "deepspeed2"}
