"""What policies share whose weights are let go between phases."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from strategies.policies.sharded import Owner
from strategies.sharding.reads import unlisten


class Visiting(Owner):
    """The weights are there for a while: in a phase, as averages, or whole for whoever looks at them between phases."""

    keep = False

    @property
    @abstractmethod
    def there(self) -> bool:
        """Whether all weights are."""

    @abstractmethod
    def rest(self) -> None:
        """Keep the shares alone; waits for nobody."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the shares and gather; afterwards the shares alone are kept."""
        if self.ema is None or not self.buckets:
            with self.gathered(), super().averaged():
                yield
            return
        try:
            with self.ema.swapped():
                self.spread()
                self.gather()
                yield
        finally:
            self.spread()
            self.rest()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole for a while; afterwards as before."""
        before = self.there
        if not before:
            self.settle()
        yield
        if not before:
            self.rest()

    def loaded(self) -> None:
        """What was gathered from the old shares is of no use."""
        self.spread()
        self.rest()

    def release(self) -> None:
        """The author's modules are the author's again."""
        unlisten(self.player.module)
        super().release()
