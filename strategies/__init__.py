"""How the players of a game live on devices: a Lightning strategy and one policy a file."""

from typing import TYPE_CHECKING

from gan.files.loading import by_name

if TYPE_CHECKING:
    from strategies.accelerator import TorchAccelerator
    from strategies.policies.policy import Policy
    from strategies.strategy import PhaseStrategy

__all__ = ["PhaseStrategy", "Policy", "TorchAccelerator"]
__getattr__ = by_name(
    __name__,
    {
        "strategies.accelerator": "TorchAccelerator",
        "strategies.policies.policy": "Policy",
        "strategies.strategy": "PhaseStrategy",
    },
)
