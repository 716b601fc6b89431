"""What a run is, in facts, in scores and as its card: for its page, loggers and exported networks. A game as text."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from gan.app.fitting import metrics
from gan.app.run import settings_file
from gan.app.run.folder import RunFolder
from gan.app.run.reopen import has_numbers
from gan.app.scoring.names import BY_FEATURES, TITLES, title_of
from gan.files.disk import read_text
from gan.files.errors import markdown, reading
from gan.module import GanModule
from gan.phase import Player, parameters_of
from gan.runs import Run, find

LICENCE = "licence of the data"
UNTIL = "settings until step "  # in trained.json, and on the card
MOST = 1_000_000  # bytes of a file of scores


class Scored(NamedTuple):
    """A score of a run, and how it was computed; by gan.evaluate of so many pictures."""

    name: str
    value: str
    how: str
    pictures: int = 0


def run_notes(folder: RunFolder) -> dict[str, str]:
    """What trained.json notes: the computer, changed settings, names at services. Nothing if it cannot be read."""
    try:
        return {name: str(value) for name, value in json.loads(read_text(folder.trained, MOST)).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def old_settings(folder: RunFolder) -> dict[int, str]:
    """The steps after which the run went on with other settings, with those of before."""
    steps = ((name.removeprefix(UNTIL), words) for name, words in run_notes(folder).items() if name.startswith(UNTIL))
    return {int(step): words for step, words in steps if step.isdecimal()}


def first_sentence(name: str) -> str:
    return (find(name).__doc__ or name).splitlines()[0]


def facts(
    folder: RunFolder, run: Run, step: int, settings: Mapping[str, Any], what: str = "samples", size: str = ""
) -> dict[str, str]:
    data, batch = settings.get("data"), run.batch_size or settings.get("batch_size")
    sizes = {each: sum(weight.numel() for weight in net.parameters()) for each, net in run.game.named_children()}
    own = run.data
    counts = [f"{len(own.train):,} to train on", f"{len(own.val):,} held out"] if has_numbers(own) else []
    kinds = getattr(getattr(own, "train", None), "kinds", ())
    _, time = metrics.clock(metrics.read(folder.metrics, step))  # training may be writing newer ones
    return {
        "run": f"{folder.path.resolve().name}: {first_sentence(settings['run'])}",
        "trained": f"{step:,} of {run.max_steps:,} steps" + (f", {batch} {what} a step" if batch else ""),
        "time": time or "not known",
        "on": run_notes(folder).get("computer", "not known"),
        "data": Path(data).name if isinstance(data, str) and data else "made by the run itself",
        **({"kinds": f"a: {kinds[0]}, b: {kinds[1]}"} if kinds else {}),
        **({"begun from": begun_from(settings)} if settings.get("from_") else {}),
        **({"direction": str(settings["direction"])} if "direction" in settings else {}),
        what: ", ".join([*counts, *([size] if size else [])]) or "not counted",
        LICENCE: licence(data),
        "parameters": ", ".join(f"{each} {size:,}" for each, size in sizes.items() if size),
        **{name: words for name, words in run_notes(folder).items() if name.startswith(UNTIL)},
        **({"settings": run.words} if run.chosen else {}),
        "computed": f"strategy {settings.get('strategy')}, precision {settings.get('precision')}",
    }


def begun_from(settings: Mapping[str, Any]) -> str:
    """The file of published weights that a training began with. Its networks have learned from other data."""
    frozen = f", freeze-d {settings['freeze_d']}" if settings.get("freeze_d") else ""
    return f"{Path(settings['from_']).name}{frozen}; the data of that file and their licence count too"


def licence(data: object) -> str:
    """The first line of the file of a licence that lies with the data."""
    for path in sorted(Path(data).glob("LICEN[CS]E*")) if isinstance(data, str) and data else ():
        with reading(f"'{path}'"):
            return next(filter(None, map(str.strip, read_text(path, MOST).splitlines())), path.name)
    return "not given"


def scores(folder: RunFolder, run: Run, step: int) -> list[Scored]:
    """The last scores up to this step, of validation and --score-every, and this step's of gan.evaluate.

    If gan.evaluate has computed a score several times, that of the most pictures counts, and of these the newest. A
    score on other data than the run's stands by itself, and names the data.
    """
    rows, found = metrics.read(folder.metrics, step), []
    own = settings_file.read(folder.settings).get("data") if folder.settings.is_file() else None
    held_out = f"on {len(run.data.val):,} held-out samples" if has_numbers(run.data) else "at validation"
    for name, words in run.scores.items():
        both, last = metrics.first_and_last(rows, name), _last(rows, name)
        if both and (last or not step):  # that of step 0 is the score of untrained networks
            how = f"step {last}; {held_out}; {both[0]:.4g} at first; lower is better"
            found.append(Scored(words, f"{both[1]:.4g}", how))
    while_training = partial(_while_training, rows=rows, step=step)
    for path in filter(Path.is_file, [folder.scores, *folder.evaluations(step)]):
        read = while_training if path == folder.scores else partial(_evaluated, own=own)
        with reading(f"'{path}'"):
            found += read(json.loads(read_text(path, MOST)))
    return list({each.name: each for each in sorted(found, key=lambda each: each.pictures)}.values())


def _while_training(said: dict[str, Any], rows: Mapping[int, Mapping[str, float]], step: int) -> Iterator[Scored]:
    """What scores.json has; of an earlier step than its own, what metrics.csv has."""
    for name, last in said["scores"].items():
        at = said["step"] if said["step"] <= step else _last(rows, name)
        if at is not None and (at or not step):
            label, value = name.removeprefix("score/"), last if at == said["step"] else rows[at][name]
            title = title_of(label, said["how"].get("true", "")) if label in TITLES else label
            yield Scored(title, f"{value:.4g}", f"step {at}; {_words(said['how'])}")


def _last(rows: Mapping[int, Mapping[str, float]], name: str) -> int | None:
    return max((number for number, row in rows.items() if name in row), default=None)


def _evaluated(said: dict[str, Any], own: str | None) -> Iterator[Scored]:
    """What a file of gan.evaluate has; `own` are the data of the run."""
    data = said.get("settings", {}).get("data", own)
    on = "" if data == own or Path(data).resolve() == Path(own or "").resolve() else f", on {Path(data).name}"
    how = f"gan.evaluate, step {said['step']}, {said['pictures']} samples{on}"
    for task, figures in said["scores"].items():
        for name, value in figures.items():
            if name not in TITLES or isinstance(value, str):  # infinities and NaN are words there
                continue
            title = ("" if len(said["scores"]) == 1 else f"{task}: ") + title_of(name, said.get("true", ""))
            about = said["about"].get("features" if name in BY_FEATURES else name.partition("_")[0])
            about = {"true": said.get("true", ""), **about} if about and name in BY_FEATURES else about
            yield Scored(title + on, f"{value:.4g}", f"{how}; {_words(about)}" if about else how, int(said["pictures"]))


def briefly(hows: list[str]) -> list[str]:
    """These words, where each that is the same as the one before says so."""
    return ["the same" if k and how == hows[k - 1] else how for k, how in enumerate(hows)]


def card(folder: RunFolder, run: Run, step: int, settings: Mapping[str, Any], data_licence: str | None = None) -> str:
    """The card of the run, in Markdown. `data_licence` is what a person says of it."""
    known = facts(folder, run, step, settings)
    known |= {LICENCE: data_licence} if data_licence else {}
    parts = [f"# {folder.path.resolve().name}, step {step:,}", markdown(["", ""], known.items())]
    if found := scores(folder, run, step):
        both = zip(found, briefly([each.how for each in found]), strict=True)
        rows = ((each.name, each.value, how) for each, how in both)
        parts.append(markdown(["score", "", "how it was computed"], rows))
    return "\n\n".join(parts) + "\n"


def _words(about: Mapping[str, Any]) -> str:
    """What was recorded about a score, in words."""
    said = {name: ", ".join(map(str, each)) if isinstance(each, list) else each for name, each in about.items()}
    said |= {name: f"({_words(each)})" for name, each in said.items() if isinstance(each, Mapping)}
    return "; ".join(f"{name} {'no' if each is False else each}" for name, each in said.items() if each != "")


# ---- a game as text ----


def describe(game: GanModule) -> str:
    """The text that `--dry-run` prints, and that every run has in game.txt."""
    game.assemble()
    lines = [f"game {type(game).__name__}", "", "players"]
    own = parameters_of(tuple(game.players.values()))
    for player in game.players.values():
        lines.append(f"  {player.name}: {_parameters(player, own)}, {_recipe(player)}")
        children = ((name, child) for name, child in player.module.named_children() if [*child.parameters()])
        lines += [f"    {name}: {type(child).__name__}, {_count(child)}" for name, child in children]
    lines += ["", "phases, in every step"]
    for phase in game.phases:
        notes = [f"teaches {', '.join(phase.learners)}"]
        notes += [f"every {phase.every} steps"] if phase.every > 1 else []
        notes += [f"from step {phase.start} on"] if phase.start else []
        notes += [f"until step {phase.until}"] if phase.until is not None else []
        notes += ["in steps of its choice"] if phase.when is not None else []
        notes += ["with updates of its choice"] if phase.update is not None else []
        notes += [f"in {phase.micro_batches} micro-batches"] if phase.micro_batches > 1 else []
        notes += ["second order"] if phase.second_order else []
        notes += [f"by {_made(phase.optimizer)}"] if phase.optimizer is not None else []
        lines.append(f"  {phase.name}: {'; '.join(notes)}")
    return "\n".join(lines) + "\n"


def _parameters(player: Player, own: dict[str, dict[str, nn.Parameter]]) -> str:
    said = f"{_count(player.module)} parameters"
    parameters = list(player.module.parameters())
    learning = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    if not player.frozen and not all(parameter.requires_grad for parameter in parameters):
        said += f", {learning:,} of them learn"
    has = {id(parameter): parameter.numel() for parameter in parameters}
    for name, stored in own.items():
        shared = sum(has.get(id(parameter), 0) for parameter in stored.values())
        said += f", {shared:,} of them stored by {name}" if shared and name != player.name else ""
    return said


def _count(module: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in module.parameters()):,}"


def _decay(player: Player) -> str:
    return f"from {player.decay(0)} on" if callable(player.ema) else str(player.ema)


def _per(what: str) -> str:
    return "" if what == "update" else f" per {what}"


def _made(optimizer: object) -> str:
    made = getattr(optimizer, "func", optimizer)
    settings = ", ".join(f"{key}={value}" for key, value in getattr(optimizer, "keywords", {}).items())
    return f"{getattr(made, '__name__', type(made).__name__)}({settings})"


def _recipe(player: Player) -> str:
    if player.follows is not None:
        return f"follows {player.follows}, ema {_decay(player)}{_per(player.ema_per)}"
    if player.frozen:
        return "frozen" if player.saved and player.weights is None else "frozen, not in checkpoints"
    notes = [_made(player.optimizer)]
    notes += ["with a schedule" + _per(player.schedule_per)] if player.schedule else []
    notes += [f"ema {_decay(player)}{_per(player.ema_per)}"] if player.ema is not None else []
    notes += [f"clip {player.clip}"] if player.clip is not None else []
    notes += ["changed after each update"] if player.after is not None else []
    notes += ["parts frozen in some steps"] if player.freeze is not None else []
    return ", ".join(notes)
