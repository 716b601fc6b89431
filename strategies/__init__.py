"""How the players of a game live on devices: a Lightning strategy and one policy a file."""

from strategies.accelerator import TorchAccelerator
from strategies.policies.policy import Policy
from strategies.strategy import PhaseStrategy

__all__ = ["PhaseStrategy", "Policy", "TorchAccelerator"]
