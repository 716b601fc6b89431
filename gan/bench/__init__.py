"""`python -m gan.bench`."""

from typing import Any

ONLY_TRAINING: dict[str, Any] = {  # what a Trainer is told that only trains
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("limit_val_batches", "num_sanity_val_steps"), 0),
}
