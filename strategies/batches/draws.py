"""Which draws of a loss have a row for each sample, and which are for the whole batch.

[Note: draws with a row for each sample]
A draw of 8 rows, where a rank has 4 samples, may be two rows for each sample, or 8 numbers that have nothing to do with
samples. A trial plays a phase with few samples and with many (check/one_device.py). The dimension that has grown with
the samples is theirs, and what has not grown is one draw for the whole batch. That is known for the site: the place in
the code that has asked for the draw. A site that comes later is guessed, and tried after its step.

Several rows for each sample may be copies of the batch, one after the other, as torch.cat makes them, or lie side by
side, as the heads of attention do. If the trial differs with the first, it is played with the second. Fewer rows than
samples that grow with them are one for each pack of neighbours (PacGAN).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from gan import noise
from gan.noise import Drawn, Place, Site
from gan.phase import Phase
from strategies.batches.micro_batches import Batches

ByPhase = dict[str, dict[int, Drawn]]  # draws by the phase's name and the number of the draw in it
Known = dict[str, dict[tuple[int, Site], Drawn]]  # and by its site
BY_GENERATOR = " with generator="  # ends the name of a draw
SHOWN = 5  # shapes in a line


def for_all_ranks(*key: str | int) -> AbstractContextManager[Any]:
    """Inside the `with`, what is drawn belongs to no sample, and is the same on all ranks."""
    return noise.at(Place(key, 0, 1, 1))


class Draws:
    """The draws of a game's networks, and what trials have shown: see [Note: draws with a row for each sample]."""

    def __init__(self, known: Known | None = None) -> None:
        self.known: Known = {} if known is None else known
        self.looped: dict[str, list[str]] = {}  # by phase: what a loop over the samples draws for each of them
        self.proven: set[tuple[str, int, Site]] = set()  # those with which a trial agreed
        self.seen: ByPhase = {}  # of the last time that a phase was played
        self.by_dice = False  # whether some loss draws from NumPy or Python
        self.compiled = False  # then sites are those of what torch has made of the code, which no trial plays

    def begin(self, phase: Phase) -> None:
        self.seen[phase.name] = {}

    def of(self, phase: Phase) -> dict[str, Any]:
        """What a place of this phase must know."""
        known, drawn = self.known.get(phase.name, {}), self.seen.setdefault(phase.name, {})
        return {"follows": phase.draws == "samples", "known": known, "drawn": drawn}

    def learn(self, trials: Sequence[tuple[ByPhase, ByPhase]]) -> bool:
        """From each rank's draws with few samples, and with many. Returns whether one was taken for what it is not."""
        wrong = False
        for few, many in trials:
            for phase in few.keys() & many.keys():
                grown = _grown(few[phase], many[phase])
                self.looped[phase] = _in_loops(few[phase], many[phase])
                of_phase = self.known.setdefault(phase, {})
                for call, dim in grown.items():
                    drawn = few[phase][call], many[phase][call]
                    wrong |= any(draw.dim != dim and not draw.whole for draw in drawn)
                    of_phase[call, drawn[0].site] = drawn[0]._replace(dim=dim)
        return wrong

    def take_otherwise(self, agree: Collection[str]) -> bool:
        """Where a sample has several rows, take copies of the batch for rows side by side, and the reverse.

        But not in phases that `agree`. Returns whether there is such a draw.
        """
        changed = False
        for phase in self.known.keys() - set(agree):
            known = self.known[phase]
            for key, draw in known.items():
                several = draw.dim == 0 and draw.shape[0] > draw.rows and not draw.name.endswith(BY_GENERATOR)
                if several and (phase, *key) not in self.proven:
                    known[key] = draw._replace(beside=not draw.beside)
                    changed = True
        return changed

    def agreed(self) -> None:
        """What is known now was right in a trial."""
        self.proven |= {(phase, *key) for phase, known in self.known.items() for key in known}

    def guesses(self, phase: Phase) -> frozenset[Site]:
        """The sites of what the phase has drawn that no trial has shown."""
        return frozenset(draw.site for draw in self.seen[phase.name].values() if self._is_open(draw))

    def _is_open(self, draw: Drawn) -> bool:
        return draw.guessed and not draw.whole and not self.compiled

    def unmet(self) -> bool:
        """Whether the last step has drawn what a trial after it has not, as where the author's own dice decide that."""
        shown = {(phase, site) for phase, known in self.known.items() for _, site in known}
        drawn = ((phase, draw) for phase, calls in self.seen.items() for draw in calls.values())
        return any(self._is_open(draw) and (phase, draw.site) not in shown for phase, draw in drawn)

    def wrong_guesses(self) -> list[str]:
        """What the last step has drawn otherwise than a trial after it has shown."""
        wrong = []
        for phase, drawn in self.seen.items():
            for call, draw in drawn.items():
                known = self.known.get(phase, {}).get((call, draw.site))
                if draw.guessed and known and (known.dim, known.beside) != (draw.dim, draw.beside):
                    wrong.append(f"phase '{phase}': {list(draw.shape)} ({draw.name})")
        return wrong

    def wrong_in_parts(self, phase: Phase, batches: Batches) -> list[str]:
        """Draws of which a micro-batch has no rows of its own: of packs, which it parts, rows side by side, in loops.

        One device cannot tell these from copies of the batch, for it compares with none.
        """
        drawn = self.known.get(phase.name, {}).values() if phase.micro_batches > 1 else ()
        rows = [each for each in drawn if each.name != "randperm"]
        counts = [(each, each.rows if each.dim is None else each.shape[each.dim]) for each in rows]
        apart = [each for each, n in counts if each.beside or (n < each.rows and not batches.fits(n, each.rows))]
        looped = self.looped.get(phase.name, []) if phase.micro_batches > 1 else []
        return [*(f"{list(draw.shape)} ({draw.name})" for draw in apart), *looped]

    def unknown_in_parts(self, phase: Phase) -> list[str]:
        """What the micro-batches of the last step have drawn alike, though there may be samples in it."""
        shown = {site for _, site in self.known.get(phase.name, {})}
        drawn = self.seen.get(phase.name, {}).values() if phase.micro_batches > 1 else ()
        alike = (each for each in drawn if self._is_open(each) and each.dim is None and each.site not in shown)
        return [f"{list(each.shape)} ({each.name})" for each in alike if any(n % each.rows == 0 for n in each.shape)]

    def said(self, phase: Phase) -> str:
        """What the last time was taken for what; nothing if the phase draws nothing."""
        return in_words(self.seen.get(phase.name, {}))


def in_words(drawn: Mapping[int, Drawn]) -> str:
    """What was taken for what; nothing if nothing was drawn."""
    each = {(draw.shape, draw.dim is not None): draw.name for draw in drawn.values() if not draw.whole}
    words = {True: "for each sample", False: "once for the whole batch"}
    shown = [f"{list(shape)} {words[own]} ({name})" for (shape, own), name in each.items()]
    more = [f"and {len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    return ", ".join([*shown[:SHOWN], *more])


def _grown(few: Mapping[int, Drawn], many: Mapping[int, Drawn]) -> dict[int, int | None]:
    """For each draw of which two trials tell it: the dimension of its samples, or None if it has none."""
    found: dict[int, int | None] = {}
    for call in few.keys() & many.keys():
        one, other = few[call], many[call]
        if one.rows == other.rows or (one.name, len(one.shape)) != (other.name, len(other.shape)):
            continue
        pairs = [*zip(one.shape, other.shape, strict=True)]
        unlike = [dim for dim, (few_of_it, many_of_it) in enumerate(pairs) if few_of_it != many_of_it]
        if not unlike:
            found[call] = None
        elif len(unlike) == 1 and pairs[unlike[0]][0] * other.rows == pairs[unlike[0]][1] * one.rows:
            found[call] = unlike[0]
    return found


def _in_loops(few: Mapping[int, Drawn], many: Mapping[int, Drawn]) -> list[str]:
    """The draws of one shape that are made as often as there are samples. All micro-batches get the same ones."""
    counts, rows = [], []
    for drawn in (few.values(), many.values()):
        own = [each for each in drawn if not each.name.endswith(BY_GENERATOR)]
        counts.append(Counter((each.name, each.shape) for each in own))
        rows.append(max((each.rows for each in own), default=0))
    return [
        f"{list(shape)} ({name}) for each sample, in a loop"
        for (name, shape), often in counts[0].items()
        if rows[0] < rows[1] and counts[1][name, shape] * rows[0] == often * rows[1]
    ]
