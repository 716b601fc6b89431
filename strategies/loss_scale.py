"""The loss scale of one player, for 16-mixed.

By hand, because torch's GradScaler belongs to one backward, and here one backward can serve several players,
each with a scale of its own; the search for non-finite gradients is the guard's, which every precision needs.
"""

from dataclasses import asdict, dataclass


@dataclass
class LossScale:
    """Doubles after so many good updates in a row, halves after a bad one: the constants of GradScaler."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    good: int = 0

    def update(self, finite: bool) -> None:
        """Learn from one update whether the scale was too large."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Everything there is."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over a saved scale."""
        self.__dict__.update(state)
