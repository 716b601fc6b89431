"""What is said of a step that differs from one device: what differs, where it begins to, and what to do about it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from lightning.pytorch.utilities import rank_zero_warn

from nets.norm import unsynchronised
from strategies.batches.draws import BY_GENERATOR, ByPhase, in_words
from strategies.check.comparison import A_MEAN_OVER_SAMPLES
from strategies.check.first_difference import Begin
from strategies.check.trial import Trial
from strategies.hooks import AFTER
from strategies.turn import Training

SHOWN = 6  # differences in the error
CALLERS = 3  # of torch.distributed

SYNCHRONISE = "Synchronise batch norms: Trainer(sync_batchnorm=True)."
IN_A_NETWORK = (
    "So must a network that looks at several samples, as a batch norm that is written by hand, or call F.batch_norm, a "
    "maximum over the batch, or a padding to its longest sample."
)
ON_GRADIENTS = (
    "What a hook does to gradients, such as to clip them, belongs into on_before_optimizer_step; what a hook does to "
    "the gradient of each picture, into the loss (docs/start/patterns.md)."
)
SHARED = (
    "Where loaders have batches of different sizes, what all samples share, such as class weights, belongs into an "
    "attribute of the game: in the batch it may be taken for samples."
)
DRAWS = (
    "A draw must have a row for each sample, or several: all draws of the game in blocks, as torch.cat makes them, or "
    "all side by side, as nn.MultiheadAttention drops its weights (not with need_weights=False). Each rank must draw "
    "equally often."
)
OF_LOADERS = (
    "Where loaders have batches of different sizes, give a network the samples of one of them at a time: what it draws "
    "for all together has no row for each sample."
)
IN_MICRO_BATCHES = (
    "In micro-batches a draw must have a row for each sample, or several in blocks; or leave micro_batches= out."
)
DRAWS_BY_GENERATOR = (
    "With generator= numbers are drawn: leave that out, or take gan.noise; or seed the generator alike on all ranks, "
    "and give it to torch.randn, torch.rand and torch.randint only."
)
DRAWS_ALIKE = (
    "NumPy and random give all ranks the same numbers: draw what each sample has of its own with torch or gan.noise."
)
WITHOUT_SEED = (
    "has given two losses for the same samples. It draws numbers that nobody seeds, as by np.random.default_rng(), "
    "random.seed() or a clock; or it remembers a trial in an object that no trial can put back, such as a ContextVar. "
    "Draw with torch, gan.noise, np.random or random, which are seeded; or make a generator with a seed in __init__."
)
NUMBER_OF_RANKS = (
    "If that is the cause, let gan.ranks.sum(x), gan.ranks.mean(x) and gan.ranks.gather(x) do that; or ask for the "
    "number of ranks in each call, because one that was kept is not that of one device."
)
BY_PIPELINE = (
    "Under policy pipeline a network gets a chunk of the samples at a time, and those of one rank after those of "
    "another. Blocks get copies, as plain tensors. Where a layer looks at several samples, type +chunks:1, as in "
    "pipeline+chunks:1; where the forward tells samples apart by their place in the batch, or a block changes what it "
    "is given or asks what kind of tensor that is, type another policy."
)
BY_RECOMPUTE = (
    "With option recompute a block runs twice: what it writes into another module, a list or an object that it is not "
    "given, it writes twice. Let it return that, or leave the option out."
)


@dataclass(frozen=True)
class Verdict:
    """What a comparison has found."""

    training: Training
    trial: Trial  # of all ranks together, with all that was learned of it
    lines: Mapping[str, str]  # what differs, with what to do
    whole: bool  # whether the batches were whole, and not a few samples
    hooked: bool  # whether the author's code has hooks

    def text(self) -> str:
        """The error."""
        listed = list(self.lines)[:SHOWN]
        if (more := len(self.lines) - SHOWN) > 0:
            listed.append(f"and {more} more")
        differ = "".join(f"\n  - {text}" for text in listed)
        begin = "".join(f"\nIn phase '{each.phase}' {each.text}." for each in self.begins)
        which = "all" if self.whole else "a few"
        again = " Weights and checkpoints may differ since the trial before this one, so begin again."
        return (
            f"{self.training.world.size} ranks would not train as one device does. In a trial of step "
            f"{self.trial.step}, on {which} samples of each rank, these differ:{differ}{begin}\n"
            f"{' '.join(self.advice())}{again if self.trial.step else ''} To train all the same, type "
            f"PhaseStrategy(check=False), or --check false under gan.fit"
        )

    def advice(self) -> Iterator[str]:
        game, trial = self.training.game, self.trial
        networks = [game, *(policy.player.module for policy in self.training.policies.values())]
        if self.in_a_network and any(map(unsynchronised, networks)):
            yield SYNCHRONISE
        if trial.unrepeated:
            yield f"Phase {', '.join(map(repr, sorted(trial.unrepeated)))} {WITHOUT_SEED}"
        else:
            if trial.drawn_alike:
                yield DRAWS_ALIKE
            draws_first = bool(self.begins) and all(each.drew for each in self.begins)
            for part in (self._of_draws, self._of_losses) if draws_first else (self._of_losses, self._of_draws):
                yield from part()
        if trial.collectives:
            callers = ", ".join(sorted(trial.collectives)[:CALLERS])
            yield f"{callers} calls torch.distributed. {NUMBER_OF_RANKS}"
        if self.training.in_stages:
            yield BY_PIPELINE
        if any("recompute" in policy.options for policy in self.training.policies.values()):
            yield BY_RECOMPUTE
        if trial.differing:
            yield f"A loss also keeps {other_values(trial.differing)}."

    @cached_property
    def begins(self) -> list[Begin]:
        """Where the phases that differ begin to. After draws in a loop all that is drawn is other numbers."""
        found = [each for each in self.trial.begins if not self.training.draws.looped.get(each.phase)]
        return [each for each in found if any(f"phase '{each.phase}'" in text for text in self.lines)]

    @property
    def in_a_network(self) -> bool:
        """Whether a network may be what differs. Where nothing is known, all may."""
        return not self.begins or any(each.inside for each in self.begins)

    def _of_losses(self) -> Iterator[str]:
        formula = not self.begins or any(each.formula for each in self.begins)
        for text in dict.fromkeys(self.lines.values()):
            yield text
            if text == A_MEAN_OVER_SAMPLES:
                if self.in_a_network:
                    yield IN_A_NETWORK
                if self.hooked and formula and not any(": loss '" in line for line in self.lines):
                    yield ON_GRADIENTS
                if formula and self.training.batches.ratios:
                    yield SHARED

    def _of_draws(self) -> Iterator[str]:
        drawn = self._drawn()
        names = {draw.name for of_phase in drawn.values() for draw in of_phase.values()}
        by_generator = {name for name in names if name.endswith(BY_GENERATOR)}
        if names - by_generator and IN_MICRO_BATCHES not in self.lines.values():
            yield DRAWS
        if names and self.training.batches.ratios:
            yield OF_LOADERS
        if by_generator:
            yield DRAWS_BY_GENERATOR
        for phase, seen in drawn.items():
            if looped := self.training.draws.looped.get(phase):
                yield f"Phase '{phase}' draws {', '.join(looped)}: draw for all at once."
            elif text := in_words(seen):
                yield f"Phase '{phase}' draws {text}."

    def _drawn(self) -> ByPhase:
        """What phases draw that begin to differ at a draw, or what all do where nothing is known."""
        drawn = {phase: draws for phase, draws in self.trial.drawn.items() if draws}
        if not self.begins:
            return drawn
        at_a_draw = {each.phase for each in self.trial.begins if each.drew} | {AFTER.name}
        return {phase: draws for phase, draws in drawn.items() if phase in at_a_draw}


def warn_of_unlike(phases: Collection[str]) -> None:
    """Of phases that cannot be compared."""
    rank_zero_warn(
        f"phase {', '.join(map(repr, sorted(phases)))}: not compared with one device, because it draws other numbers "
        f"on each rank: by Phase(draws='torch'), in backward (add noise to gradients of weights in "
        f"on_before_optimizer_step, to those of pictures in the loss: docs/start/patterns.md), or within nn.LSTM or "
        f"attention on a GPU"
    )


def warn_of_kept(differing: Collection[str]) -> None:
    """Of values that may be right."""
    rank_zero_warn(
        f"a loss keeps {other_values(differing)}. That is right for a log, but what losses, schedules and hooks read "
        f"must be the same on all ranks: keep gan.ranks.mean(x), gan.ranks.sum(x) or gan.ranks.gather(x) in place of x"
    )


def other_values(names: Collection[str]) -> str:
    return f"other values in {', '.join(map(repr, names))} than one device would"
