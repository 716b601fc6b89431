"""What a command writes to, with something else in its place: a file, a folder, a pipe, a link to nowhere."""

from tests.faults.case import Case
from tests.faults.kinds.damage import damage_bytes, not_a_file
from tests.faults.known import words

PLACES = {  # in a run's folder, by the command that writes there
    "resume": (
        *("metrics.csv", "curves.png", "game.txt", "launch.json", "trained.json", "samples"),
        "checkpoints/step-000003.ckpt.part",
    ),
    "sample": ("samples", "samples/show.png"),
    "export": ("export", "export/step-000002", "export/step-000002/README.txt"),
    "evaluate": ("evaluation-step-000002.json",),
    "mean": ("styles", "styles/mean-of-*.pt", "samples/transfer-from-mean-to-0.png"),
}


def outputs_in_the_way(case: Case) -> None:
    """One of the places that a command writes to is damaged, or is something else."""
    what = case.chance.choice(("resume", "resume", "resume", "sample", "export", "evaluate", "mean"))
    run = case.copy("folder" if what in ("evaluate", "mean") else "faces")
    place = case.chance.choice(PLACES[what])
    if "*" in place:
        case.run("sample", run, "transfer", "--from", "mean", "--to", "0")
    path = next(run.glob(place), run / place)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and case.chance.random() < 0.5:
        case.say(damage_bytes(path, case.chance))
    else:
        case.say(not_a_file(path, case.chance))
    if what == "mean":
        case.run("sample", run, "transfer", "--from", "mean", "--to", "0")
    else:
        case.run(what, *words(what, run), refusable=False)
