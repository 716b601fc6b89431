"""The policies, one in each file. A policy decides how one player is trained on the devices."""

from strategies.policies.ddp import Ddp
from strategies.policies.deepspeed import DeepSpeed1, DeepSpeed2, DeepSpeed3
from strategies.policies.dp import Dp
from strategies.policies.fsdp import Fsdp
from strategies.policies.pipeline import Pipeline
from strategies.policies.policy import Policy
from strategies.policies.zero1 import Zero1
from strategies.policies.zero2 import Zero2
from strategies.policies.zero3 import Zero3

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Policy, Ddp, Zero1, Zero2, Zero3, Fsdp, Pipeline, DeepSpeed1, DeepSpeed2, DeepSpeed3, Dp)
}
POLICIES["deepspeed"] = DeepSpeed2
