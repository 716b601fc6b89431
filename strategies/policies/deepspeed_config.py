"""A DeepSpeed engine's configuration: our settings, and those of the user's file that do not change the training."""

import json
from collections.abc import Mapping
from typing import Any

from gan.files.disk import read_text
from gan.files.errors import UserError
from gan.phase import Player

SIZE = 6 * 2**20  # elements: 25 MB in float32, as for DDP's buckets

# What a file may set: how the same numbers are moved, and what is printed. (Prints do not appear: see `package`.)
TAKEN = {"comms_logger", "dump_state", "memory_breakdown", "steps_per_print", "wall_clock_breakdown"}
TAKEN_OF_ZERO = {  # numbers, true or false
    "allgather_bucket_size",
    "contiguous_gradients",
    "enable_sanity_checks",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
}


def read(text: str) -> str:
    """Check that the file can be read as JSON, and return its path."""
    _load(text)
    return text


def _load(path: str) -> dict[str, Any]:
    if not path:
        raise ValueError("name a file, as in config:ds.json")
    try:
        found = json.loads(read_text(path, 1_000_000))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read it: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("zero_optimization", {}), dict):
        raise ValueError("expected a JSON object, and one in zero_optimization")
    return found


def settings(player: Player, policy: str, stage: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's configuration. Refuses, in one error, all settings of the user's file that change the training."""
    path = options.get("config")
    file = {} if path is None else _load(path)
    zero = file.pop("zero_optimization", {})
    wrong = [name for name, value in file.items() if name not in TAKEN and value != "auto"]
    for name, value in zero.items():
        fits = name in TAKEN_OF_ZERO and isinstance(value, int | float) and value >= 0
        if not fits and value != "auto" and (name, value) != ("stage", stage):
            wrong.append(f"zero_optimization.{name}")
    if wrong:
        raise UserError(
            f"player '{player.name}': {policy}+config:{path} sets what it must not set; take out {', '.join(wrong)}, "
            f"because the game, the policy, --precision and --batch-size say how the player trains"
        )
    ours: dict[str, Any] = {
        "stage": stage,
        # The gradients are reduced in one bucket if they fit. DeepSpeed's default size would take 2 GB.
        "reduce_bucket_size": SIZE,
        "allgather_bucket_size": SIZE,
        "stage3_param_persistence_threshold": 0,  # a phase gathers everything anyway
        "memory_efficient_linear": False,  # it would replace a function of torch, for the whole process
    }
    if stage < 3 and "offload" not in options:
        ours["compute_grad_norm"] = False  # we have the norms already; in other cases DeepSpeed has no such setting
    if "offload" in options:
        ours["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,  # required, but only used for DeepSpeed's own counts
        "gradient_clipping": 0.0,  # the default is 1
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **{key: value for key, value in file.items() if value != "auto"},
        "zero_optimization": {**ours, **{key: value for key, value in zero.items() if value != "auto"}},
    }
