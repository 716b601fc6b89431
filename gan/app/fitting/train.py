"""One training of `gan.fit`: what it begins with, the Trainer, and what is printed at its begin and end."""

import json
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning import Trainer
from lightning.pytorch.callbacks import LambdaCallback

from datasets import GanData
from datasets.files.pictures import facts_of
from gan.app.fitting import loggers, start
from gan.app.fitting.callbacks import Pictures, Rates, Score, dry_reals, write_lost_settings, write_settings
from gan.app.fitting.card import describe
from gan.app.fitting.health import Health
from gan.app.fitting.keep import Keep
from gan.app.fitting.metrics import Record, first_and_last
from gan.app.fitting.pace import Bar
from gan.app.fitting.scores import Scores, names_of, scorer_of
from gan.app.fitting.start import Chosen
from gan.app.outputs import say
from gan.app.run import folder, options, settings_file
from gan.app.run.computer import Computer
from gan.app.run.folder import RunFolder
from gan.app.run.resumed import Resumed, newest_whole, to_resume, what_to_type, where_data_are
from gan.app.scoring.names import TITLES
from gan.files.errors import Damaged, UserError, table, this_rank
from gan.files.finite import NotFinite
from gan.files.system import quoted, signals
from gan.runs import Run, build, short_name
from gan.runs.run import made_to
from strategies import PhaseStrategy
from strategies.policies.choice import choose
from strategies.processes import agent, slurm
from strategies.processes.launchers import Launched
from strategies.processes.stopping import WARNING, Stopped, handle

ON = "python -m gan.fit"
SAMPLES = 200_000  # from a grid or checkpoint to the next, at most: as published for StyleGAN2-ADA
FEW = 25  # steps from a grid to the next, at least, but for runs of fewer than a hundred


def strategy_of(
    settings: Namespace, policy: str, kind: type[PhaseStrategy] = PhaseStrategy, **beside: Any
) -> PhaseStrategy:
    """The strategy, by which gan.fit and gan.verify train alike. `beside` is where it trains, not what."""
    check = "often" if settings.check and settings.debug else settings.check
    return kind(policy, check=check, check_replicas=settings.debug, **beside)


def trainer_of(settings: Namespace, strategy: PhaseStrategy, max_steps: int, **beside: Any) -> Trainer:
    """The Trainer. `beside` are devices, loggers, validation and callbacks, which change nothing in the training."""
    return Trainer(
        strategy=strategy,
        precision=settings.precision,
        max_steps=max_steps,
        sync_batchnorm=True,
        deterministic="warn" if settings.debug else None,
        detect_anomaly=settings.debug,
        enable_model_summary=False,
        enable_checkpointing=False,
        **beside,
    )


class Beginning:
    """What a training begins with: the game, and the folder and the checkpoint that all ranks agree on."""

    def __init__(
        self,
        settings: Namespace,
        resumed: tuple[RunFolder, Path] | None,
        place: Launched | None,
        out: Path,
        argv: Sequence[str],
        ranks: int = 1,
    ) -> None:
        """A new run is made for so many `ranks`. Its settings have the batch that was chosen for them."""
        self.ranks = ranks
        self.settings, self.resumed, self.place, self.out, self.argv = settings, resumed, place, out, argv
        now = options.run_settings(settings)
        said = {**now, "precision": settings.precision}
        self.trained = Resumed(resumed[0], settings.run, said) if resumed is not None else None
        others = self.trained is None or {"from_", "config_"}.intersection(self.trained.changed)
        self.said = {} if self.trained is None or others else folder.json_in(self.trained.folder.networks)
        purpose, ranks = ("dry" if settings.dry_run else "train", ranks) if self.trained is None else ("resume", 1)
        try:
            with made_to(purpose, self.said, ranks=ranks):
                self.run = build(settings.run, **now)
        except UserError as error:
            raise where_data_are(error, now) if self.trained is not None else error from None
        if ":" not in settings.run and "batch_size" in settings:
            settings.batch_size = self.run.batch_size
        self.summary, self.all_settings = describe(self.run.game), settings_file.dump(settings, settings.run)
        self.summary += f"\nsettings\n  {self.run.words}\n" if self.run.chosen else ""
        self.summary += f"\nbegun from\n  {settings.from_}\n" if settings.get("from_") else ""

    def texts(self, chosen: Chosen, launchers: list[str]) -> dict[Path, str]:
        """What the files of the run's folder say that are written before its first step."""
        found = {chosen.folder.settings: self.all_settings, chosen.folder.game: self.summary}
        if self.said:
            found[chosen.folder.networks] = json.dumps(self.said, indent=1) + "\n"
        if isinstance(data := self.run.data, GanData) and (train := facts_of(data.train)):
            found[chosen.folder.data] = json.dumps({"train": train, "val": facts_of(data.val)}) + "\n"
        if launchers and not self.settings.dry_run:
            begun_from = () if chosen.checkpoint is None else (chosen.checkpoint.name,)
            found[chosen.folder.launch] = start.launch_record(launchers, *begun_from)
        return found

    def choose(self, launchers: list[str], held: ExitStack) -> Chosen:
        """For the first rank. The files of a resumed run stay as they are until it trains; `held` gets its lock."""
        start.check_attempts(self.place)
        # A queue may give the number of a job again, so only one that has been requeued has begun a run.
        may_have = self.place is not None and (not self.place.launcher.queued or self.place.restarts)
        pick = partial(newest_whole, say=say)
        begun = start.begun_by(self.out, launchers, pick, partial(self._hold, held)) if may_have else None
        if begun is not None:
            chosen = begun
        elif self.resumed is not None:
            self._hold(held, self.resumed[0])
            chosen = Chosen(self.resumed[0], to_resume(self.settings.resume, *self.resumed, say))
        else:
            words = short_name(self.settings.run), self.settings.note
            chosen = Chosen(folder.create(Path(self.settings.out), "-".join(filter(None, words))))
            chosen.folder.fill(self.texts(chosen, launchers))
            self._hold(held, chosen.folder)
        dry = self.settings.dry_run
        if self.trained is not None and chosen.checkpoint is not None and not chosen.again and not dry:
            self.trained.check()
        return chosen

    def _hold(self, held: ExitStack, where: RunFolder) -> None:
        """Lock a run before its newest checkpoint is chosen: a training that is just ending may save one more."""
        if not self.settings.dry_run:
            held.enter_context(folder.training(where))


def start_training(beginning: Beginning, computer: Computer, strategy: PhaseStrategy) -> None:
    """Agree with the other ranks on the folder and the checkpoint, and train. A dry run ends before that."""
    settings, trained = beginning.settings, beginning.trained
    choose(strategy.choice, beginning.run.game.players)  # a dry run trains nothing that would refuse it
    if settings.resume == "auto" and trained is None:
        say(f"no run with a checkpoint in '{settings.out}' yet; starting a new one")
    with ExitStack() as held:
        choose_by = partial(beginning.choose, held=held)
        said = options.of_all_ranks(settings)
        chosen, launchers = start.chosen_by_first(beginning.place, choose_by, beginning.argv, said)
        where = chosen.folder
        if trained is not None and trained.changed and not chosen.again:
            say(str(trained))
            if chosen.checkpoint is not None and not trained.own:  # a game of one's own may change what it loads
                trained.check_networks(beginning.run.game, chosen.checkpoint)
        if settings.dry_run and trained is not None:
            say(beginning.all_settings, beginning.summary, f"a dry run: {where.path} stays as it is")
            return
        try:
            if not settings.dry_run:
                train(beginning, computer, strategy, launchers, chosen)
                return
            if isinstance(data := beginning.run.data, GanData):
                data.check(beginning.ranks)
            keeper(settings, beginning.run, where, often(settings, beginning.run), names_of(scorer_of(settings)))
            reals = dry_reals(beginning.run, where)
            seen = f"; {reals} shows what the networks see" if reals else ""
            say(beginning.all_settings, beginning.summary, f"saved in {where.path}{seen}")
        except UserError:
            if this_rank() == 0 and trained is None and not chosen.again:
                where.discard()
            raise


def train(
    beginning: Beginning, computer: Computer, strategy: PhaseStrategy, launchers: list[str], chosen: Chosen
) -> None:
    settings, run, texts = beginning.settings, beginning.run, beginning.texts(chosen, launchers)
    where, checkpoint, lockstep = chosen.folder, chosen.checkpoint, strategy.lockstep
    log = Record(where)
    lockstep.requeues, lockstep.saved = False, lambda: where.newest_checkpoint() is not None
    lockstep.advice = "" if agent.speaks() else f"{ON} --resume {quoted(where.path)}"
    every = often(settings, run)
    scorer = scorer_of(settings)
    keep = keeper(settings, run, where, every, names_of(scorer))
    scores = [] if scorer is None else [Scores(where, run, scorer, settings.score_every, keep, settings.score_count)]
    step = None if checkpoint is None else folder.step_of(checkpoint)
    beside = loggers.made(settings.logger, where, step) if this_rank() == 0 else []
    callbacks = [
        Bar(run.batch_size and run.batch_size / run.turns, every, log),
        Pictures(where, log, every),
        Score(run.scores),
        Health(run.max_steps),
        keep,
        *scores,
        *([Rates()] if any(each.schedule for each in run.game.players.values()) else []),
        loggers.Track(where, run, computer.words, log, yaml.safe_load(texts[where.settings]), beginning.trained),
        LambdaCallback(
            on_train_start=partial(write_settings, texts), on_save_checkpoint=partial(write_lost_settings, texts)
        ),
    ]
    trainer = trainer_of(
        settings,
        strategy,
        run.max_steps,
        accelerator=computer.accelerator,
        devices=list(computer.chosen) or computer.devices,
        num_nodes=computer.nodes,
        logger=[log, *beside],
        log_every_n_steps=settings.log_every,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1 if checkpoint is None else 0,
        callbacks=callbacks,
        default_root_dir=where.path,
    )
    take_new_data(run, settings.new_data)
    begin(settings, run, computer, where, checkpoint, keep.every)
    started = time.monotonic()
    try:
        trainer.fit(run.game, run.data, ckpt_path=None if checkpoint is None else str(checkpoint))
    except (NotFinite, Damaged) as error:
        if checkpoint is None:  # the game has read another file
            raise
        raise UserError(f"{checkpoint}: {error}; {what_to_type(where, checkpoint, '--resume ')}") from error
    except Stopped:
        keep.refuse_if_not_saved(trainer.is_global_zero)
        say(f"stopped at step {trainer.global_step}, all saved; go on with")
        say(f"  {ON} --resume {quoted(where.resuming(trainer.global_step))}")
        if slurm.started_by_srun() and (strategy.ending.signal == WARNING or slurm.is_preempted()):
            requeue(trainer.is_global_zero)
    else:
        finish(run, log, trainer, where, keep, step, time.monotonic() - started)
        keep.refuse_if_not_saved(trainer.is_global_zero)


def take_new_data(run: Run, wanted: bool) -> None:
    if isinstance(run.data, GanData):
        run.data.new_data = wanted
    elif wanted:
        raise UserError("--new-data is for runs that have a GanData; give your loader new_data=True")


def keeper(settings: Namespace, run: Run, where: RunFolder, every: int, made: Collection[str] = ()) -> Keep:
    """What saves and removes checkpoints. Validations are `every` so many steps; `made` are scores of --score-every."""
    best, by = settings.keep_best, settings.keep_best_by and settings.keep_best_by.rpartition("/")[2]
    known = {name.rpartition("/")[2]: name for name in (*run.scores, *made)}
    if best and not known:
        raise UserError(f"--keep-best {best}: this run has no scores to tell which is best; leave --keep-best out")
    if by is not None and by not in known:
        more = "" if made else "; type --score-every for others"
        raise UserError(f"--keep-best-by {by}: there is no such score, but {', '.join(known) or 'none'}{more}")
    score = known[by or next(iter(known))] if best else ""
    every = settings.score_every if score in made else every
    save_every = settings.save_every or every
    if best and save_every % every and every % save_every:
        raise UserError(
            f"--keep-best {best} needs checkpoints of steps with scores, which are {every}, {2 * every}, ..., and "
            f"those of --save-every {save_every} are others; type --save-every {every}"
        )
    return Keep(where, save_every, settings.save_in_background, settings.keep, best, score)


def often(settings: Namespace, run: Run) -> int:
    """The steps from grid to grid: as typed, else a tenth of all, of few a quarter; of SAMPLES at most, if known."""
    most = SAMPLES * run.turns // run.batch_size if run.batch_size else run.max_steps
    tenth, quarter = (-(-run.max_steps // parts) for parts in (10, 4))
    return settings.sample_every or max(1, min(max(tenth, min(quarter, FEW)), most))


def begin(
    settings: Namespace, run: Run, computer: Computer, where: RunFolder, checkpoint: Path | None, saves: int
) -> None:
    """Say what begins. `saves` are the steps from checkpoint to checkpoint."""
    resumed = f", from {checkpoint}" if checkpoint is not None else ""
    batch = f" of {run.batch_size} sample{'s' * (run.batch_size != 1)}" if run.batch_size else ""
    grids = f"a grid every {often(settings, run)}, " if hasattr(run.game, "show") else ""
    length = f"{run.max_steps:,} steps{batch}{resumed}; {grids}a checkpoint every {saves}"
    say(f"{short_name(settings.run)} on {computer.words}, strategy {settings.strategy}: {length}")
    shown = run.max_steps * (run.batch_size or 0) // run.turns
    if computer.kind == "cpu" and ":" not in settings.run and shown > 10 * SAMPLES:
        small = "--size 32 --kimg 40" if "kimg" in settings else "--max-steps 500"
        many = f"{shown:,} samples take days or years"
        say(f"without a GPU {many}; for a first look type {small}, and a smaller --width")
    if run.chosen:
        say(f"settings: {run.words}")
    if not hasattr(run.game, "show"):
        say("no grids: the game has no show(batch); docs/guide/game.md says how to write it")
    say(f"everything goes to {where.path}/")
    typed = checkpoint is not None and folder.is_checkpoint(Path(settings.resume or ""))
    step = folder.step_of(checkpoint) if typed else None
    if step is not None and (latest := max(where.steps(), default=step)) > step:
        say(f"its checkpoints of later steps stay; --resume {quoted(where.path)} would go on from step {latest}")


def finish(
    run: Run, log: Record, trainer: Trainer, where: RunFolder, keep: Keep, began: int | None, seconds: float
) -> None:
    """Print the scores and where the results are. `began` is the step at which this training began."""
    step = trainer.global_step
    if step == began:
        say(f"\nthe run is at step {step} already, so nothing was trained")
    else:
        say(f"\n{step} steps, {seconds / 60:.1f} minutes{f' for the last {step - began}' if began else ''}")
        for name, words in run.scores.items():
            first, last = first_and_last(log.rows, name) or (0, 0)
            if first:
                share = f" ({100 * last / first:.0f} % of the start)" if 0 < last < first else ""  # of an error
                say(f"{words}: {first:.4f} at the start, {last:.4f} now{share}")
        for name in dict.fromkeys(name for row in log.rows.values() for name in row if name.startswith("score/")):
            first, last = first_and_last(log.rows, name) or (0, 0)
            label = name.removeprefix("score/")
            say(f"{TITLES.get(label, label)}: {first:.4f} at the start, {last:.4f} now")
    saved, best = where.checkpoint(step), keep.best_checkpoint()
    saved = saved if saved.exists() else where.newest_checkpoint()
    go_on = f"{ON} --resume {quoted(where.resuming(step))} --max-steps {2 * max(step, run.max_steps)}"
    rows = (
        ("look at", next((grid for at, grid in reversed(where.grids().items()) if at <= step), None)),
        ("curves", where.curves if where.curves.exists() else None),
        ("metrics", where.metrics if where.metrics.exists() else None),
        ("scores", where.scores if where.scores.exists() else None),
        ("checkpoint", saved),
        ("best", best and f"{best[0]} ({keep.score} {best[1]:.4f})"),
        ("train on", saved and go_on),
    )
    say(*table([(title, str(value)) for title, value in rows if value is not None], left=(0, 1)))


def go_back_if_warned(place: Launched, out: Path, argv: Sequence[str]) -> None:
    """Let a job of Slurm that is warned before it trains go back into the queue at once. There is nothing to save.

    One whose time is too short to begin at all ends: it would be in the queue for ever.
    """

    def warned(*_: Any) -> None:
        launcher = start.launcher_of(place, argv)
        if place.restarts >= agent.SAME_STEP and not start.begun_by(out, [launcher] if launcher else []):
            if place.rank == 0:
                many = f"{place.restarts + 1} times before it had begun"
                say(f"job {slurm.job()} was warned {many}, so it does not go back into the queue; type a longer --time")
            raise SystemExit(1)
        requeue(place.rank == 0)

    handle(signals("SIGUSR1"), warned)


def requeue(first: bool) -> None:
    """Put the job back into the queue. It must be said before, because Slurm ends this process at once."""
    say(f"job {slurm.job()} goes back into the queue, to go on by itself")
    if first and (reason := slurm.requeue()):
        say(f"Slurm did not take it: {reason}")
