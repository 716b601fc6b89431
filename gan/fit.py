"""`python -m gan.fit`: train a run, on one device or many, and write pictures, curves and checkpoints."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from gan.app.command import command, run_ranks, take_place, working
from gan.app.outputs import run, say
from gan.app.run import job, options
from gan.files.system import quoted
from gan.runs import RUNS, short_name
from strategies.processes.launchers import launched
from strategies.processes.rendezvous import Rendezvous

if TYPE_CHECKING:
    from gan.app.run.computer import Computer


@command
def main(argv: list[str]) -> None:
    place = launched()  # first: what is wrong in the environment is named before it is read for defaults
    settings, resumed = options.parse(argv)
    if settings.list_runs:
        for name, function in RUNS.items():
            say(f"{name:16} {(function.__doc__ or '').partition(chr(10))[0]}")
        return
    take_place(place)
    first = place is None and os.environ.get("NODE_RANK", "0") == "0"
    if first and not (settings.slurm or settings.submit or settings.dry_run):
        say(f"{short_name(settings.run)}: loading Lightning, then the data")  # which takes a busy machine a minute
    with working():
        from lightning import seed_everything

        from gan.app.fitting import loggers, start, train
        from gan.app.run.computer import machine
        from gan.app.run.resumed import to_resume
        from gan.export import take_from_run

    if place is not None and place.launcher.queued:
        train.go_back_if_warned(place, Path(settings.out), argv)
    start.note_steps(place)
    seed_everything(settings.get("seed", 0), verbose=False)
    strategy = train.strategy_of(settings, settings.strategy, process_group_backend=settings.backend)
    if settings.slurm or settings.submit:
        script = job.script(argv, settings, strategy.is_dp)
        say(job.submit(script) if settings.submit else script)
        return
    begun = take_from_run(settings, argv)
    loggers.kinds(settings.logger)  # refuses what is not installed
    computer = machine(settings)
    start.allow_files(settings, computer.processes)
    out = Path(settings.out) if resumed is None else resumed[0].path.parent
    if place is None and computer.processes > 1:
        start.check_settings(settings, strategy, computer.devices, computer.kind == "cpu")
        if not settings.dry_run:
            if resumed is not None:
                to_resume(settings.resume, *resumed, say=lambda text: None, whole=False)
            start_ranks(settings, computer, out, [*argv, *begun])
            return
    least, most = options.nodes(settings.nodes)
    # Where hosts come and go, no batch fits their number.
    ranks = start.training_ranks(strategy, computer.processes) if least == most else 1
    begun_by = train.Beginning(settings, resumed, place, out, argv, ranks)
    train.start_training(begun_by, computer, strategy)


def start_ranks(settings: Namespace, computer: "Computer", out: Path, argv: list[str]) -> None:
    from gan.app.fitting import start

    def advice(launcher: str) -> str:
        begun = start.begun_by(out, [launcher])
        if begun is None or begun.checkpoint is None:
            return ""
        return f"Go on from its last checkpoint with\n  python -m gan.fit --resume {quoted(begun.folder.path)}"

    rendezvous = Rendezvous(settings.rendezvous or "", options.nodes(settings.nodes))
    run_ranks("gan.fit", argv, computer, rendezvous, settings.restarts, advice)


if __name__ == "__main__":
    run(main)
