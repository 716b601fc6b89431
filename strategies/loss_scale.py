"""The loss scale of one player, for the precision 16-mixed.

It is written by hand, because torch's GradScaler belongs to one backward. Here one backward can serve several players,
each with a scale of its own. `turn.play` looks for gradients that are not finite, because every precision needs that.
"""

from dataclasses import asdict, dataclass


@dataclass
class LossScale:
    """Doubles after `growth_interval` good updates in a row, halves after a bad one: the constants of GradScaler."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    good: int = 0

    def update(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.__dict__.update(state)
