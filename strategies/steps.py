"""The steps of a training: each is one pass over the phases of the game."""

import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from gan import noise
from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from nets.norm import synchronised
from strategies import private, random_state
from strategies.check.one_device import check_guesses, check_step, learn_draws
from strategies.check.one_process import as_one_process
from strategies.check.replicas import compare_replicas, compare_settings
from strategies.check.trial import Trial, Trials, read_by_losses
from strategies.draws import Draws, draws_follow
from strategies.hooks import AFTER, GameFirst, draws_alike
from strategies.loaders import check_rows, samples_of, sizes_of
from strategies.lockstep import Lockstep
from strategies.micro_batches import begin_training, known, learn_lists, not_clear, row_counts, tensors
from strategies.optimizers import check_saved, check_unaltered
from strategies.processes import heap
from strategies.reachable import PLAIN
from strategies.sharding.resharded_parameter import version_of
from strategies.turn import Training, drawn_at, play
from strategies.world import agree

ROOM = 64  # for losses: a message has a multiple of it
ASKING = ("monitor", "filename")  # attributes of callbacks with the names of what is logged


class Steps:
    """Made when training begins: then all that a phase needs is known, also what a checkpoint has.

    `check` is PhaseStrategy's: each phase is tried before its first time, and again. `compared`: weights and buffers
    are compared on all ranks after every phase. `to_device` is Lightning's way of a batch.
    """

    def __init__(
        self,
        game: GanModule,
        training: Training,
        lockstep: Lockstep,
        check: bool | Literal["often"],
        compared: bool,
        to_device: Callable[..., Any],
    ) -> None:
        begin_training(game.trainer.train_dataloader, sizes_of(game.trainer.train_dataloader))
        for phase in game.phases:  # what is logged of it is a mean over ranks already
            warnings.filterwarnings("ignore", rf"It is recommended to use `self.log\('{re.escape(phase.name)}/")
        checked = bool(check) and training.world.size > 1
        training = replace(training, checked=checked)
        self.game, self.training, self.lockstep, self.compared = game, training, lockstep, compared
        # If the author has hooks around it: the batch before them, and the place at which they draw.
        self.to_device, self.raw, self.place = to_device, None, cast("noise.Place | None", None)
        self.guard, self.policies = training.guard, training.policies
        for policy in self.policies.values():
            if checked and policy.storage.cut:
                check_unaltered(policy.player, policy.updaters.values(), policy.name)
        training.draws.compiled = any(each.compiled or each.compiled_by_author for each in self.policies.values())
        parted = any(each.micro_batches > 1 and each.draws == "samples" for each in game.phases)
        self.check = check_step if training.world.size > 1 else learn_draws
        self.trials = Trials(game.phases if checked or (check and parted) else (), check == "often")
        self.trial: Trial | None = None  # that is played now
        self.drawn: set[str] = set()  # by one device, in micro-batches, that no trial has shown
        # The dice and the game's plain attributes with which the step has begun, if a `when` may throw or count.
        self.begun: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.read = read_by_losses(game)
        self.left: dict[str, float] = {}  # by the last step: the numbers of the game that its losses read
        self.stepped = False
        self.epoch_begins = False  # the game's own on_train_epoch_start runs
        self.moved: list[tuple[Tensor, int]] = []  # the tensors of the batch that is to be played, and their versions
        self.losses: dict[str, Tensor] = {}  # the last ones since the loggers got some, and norms of gradients
        self.logged = False  # whether the loggers have these losses
        self.told = True  # whether anybody has those of the last step
        words = (str(getattr(each, name, "")) for each in private.callbacks(game.trainer) for name in ASKING)
        self.asked = " ".join(words)  # with the names of losses of which callbacks ask in each step

    def take(self, batch: Any, *where: Any) -> Any:
        """Bring the next batch to the device, and note it as it comes there."""
        self.training.world.groups.owed.catch_up()
        learn_lists(batch, samples_of(self.game.trainer.train_dataloader))
        if self.training.hooks.of_batches:
            self._same_dice()
            self.raw, batch = batch, self._by_sample(batch, self.training.draws)
            learn_lists(batch, samples_of(self.game.trainer.train_dataloader))
        else:
            batch = self.to_device(batch, *where)
        if self.training.world.size > 1:
            self.moved = [(each, version_of(each)) for each in tensors(batch)]
        return batch

    def _by_sample(self, batch: Any, draws: Draws, alone: bool = False) -> Any:
        """Bring a batch to the device, with the author's hooks, whose draws by torch follow the sample, as in a loss.

        A trial begins with the batch before the hooks, and calls them again: on this rank's samples, and `alone` on
        those of all ranks, as one device gets them. So what they compute is checked as a loss is.
        """
        world, step = self.training.world, self.game.step
        rank, size = (0, 1) if alone else (world.rank, world.size)
        draws.begin(AFTER)
        self.place = None
        try:
            rows, *others = row_counts(batch)
        except UserError:  # anything may be a batch
            return self.to_device(batch)
        first = {count: rank * count for count in others}
        key, known = (self.training.seed, step, "batch"), draws.of(AFTER)
        self.place = noise.Place(key, rank * rows, rows, size * rows, others=first, **known)
        with noise.at(self.place), as_one_process(self.game.trainer) if alone else nullcontext():
            return self.to_device(batch)

    def _same_dice(self) -> None:
        """Where losses draw from NumPy or Python, give all ranks the first one's numbers, as one device has them.

        A callback for the first rank alone may have drawn from them too, as to choose a sample that it shows.
        """
        if self.training.draws.by_dice:
            self.lockstep.places.begin_step(self.game.step)
            with self.lockstep.places.named():
                dice, world = random_state.dice(), self.training.world
                if not agree((hash(dice[0]), zlib.crc32(dice[2]), dice[3:]), world.device):
                    random_state.set_dice(world.broadcast(dice))

    def check_batch(self, batch: Any) -> None:
        """Refuse what on_train_batch_start does to a batch: a trial begins after it."""
        self.training.world.groups.owed.catch_up()
        now = tensors(batch)
        same = len(now) == len(self.moved) and all(each is old for each, (old, _) in zip(now, self.moved, strict=True))
        if self.moved and not (same and all(version_of(each) == version for each, version in self.moved)):
            raise UserError(
                "on_train_batch_start changes the batch: what it draws or computes is each rank's own, and no trial "
                "sees it; write on_after_batch_transfer(batch, dataloader_idx) in its place, or do it in the loss"
            )
        self.moved = []  # it would keep the batch in memory until the next one is there

    def step(self, play: Callable[[Any], Any], batch: Any) -> Any:
        """One pass over the phases, `play(batch)`, and trials of it where they are due. Lightning counts one step."""
        game, step = self.game, self.game.step
        self.guard.raise_if_hopeless()
        self._same_dice()
        self._same_lists(self.raw if self.training.hooks.of_batches else batch)
        if not self.stepped and (self.training.world.size > 1 or any(each.micro_batches > 1 for each in game.phases)):
            check_rows(batch, game.trainer.train_dataloader, game.trainer.is_last_batch)
        tried = self.trials.before(game.phases, step)
        compared = tried and self.training.world.size > 1
        for_all = noise.Place((self.training.seed, step, "freeze"), 0, 1, 1)
        with noise.at(for_all):  # what freeze= draws
            for policy in self.policies.values():
                policy.begin_step(step, compared)
        self.lockstep.same_on_ranks.begin(batch)
        if self.training.checked:
            changed = {name: now for name, now in self._numbers().items() if self.left.get(name, now) != now}
            self.lockstep.same_on_ranks.set_between(changed)
        if self.training.checked and self.place is not None:
            self.lockstep.same_on_ranks.saw(AFTER.name, {}, self.training.draws.guesses(AFTER))
            self.lockstep.same_on_ranks.drew(AFTER.name, 0, drawn_at(self.place, self.training))
        if not self.stepped:
            self._say_draws(AFTER, AFTER.name)
        self.lockstep.places.begin_step(game.step)
        with self.lockstep.places.named():
            raw = self.raw if self.training.hooks.of_batches else batch
            check = partial(self.check, game, self.training, raw, partial(self._try, play))
            if any(phase.when for phase in game.phases):
                plain = {name: value for name, value in vars(game).items() if isinstance(value, PLAIN)}
                self.begun = random_state.dice(), plain
            if tried:
                check(first=step == 0)
            if self.logged:  # a phase that is not played until they get more has nothing to tell
                private.forget_logged(game.trainer, self.losses)
                self.losses, self.logged = {}, False
            output = self._pass(play, batch)
            self.left = self._numbers()
            if self.training.checked:
                if (new := self.lockstep.same_on_ranks.new_on_all()) | self.trials.after():
                    check()
                    check_guesses(self.training, step)
                self.lockstep.same_on_ranks.end_step(forget=new and self.training.draws.unmet())
            elif self.trials.times and self.trials.after() | self._draws_anew():
                check()
            if not self.trials.played and any(phase.due(step, lambda _: False) for phase in game.phases):
                raise UserError(
                    f"training_step() of {type(game).__name__} played no phase, so nothing has learned; call "
                    f"super().training_step(batch) in it, or leave it out"
                )
            for policy in self.policies.values():
                if not self.stepped:
                    check_saved(policy.player, policy.updaters.values())
                policy.end_step(game.trainer.is_last_batch)
            self.stepped = True
            if compared:
                compare_settings(self.policies, self.training.world, step)
            self.lockstep.places.end_step()
            self._log()
        private.count_step(game.trainer)
        return output

    def _same_lists(self, raw: Any) -> None:
        """Let all ranks know first which lists have an item for each sample. Refuse one that is not clear."""
        world = self.training.world
        if world.size > 1 and not self.stepped:
            self.lockstep.places.begin_step(self.game.step)
            with self.lockstep.places.named():
                for each in world.gather(dict(known)):
                    known.update({key: here or known.get(key, False) for key, here in each.items()})
        unclear = learn_lists(raw, samples_of(self.game.trainer.train_dataloader))
        cut = world.size > 1 or any(each.micro_batches > 1 for each in self.game.phases)
        if unclear and cut and not self.game.trainer.is_last_batch:  # which may be a smaller one
            raise not_clear(unclear)

    def _numbers(self) -> dict[str, float]:
        """The numbers of the game that its losses read."""
        return {
            name: each for name, each in vars(self.game).items() if name in self.read and type(each) in (int, float)
        }

    def _draws_anew(self) -> bool:
        """Whether one device has drawn where no trial has."""
        found = {each for phase in self.game.phases for each in self.training.draws.unknown_in_parts(phase)}
        new, self.drawn = found - self.drawn, self.drawn | found
        return bool(new)

    def _pass(self, play: Callable[[Any], Any], batch: Any) -> Any:
        self._forget()
        output = play(batch)
        self._forget()
        return output

    def _forget(self) -> None:
        self.game.forget_shared()
        self.training.parts.forget()

    def due(self) -> Iterator[Phase]:
        """The phases to be played in this step. Whether the next one is due may depend on what this one does."""
        return (phase for phase in self.game.phases if phase.due(self.game.step, self._asked))

    def run(self, phase: Phase, batch: Any) -> None:
        self.training.world.groups.owed.catch_up()
        if self.trial is not None:
            if phase.when is not None:
                self.trials.tried(phase.name)
            self.trial.play(phase, batch, self.training)
            return
        step, world = self.game.step, self.training.world
        self.lockstep.places.begin(step, phase.name)
        self.losses.update(play(phase, batch, step, self.training))
        self.lockstep.ending.played += 1
        if phase.name not in self.trials.played:
            self._say_draws(phase, f"phase '{phase.name}'")
        self.trials.played.add(phase.name)
        if phase.when is not None and phase.name in self.trials.times:
            self.trials.asked.append(phase.name)
        if self.compared:
            compare_replicas(self.game, self.policies, world, f"after phase '{phase.name}' of step {step}")

    def _say_draws(self, phase: Phase, whose: str) -> None:
        if self.training.world.rank == 0 and (draws := self.training.draws.said(phase)):
            private.say(f"{whose} draws {draws}")

    def _asked(self, phase: Phase) -> bool:
        """Whether a phase with a `when` is played: the first rank's answer, on all ranks."""
        assert phase.when is not None
        with noise.at(noise.Place((self.training.seed, self.game.step, phase.name, "when"), 0, 1, 1)):  # for all ranks
            return self.training.world.answer(phase.when) if self.trial is None else self.trial.answer(phase)

    def _try(self, play: Callable[[Any], Any], trial: Trial, batch: Any) -> None:
        self.trial = trial
        if self.begun is not None:
            dice, plain = self.begun
            random_state.set_dice(dice)
            vars(self.game).update(plain)
        dice = random_state.dice()
        try:
            if self.training.hooks.of_batches:
                draws = Draws(self.training.draws.known)
                batch = self._by_sample(batch, draws, trial.alone)
                trial.drawn |= draws.seen
            self._pass(play, batch)
            trial.drawn_alike = dice != random_state.dice()
        finally:
            self.trial = None
            for policy in self.policies.values():
                policy.switch.turn(True)

    def _log(self) -> None:
        """Log when a logger is due, the epoch ends, or a callback asks.

        Not in every step, because Lightning's bookkeeping for a few numbers takes milliseconds.
        """
        trainer = self.game.trainer
        if trainer.is_last_batch:  # on other ranks perhaps not
            self.lockstep.places.meet()
        asked, self.logged = any(name in self.asked for name in self.losses), private.logs_are_due(trainer)
        self.told = asked or self.logged or trainer.is_last_batch
        if self.told:
            self.log()

    def end_epoch(self) -> None:
        """Log the last losses where nobody has them, as where should_stop ends the epoch; for loggers at max_steps.

        A stopped training has no row more in its log than one that went on.
        """
        self.lockstep.places.meet()
        last = self.game.trainer.global_step == self.game.trainer.max_steps
        if not self.told or (last and not self.logged):
            private.log_anew(self.game.trainer, "on_train_epoch_end", self.losses)
            self.log(None if last else False)

    def log(self, logger: bool | None = None) -> None:
        """Log the means over ranks of the last losses."""
        if self.losses:
            values = torch.stack([loss.float() for loss in self.losses.values()])
            # Ranks that have gone different ways have other losses, and would wait here: the next save names them.
            padded = torch.nn.functional.pad(values, (0, -len(values) % ROOM))
            self.losses = dict(zip(self.losses, self.training.world.mean(padded), strict=False))
        skipped = {f"{name}/skipped": float(each.skipped) for name, each in self.policies.items() if each.skipped}
        self.game.log_dict({**self.losses, **skipped}, logger=logger)


@contextmanager
def while_training(game: GanModule, device: torch.device, synchronise: bool) -> Iterator[None]:
    """What differs here while a game trains. With `synchronise` batch norms have statistics of all ranks."""
    trainer = game.trainer
    others = [each for each in private.callbacks(trainer) if not isinstance(each, GameFirst)]
    private.set_callbacks(trainer, [GameFirst(), *others])
    # ModelCheckpoint thinks that a manual optimization wants weights from before the update.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    with ExitStack() as stack:
        stack.enter_context(draws_follow(device))
        stack.enter_context(draws_alike(game))
        if synchronise:
            stack.enter_context(synchronised(training=True))
        if device.type == "cpu" and heap.keep_freed_memory():  # see [Note: memory that is kept]
            stack.callback(heap.give_freed_memory_back)
        yield
