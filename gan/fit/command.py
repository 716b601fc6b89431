"""`python -m gan.fit`: train a run, on one device or many, and write pictures, curves and checkpoints."""

import logging
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jsonargparse import Namespace
from lightning import Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gan.errors import UserError, refuse
from gan.fit import folder, options
from gan.fit.callbacks import Bar, Keep, Pictures, Score, WriteSettings
from gan.fit.describe import describe
from gan.fit.folder import RunFolder
from gan.fit.metrics import Record
from gan.runs import RUNS, Run, build, short_name
from strategies import PhaseStrategy
from strategies.processes.stopping import Stopped


@dataclass(frozen=True)
class Computer:
    """The devices that a run computes on."""

    accelerator: str
    devices: int
    nodes: int

    @property
    def processes(self) -> int:
        """On all nodes together."""
        return self.devices * self.nodes


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 after a message about what was wrong."""
    try:
        _fit(argv)
    except UserError as error:
        return refuse(error)
    return 0


def _fit(argv: list[str] | None) -> None:
    settings, resumed = options.parse(argv)
    if settings.list_runs:
        for name, function in RUNS.items():
            say(f"{name:16} {function.__doc__.splitlines()[0]}")
        return
    if int(os.environ.get("NODE_RANK", 0)) > 0:
        # Lightning would take the first process of every node for rank 0.
        rank_zero_only.rank = rank_zero_only.rank or 1
    quiet()
    seed_everything(settings.get("seed", 0), verbose=False)
    check = "often" if settings.check and settings.debug else settings.check
    strategy = PhaseStrategy(settings.strategy, check=check, check_replicas=settings.debug)
    computer = machine(settings)
    if strategy.threaded and (batch := settings.get("batch_size", 0)) % computer.devices:
        fits = -(-batch // computer.devices) * computer.devices
        raise UserError(f"batch {batch} is not divisible by {computer.devices} devices; try --batch-size {fits}")
    run = build(settings.run, **options.run_settings(settings))
    summary, all_settings = describe(run.game), options.dump(settings, settings.run)
    if settings.resume == "auto" and resumed is None:
        say(f"no run with a checkpoint in '{settings.out}' yet; starting a new one")

    # Rank 0 makes the folder; the others write nothing. The files of a resumed run stay as they are until it trains.
    first = rank_zero_only.rank == 0
    if resumed is not None:
        where, checkpoint = resumed
    else:
        where = folder.create(Path(settings.out), short_name(settings.run)) if first else RunFolder(Path(settings.out))
        checkpoint = None
    texts = {where.settings: all_settings, where.game: summary}
    if first and resumed is None:
        for path, text in texts.items():
            path.write_text(text)  # nobody else knows this folder yet
    if settings.dry_run:
        ends = f"saved in {where.path}" if resumed is None else f"a dry run: {where.path} stays as it is"
        say(*texts.values(), ends)
        return
    try:
        train(settings, computer, strategy, run, where, checkpoint, texts)
    except UserError:
        if first and resumed is None:
            where.discard()
        raise


def train(
    settings: Namespace,
    computer: Computer,
    strategy: PhaseStrategy,
    run: Run,
    where: RunFolder,
    checkpoint: Path | None,
    texts: Mapping[Path, str],
) -> None:
    """Make the Trainer, train, and print how it ended."""
    log, score = Record(where), Score(run.scores)
    strategy.advice = f"python -m gan.fit --resume {where.path}"
    every = settings.sample_every or max(1, -(-run.max_steps // 10))
    trainer = Trainer(
        strategy=strategy,
        accelerator=computer.accelerator,
        devices=computer.devices,
        num_nodes=computer.nodes,
        precision=settings.precision,
        max_steps=run.max_steps,
        sync_batchnorm=True,
        logger=[log, *extra_loggers(settings, where)],
        log_every_n_steps=settings.log_every,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1 if checkpoint is None else 0,
        callbacks=[
            Bar(settings.get("batch_size")),
            Pictures(where, log, every),
            score,
            Keep(where, settings.save_every or every),
            WriteSettings(texts),
        ],
        deterministic="warn" if settings.debug else None,
        detect_anomaly=settings.debug,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=where.path,
    )
    begin(settings, run, computer, where, checkpoint)
    started = time.monotonic()
    try:
        trainer.fit(run.game, run.data, ckpt_path=None if checkpoint is None else str(checkpoint))
    except Stopped:
        step = trainer.global_step
        say(f"stopped at step {step}, all saved; go on with\n  python -m gan.fit --resume {where.resuming(step)}")
    except UserError:
        end_other_ranks(trainer)
        raise
    else:
        finish(run, score, trainer, where, time.monotonic() - started)


def machine(settings: Namespace) -> Computer:
    """The devices to compute on: those of the settings, or else those of this machine. Refuses what is not there."""
    gpus = torch.cuda.device_count()
    accelerator = settings.accelerator if settings.accelerator != "auto" else ("gpu" if gpus else "cpu")
    if accelerator == "gpu" and not gpus:
        raise UserError("there is no GPU here; type --accelerator cpu")
    if accelerator == "cpu" and settings.precision == "16-mixed":
        raise UserError("--precision 16-mixed needs a GPU; type --precision bf16-mixed")
    launched = options.launched_ranks()
    if launched is not None:
        world = int(os.environ["WORLD_SIZE"])
        if settings.devices not in ("auto", launched):
            raise UserError(
                f"torchrun started {launched} ranks here and --devices says {settings.devices}; leave --devices out"
            )
        return Computer(accelerator, launched, world // launched)
    devices = settings.devices
    if devices == "auto":
        single = settings.strategy == "single"
        devices = 1 if single else gpus if accelerator == "gpu" else min(2, os.cpu_count() or 1)
    if accelerator == "gpu" and devices > gpus:
        raise UserError(f"--devices {devices}: there are {gpus} GPUs here; type --devices {gpus}")
    if accelerator == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // devices))
    return Computer(accelerator, devices, settings.num_nodes)


def extra_loggers(settings: Namespace, where: RunFolder) -> list[Logger]:
    """The logger that the settings name, beside the run's own metrics.csv. Its package must be installed."""
    if settings.logger is None:
        return []
    from lightning.pytorch import loggers

    try:
        if settings.logger == "tensorboard":
            return [loggers.TensorBoardLogger(where.path, name="", version="tensorboard")]
        return [loggers.WandbLogger(name=where.path.name, save_dir=where.path, project="gan")]
    except ModuleNotFoundError as error:
        raise UserError(f"--logger {settings.logger} needs its package: pip install {settings.logger}") from error


def begin(settings: Namespace, run: Run, computer: Computer, where: RunFolder, checkpoint: Path | None) -> None:
    """Print what will be trained, on what, and where the files go."""
    processes = f"{computer.processes} {computer.accelerator.upper()} process{'es' if computer.processes > 1 else ''}"
    if settings.strategy == "dp" and computer.devices > 1:
        processes = f"{computer.devices} {computer.accelerator.upper()} replicas in one process"
    how = f"{processes}, strategy {settings.strategy}"
    resumed = f", from {checkpoint}" if checkpoint is not None else ""
    batch = f" of {settings.batch_size} samples" if "batch_size" in settings else ""
    say(f"{short_name(settings.run)} on {how}: {run.max_steps} steps{batch}{resumed}")
    say(f"everything goes to {where.path}/")
    step = None if checkpoint is None else folder.step_of(checkpoint)
    if step is not None and (latest := max(where.steps(), default=step)) > step:
        say(f"its checkpoints of later steps stay; --resume {where.path} would go on from step {latest}")


def finish(run: Run, score: Score, trainer: Trainer, where: RunFolder, seconds: float) -> None:
    """Print the scores and where the results are."""
    say(f"\n{trainer.global_step} steps, {seconds / 60:.1f} minutes")
    for name, words in run.scores.items():
        first, last = score.first.get(name), score.last.get(name)
        if first:
            say(f"{words}: {first:.4f} at the start, {last:.4f} now ({100 * last / first:.0f} % of the start)")
    step = trainer.global_step
    saved = where.checkpoint(step)
    rows = (
        ("look at", max(where.samples.glob("step-*.png"), default=None)),
        ("curves", where.curves),
        ("metrics", where.metrics),
        ("checkpoint", saved if saved.exists() else where.newest_checkpoint()),
        ("train on", f"python -m gan.fit --resume {where.resuming(step)} --max-steps {2 * run.max_steps}"),
    )
    for title, value in rows:
        if value is not None:
            say(f"  {title:11}{value}")


def end_other_ranks(trainer: Trainer) -> None:
    """End the ranks that this process started: they wait in a collective that this rank will not join."""
    launcher = trainer.strategy.launcher
    for process in getattr(launcher, "procs", ()):
        process.kill()


@rank_zero_only
def say(*lines: str, sep: str = "\n") -> None:
    """Print on the first rank only."""
    print(*lines, sep=sep, flush=True)


def quiet() -> None:
    """Hide Lightning's hints for beginners, which do not apply here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings(
        "ignore", message=".*(LeafSpec|nn.functional.all_gather).* is deprecated", module="lightning"
    )
