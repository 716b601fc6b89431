"""How the players of a game live on devices: a Lightning strategy and one policy a file."""

from strategies.base import PhaseStrategy
from strategies.policy import Policy

__all__ = ["PhaseStrategy", "Policy"]
