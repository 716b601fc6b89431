"""What is tried and compared beside the steps, so that ranks train as one device does: see check/one_device.py."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import count
from typing import Any, Literal

from gan.files.errors import UserError
from gan.phase import Phase
from strategies import private
from strategies.batches import random_state
from strategies.batches.draws import Draws, for_all_ranks
from strategies.check.one_device import check_guesses, check_step, learn_draws
from strategies.check.snapshot import read_by_losses
from strategies.check.trial import Trial
from strategies.hooks import AFTER
from strategies.objects.content import PLAIN
from strategies.training.incoming import Incoming
from strategies.turn import Training, drawn_at

Play = Callable[[Any], Any]
Check = bool | Literal["often"]  # what PhaseStrategy(check=...) takes
TIMES = 10  # a phase is played so often from trial to trial


class Watch:
    """Tries steps before or after they are played, and tells the other ranks what this one has computed.

    One device alone is watched for what its micro-batches draw.
    """

    def __init__(self, training: Training, incoming: Incoming, check: Check) -> None:
        game = training.game
        self.game, self.training, self.incoming = game, training, incoming
        self.same_on_ranks = training.same_on_ranks
        parted = any(each.micro_batches > 1 and each.draws == "samples" for each in game.phases)
        self.check = check_step if training.world.size > 1 else learn_draws
        self.schedule = TrialSchedule(game.phases if training.checked or (check and parted) else (), check == "often")
        self.trial: Trial | None = None  # that is played now
        self.drawn: set[str] = set()  # by one device, in micro-batches, that no trial has shown
        # The dice and the game's plain attributes with which the step has begun, if `when` or `update` may change them.
        self.begun: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.read = read_by_losses(game)
        self.left: dict[str, float] = {}  # by the last step: the numbers of the game that its losses read
        self.said: set[str] = set()  # of which phases it was said what they draw

    def due(self) -> bool:
        """Whether there is a trial before this step."""
        return self.schedule.before(self.game.phases, self.game.step)

    def begin(self) -> None:
        """Tell the other ranks what has changed between the steps, and what the hooks of the batch have drawn."""
        if self.training.checked:
            changed = {name: now for name, now in self._numbers().items() if self.left.get(name, now) != now}
            self.same_on_ranks.set_between(changed)
            if self.incoming.place is not None:
                self.same_on_ranks.saw(AFTER.name, {}, self.training.draws.guesses(AFTER))
                self.same_on_ranks.drew(AFTER.name, 0, drawn_at(self.incoming.place, self.training))
        self.say_draws(AFTER, AFTER.name)
        if any(phase.when or phase.update for phase in self.game.phases):
            plain = {name: value for name, value in vars(self.game).items() if isinstance(value, PLAIN)}
            self.begun = random_state.dice(), plain

    def try_step(self, play: Play, batch: Any, first: bool = False) -> None:
        """Try this step. `first`: its losses are played for the first time, or in a new way."""
        self.check(self.training, self.incoming.before_hooks(batch), partial(self._try, play), first)
        if self.training.checked:  # what the last step, or a hook of this batch, has drawn
            check_guesses(self.training, self.game.step)

    def _try(self, play: Play, trial: Trial, batch: Any) -> None:
        self.trial = trial
        if self.begun is not None:
            dice, plain = self.begun
            random_state.set_dice(dice)
            vars(self.game).update(plain)
        dice = random_state.dice()
        try:
            if self.training.hooks.of_batches:
                draws = Draws(self.training.draws.known)
                batch = self.incoming.by_sample(batch, draws, trial.alone)
                trial.drawn |= draws.seen
            play(batch)
            trial.drawn_alike = dice != random_state.dice()
        finally:
            self.trial = None
            for policy in self.training.policies.values():
                policy.switch.turn(True)

    def play(self, phase: Phase, batch: Any) -> None:
        """Play a phase of the trial."""
        assert self.trial is not None
        if phase.when is not None:
            self.schedule.tried(phase.name)
        self.trial.play(phase, batch, self.training)

    def played(self, phase: Phase) -> None:
        """A phase was played, and not in a trial."""
        self.say_draws(phase, f"phase '{phase.name}'")
        self.schedule.played.add(phase.name)
        if phase.when is not None and phase.name in self.schedule.times:
            self.schedule.asked.append(phase.name)

    def end(self, play: Play, batch: Any) -> None:
        """The step was played: try it if a phase of it was new."""
        self.left, draws = self._numbers(), self.training.draws
        if self.training.checked:
            if (new := self.same_on_ranks.new_on_all()) | self.schedule.after():
                self.try_step(play, batch, first=True)
            self.same_on_ranks.end_step(forget=new and draws.unmet())
        elif self.schedule.times:
            found = {each for phase in self.game.phases for each in draws.unknown_in_parts(phase)}
            new, self.drawn = found - self.drawn, self.drawn | found
            if self.schedule.after() or new:
                self.try_step(play, batch, first=True)
        if not self.schedule.played and any(phase.due(self.game.step, lambda _: False) for phase in self.game.phases):
            raise UserError(
                f"training_step() of {type(self.game).__name__} played no phase, so nothing has learned; call "
                f"super().training_step(batch) in it, or leave it out"
            )

    def say_draws(self, phase: Phase, whose: str) -> None:
        """Once for each phase."""
        first = phase.name not in self.said and self.training.world.rank == 0
        if first and (draws := self.training.draws.said(phase)):
            private.say(f"{whose} draws {draws}")
        self.said.add(phase.name)

    def asked(self, phase: Phase) -> bool:
        """Whether a phase with a `when` is played: the first rank's answer, on all ranks."""
        assert phase.when is not None
        with for_all_ranks(self.training.seed, self.game.step, phase.name, "when"):
            world, trial = self.training.world, self.trial
            return world.answer(phase.when) if trial is None else trial.answer(phase, "when", phase.when)

    def _numbers(self) -> dict[str, float]:
        """The numbers of the game that its losses read."""
        return {
            name: each for name, each in vars(self.game).items() if name in self.read and type(each) in (int, float)
        }


class TrialSchedule:
    """Decides when phases are tried: before they are played for the first time, and again at growing distances.

    A phase is tried when it has been played 0, 1, 3, 10, 30, 100, 300, ... times; with `often`, at least each tenth
    time. One with a `when` is tried after a step that has played it, because before it nobody knows.
    """

    def __init__(self, phases: Iterable[Phase], often: bool) -> None:
        self.often = often
        self.times = {phase.name: 0 for phase in phases}  # how often each was due
        self.next = dict.fromkeys(self.times, 0)  # how often it will have been when it is tried again
        self.played: set[str] = set()
        self.asked: list[str] = []  # those with a `when` that this step has played

    def before(self, phases: Iterable[Phase], step: int) -> bool:
        """Whether there is a trial before this step. It counts as done then."""
        return self._due([each.name for each in phases if each.name in self.times and each.due(step, lambda _: False)])

    def after(self) -> bool:
        """Whether there is one after this step, because it has played a phase with a `when`."""
        names, self.asked = self.asked, []
        return self._due(names)

    def _due(self, names: Collection[str]) -> bool:
        due = any(self.times[name] >= self.next[name] for name in names)
        for name in names:
            if due:
                self.tried(name)
            self.times[name] += 1
        return due

    def tried(self, name: str) -> None:
        """A trial plays a phase: the next one is later."""
        times = self.times[name]
        later = next(each for power in count() for each in (10**power, 3 * 10**power) if each > times)
        self.next[name] = min(later, times + TIMES) if self.often else later
