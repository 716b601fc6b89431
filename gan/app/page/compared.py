"""The page of `gan.compare`: several runs beside each other, with what differs on top."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from gan.app.fitting import card, metrics
from gan.app.fitting.callbacks import SHOWN
from gan.app.outputs import say
from gan.app.page.run_tables import NOT_TYPED, PALE, charts, held_out, in_force, made_by, with_seeds
from gan.app.page.table import Cell, Charts, Part, Row, Table, document, sample_cell
from gan.app.run import folder, settings_file
from gan.app.run.reopen import NotMade, SavedRun, open_run, shown_columns
from gan.files.checkpoint import load
from gan.module import GanModule
from gan.runs import Run
from gan.sound import Sound
from strategies.batches.micro_batches import tensors

SAME = "The same held-out samples, and for what is drawn from noise the same seeds."
OTHERS = "Not all runs have the same held-out samples here. What is drawn from noise has the same seeds."
NO_COMPARISON = "These scores cannot be compared: no two runs have the same held-out samples here"
SOME_COMPARISON = "Scores can be compared only among runs that have the same held-out samples here"


def open_to_compare(which: str, device: str) -> SavedRun:
    """The run; where its data are gone, what its files say, with a game that has no networks and shows nothing."""
    try:
        opened = open_run(which, device=device)
        if not opened.gone:
            return opened
        why = opened.gone
    except NotMade as error:
        why = str(error.__cause__)
    found = folder.find(which, Path("runs"), None)
    assert found is not None  # as before
    where, checkpoint = found
    say(f"{where.path}: {why.partition(';')[0]}; the page has its settings, scores and curves, and no pictures")
    rows, settings = metrics.read(where.metrics), settings_file.read(where.settings)
    scores = {name: name for row in rows.values() for name in row if name.startswith("val/")}
    run, step = Run(GanModule(), None, 0, scores), load(checkpoint)["global_step"]
    return SavedRun(settings["run"], where, checkpoint, step, settings, run, frozenset())


def comparison_page(opened: Sequence[SavedRun]) -> str:
    names = titles(opened)
    parts = [
        Part("differs", "What differs", [differences(opened, names)]),
        Part("scores", "Scores", [scores(opened, names)]),
        Part("pictures", "Side by side", [pictures(opened, names)]),
        Part("curves", "Curves", [curves(opened, names)]),
    ]
    standing = "; ".join(f"{name}: step {each.step:,}" for name, each in zip(names, opened, strict=True))
    return document(f"{len(opened)} runs", ", ".join(names), standing, parts, "<code>python -m gan.compare</code>")


def titles(opened: Sequence[SavedRun]) -> list[str]:
    """A name for each run: that of its folder, with the step where two are of one run."""
    folders = [each.folder.path.resolve().name for each in opened]
    steps = [f"{name}, step {each.step}" for name, each in zip(folders, opened, strict=True)]
    kinds = (folders, steps, [str(each.checkpoint) for each in opened])
    return next((names for names in kinds if len(set(names)) == len(names)), kinds[-1])


def settings_of(opened: SavedRun) -> dict[str, Any]:
    """Every setting, and with which others the run was trained before."""
    before = [
        f"until step {step}: {words}" for step, words in card.old_settings(opened.folder).items() if step < opened.step
    ]
    return in_force(opened) | {"changed while it trained": "; ".join(before) or "no"}


def differences(opened: Sequence[SavedRun], names: Sequence[str]) -> Table:
    saved = list(map(settings_of, opened))
    values = {name: [each.get(name, "not a setting of it") for each in saved] for each in saved for name in each}
    rows = [
        Row(name, [Cell("none" if value is None else str(value)) for value in here])
        for name, here in values.items()
        if len({*map(_meant, here)}) > 1
    ]
    return Table(names, rows or [Row("settings", [Cell("all the same")] * len(saved))])


def _meant(value: Any) -> str:
    """What a setting comes to: 32 that is typed, and 32x32 that is chosen, are one size."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    width, _, height = text.removesuffix(NOT_TYPED).removesuffix(".0").partition("x")
    return width if height in ("", width) else f"{width}x{height}"


def scores(opened: Sequence[SavedRun], names: Sequence[str]) -> Table:
    found = [{score.name: score for score in card.scores(each.folder, each.run, each.step)} for each in opened]
    known = list(dict.fromkeys(name for each in found for name in each))
    here = {name: [each.get(name) for each in found] for name in known}
    hows, means = card.briefly([_how(names, here[name]) for name in known]), over_seeds(opened)
    rows = []
    for name, how in zip(known, hows, strict=True):
        values = [each.value if each else "–" for each in here[name]]
        rows.append(Row(name, list(map(Cell, [*values, *(each.get(name, "–") for each in means.values()), how]))))
    alike = _alike(_held_out(opened, SHOWN), names)
    groups = "; ".join(group for group in dict.fromkeys(alike) if alike.count(group) > 1)
    note = "" if len({*alike}) == 1 else f"{SOME_COMPARISON}: {groups}." if groups else f"{NO_COMPARISON}."
    return Table([*names, *means, "how it was computed"], rows, note)


def over_seeds(opened: Sequence[SavedRun]) -> dict[str, dict[str, str]]:
    """Each score's mean and deviation over runs that differ in their seed alone, by what to call these runs."""
    saved = [{**settings_of(each), "step": each.step} for each in opened]
    others = [name for name in saved[0] if name != "seed" and len({_meant(each.get(name)) for each in saved}) > 1]
    groups = defaultdict[str, dict[Any, SavedRun]](dict)
    for each, settings in zip(opened, saved, strict=True):
        groups["".join(f"{name} {settings.get(name)}, " for name in others)][settings.get("seed")] = each
    found = {}
    for words, group in groups.items():
        if len(group) > 1:
            runs = [{of.name: float(of.value) for of in card.scores(e.folder, e.run, e.step)} for e in group.values()]
            values = {name: [run[name] for run in runs] for name in runs[0] if all(name in run for run in runs)}
            title = f"{words}seeds {', '.join(map(str, group))}: mean ± deviation"
            found[title] = {name: f"{mean(of):.4g} ± {stdev(of):.2g}" for name, of in values.items()}
    return found


def _how(names: Sequence[str], found: Sequence[card.Scored | None]) -> str:
    """How a score of several runs was computed: said once if all were computed alike."""
    hows = {name: score.how for name, score in zip(names, found, strict=True) if score is not None}
    return next(iter(hows.values())) if len(set(hows.values())) == 1 else ". ".join(map(": ".join, hows.items()))


def pictures(opened: Sequence[SavedRun], names: Sequence[str], count: int = SHOWN) -> Table:
    """What each run makes of the first held-out samples, or of the same seeds. What is given is shown once."""
    batches = _held_out(opened, count)
    alike = _alike(batches, names)
    same = len({*alike}) == 1
    made = [made_by(each, batch) for each, batch in zip(opened, batches, strict=True)]
    rows = []
    for number, (group, each, batch) in enumerate(zip(alike, opened, batches, strict=True)):
        if alike.index(group) == number:
            columns = shown_columns(each.run.game, batch)
            given = {title: column for title, column in columns.items() if title not in made[number]}
            rows += [_row(title if same else f"{title}: {group}", column) for title, column in given.items()]
    for title in dict.fromkeys(title for columns in made for title in columns):
        shows = [each for each in zip(names, made, opened, strict=True) if title in each[1]]
        named = [(name, with_seeds(each.run.game, _row(title, own[title]), count)) for name, own, each in shows]
        rows += [replace(row, title=f"{title}: {name}") for name, row in named]
    seeds = all(row.cells[0].words for row in rows)  # then each picture says which
    count = max((len(row.cells) for row in rows), default=0)
    rows = [replace(row, cells=[*row.cells, *[Cell()] * (count - len(row.cells))]) for row in rows]
    return Table(["" if seeds else f"picture {number}" for number in range(count)], rows, SAME if same else OTHERS)


def curves(opened: Sequence[SavedRun], names: Sequence[str]) -> Charts:
    found: dict[str, metrics.Panel] = {}
    for name, each in zip(names, opened, strict=True):
        for group, panel in metrics.panels(metrics.until(each.folder, each.step)).items():
            for label, points in panel.items():
                found.setdefault(f"{group}: {label}", {run: [] for run in names})[name] = points
    return charts(found, PALE)


def _row(title: str, samples: Iterable[Tensor] | Sound) -> Row:
    return Row(title, list(map(sample_cell, samples)))


def _held_out(opened: Sequence[SavedRun], count: int) -> list[Any]:
    here = [any(each.run.game.named_children()) and not each.gone for each in opened]
    return [held_out(each, count) if there else {} for each, there in zip(opened, here, strict=True)]


def _alike(batches: Sequence[Any], names: Sequence[str]) -> list[str]:
    """For each batch the names of all that have the same numbers. A batch without samples is like no other."""
    found = [list(tensors(batch)) or [torch.tensor(number)] for number, batch in enumerate(batches)]
    same = [[len(one) == len(each) and all(map(torch.equal, one, each)) for one in found] for each in found]
    return [", ".join(compress(names, row)) for row in same]
