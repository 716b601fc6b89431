"""How far the pictures that a game makes are from the true ones, as sets, while the game trains on any ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from datasets.augment import Prepared
from gan import noise, ranks
from gan.app.painting.reopen import has_numbers
from gan.app.scoring.distances import ALL, Known, distances, named
from gan.app.scoring.features import Extractor, as_bytes
from gan.app.scoring.outputs import Made, makes
from gan.files.errors import UserError
from gan.runs import Run
from strategies.ranks import World

MOST = 50_000  # pictures that are made for a score, as published
PIXELS = 2**22  # in a batch, at most: it does not depend on the number of ranks, or the scores would

Prepare = Callable[[Any], Any]
Features = dict[tuple[str, str], Tensor]  # by title, and "made" or "truth"


class Sets:
    """Compares `count` pictures that a game makes with all true ones, by the features of a network.

    The true ones are those that the game trains on, as published, without mirroring. A game that paints its held-out
    samples is compared with those. What is known of the true pictures is computed once, unless a person's `file` of
    statistics says it.
    """

    def __init__(self, run: Run, extractor: Extractor, count: int | None = None, file: Path | None = None) -> None:
        if not has_numbers(run.data):
            raise UserError("--score-every needs samples with numbers, held-out ones too: give the run a GanData")
        self.data, self.extractor, self.asked = run.data, extractor, count
        self.file, self.truth = file, None if file is None else Known.read(file, extractor.size)
        self.known: dict[str, Known] | None = None  # by title, on the first rank
        self.about: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scores in metrics.csv, of a game that makes one kind of picture."""
        figures = dict.fromkeys(ALL if self.truth is None else ALL[:1], 0.0)
        return tuple(f"score/{name}" for name in named(figures, self.extractor.fid))

    @torch.no_grad()
    def figures(self, world: World, prepared: Prepare, game: Any) -> dict[str, float]:
        """The scores, on the first rank. All ranks must call it, where the game computes as in a validation.

        `prepared` brings a batch to the device.
        """
        self.extractor.network.to(world.device)
        samples, titles, rows = self._source(prepared, game)
        count = self.asked or min(MOST, len(samples))
        if self.truth is not None:
            self.known = dict.fromkeys(titles, self.truth)
        wanted = self.known is None
        features = self._features(world, prepared, game, samples, rows, count, wanted)
        if self.known is None:
            first = {title: each[: len(samples)] for (title, kind), each in features.items() if kind == "truth"}
            self.known = {title: Known.of(each) for title, each in first.items()}
        if world.rank:
            return {}
        found = {}
        for title in titles:
            made = features[title, "made"][:count]
            for name, value in named(distances(made, self.known[title], ALL), self.extractor.fid).items():
                found[f"score/{name}" if len(titles) == 1 else f"score/{title}: {name}"] = value
        self.about |= {"pictures made": count, "true pictures": self.known[titles[0]].count or "as in the file"}
        return found

    def _source(self, prepared: Prepare, game: Any) -> tuple[Prepared, list[str], int]:
        """The samples that are played, the titles of what the game makes, and how many samples are in a batch."""
        samples, held_out = Prepared(self.data.train), False
        made = self._made(game, samples, prepared)
        if any(each.paired for each in made.values()):
            samples, held_out = Prepared(self.data.val), True
        pixels = max(each.pictures[0, 0].numel() for each in made.values())
        self.about = {
            "network": self.extractor.name,
            **self.extractor.about,
            "true": str(self.file or ("held-out samples" if held_out else "all that it trains on")),
            "flips": False,
            "covariance": "divided by N - 1",
            "averaged weights of": [name for name, player in game.players.items() if player.ema is not None],
            "truncation": "none",
        }
        return samples, list(made), max(8, min(64, PIXELS // pixels))

    def _made(self, game: Any, samples: Prepared, prepared: Prepare) -> dict[str, Made]:
        """What the game makes of the first sample. Sounds are refused."""
        made = makes(game, prepared(default_collate([samples[0, 0]])), torch.zeros(1, dtype=torch.long))
        pictures = {title: each for title, each in made.items() if isinstance(each, Made)}
        if pictures.keys() != made.keys():
            raise UserError(f"--score-every compares pictures, and {type(game).__name__} makes sounds; leave it out")
        return pictures

    def _features(
        self, world: World, prepared: Prepare, game: Any, samples: Prepared, rows: int, count: int, wanted: bool
    ) -> Features:
        """The features of all pictures made, and of the true ones if they are wanted, in order.

        [Note: scores on any number of ranks]
        Batches are the same at any number of ranks, and so are their figures. The ranks take turns. In a turn each has
        a batch, since a player whose weights are shared out needs all ranks; some have the last batch again, and their
        rows are left out as those after the last one.
        """
        total = max(count, len(samples))
        found: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        turns = self._batches(samples, total if wanted else count, rows, world.rank, world.size)
        for turn, (numbers, batch) in enumerate(turns):
            with noise.at(noise.Place(("evaluate",), numbers[0], len(numbers), total)):
                made = makes(game, prepared(batch), torch.tensor(numbers))
            first = turn * world.size * rows
            for title, each in made.items():
                assert isinstance(each, Made)
                for kind, pictures, most in (("made", each.pictures, count), ("truth", each.truth, len(samples))):
                    if first < most and (kind == "made" or wanted):
                        with torch.autocast(world.device.type, enabled=False):
                            seen = ranks.gather(self.extractor.network(as_bytes(pictures.float())).float())
                        found[title, kind] += [seen.cpu()] if world.rank == 0 else []
        return {key: torch.cat(each) for key, each in found.items() if each}

    def _batches(self, samples: Prepared, count: int, rows: int, rank: int, size: int) -> Iterator[tuple[range, Any]]:
        """This rank's batches. Numbers beyond the last sample begin again with the first one."""
        cut = [range(at, min(at + rows, count)) for at in range(0, count, rows)]
        own = [cut[min(turn + rank, len(cut) - 1)] for turn in range(0, len(cut), size)]
        picks = [[(0, number % len(samples)) for number in numbers] for numbers in own]
        yield from zip(own, DataLoader(samples, batch_sampler=picks, num_workers=self.data.workers), strict=True)
