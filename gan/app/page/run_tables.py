"""Tables of what a run made, which `samples/inspect.ipynb` and the page of `samples/gallery.py` show.

Where a game has not what a table shows, such as masks, the table is empty and its note says so.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate
from torchvision import tv_tensors

from datasets.augment import Prepared, as_item, to_tensors
from gan.app.fitting import card, metrics
from gan.app.fitting.callbacks import SHOWN
from gan.app.page.table import Cell, Charts, Row, Table, sample_cell, spread
from gan.app.run import settings_file
from gan.app.run.reopen import SavedRun, first_batches, first_samples, has_numbers, shown_columns
from gan.app.sampling import grids
from gan.app.sampling.painter import Painter, has_styles
from gan.files.errors import printable
from gan.games.from_noise import FromNoise
from gan.module import GanModule
from gan.sound import Sound

COARSE = 16  # the size at which pictures are compared with training pictures
ROWS = 4  # of a grid of seeds, on a page: it has many columns, and a page should stay small
SPECK = 0.002  # a region of a smaller share of its picture gets no row
PALE = "Pale: as logged. Full: the running mean over a twentieth of the curve."
WELL = {
    "told_apart": "the share of pairs in which a picture scores above a fake, 50 % is guessing.",
    "memorised": "the same of training pictures and held-out ones, 50 % is right.",
    "diversity": "how much fakes differ, as a share of what pictures do, 100 % is right.",
    "augmented": "the probability with which pictures are augmented.",
}
NOT_TYPED = " (not typed)"
NOTHING_LOGGED = "This run has logged nothing yet."
NO_MASKS = "This game does not paint masks, so there are none to show."
NO_STYLES = "This game has no styles of single regions, so there are none to exchange."
NO_PICTURES = "This game does not learn from pictures, or shows none that it makes, so none can be compared."


def facts(opened: SavedRun) -> Table:
    known = card.facts(opened.folder, opened.run, opened.step, opened.settings, *_samples(opened))
    scores = (f"{each.name}: {each.value} ({each.how})" for each in card.scores(opened.folder, opened.run, opened.step))
    known["scores"] = "; ".join(scores) or "none yet"
    known["opened"] = opened.checkpoint.name
    return Table(rows=[Row(name, [Cell(value)]) for name, value in known.items()])


def videos(opened: SavedRun) -> Table:
    paths = sorted(path for path in opened.folder.samples.glob("*.*") if path.suffix in (".gif", ".mp4"))
    return Table(rows=[Row(path.name, [Cell(video=path.read_bytes())]) for path in paths if path.is_file()])


def settings(opened: SavedRun) -> Table:
    rows = in_force(opened).items()
    return Table(rows=[Row(name, [Cell("" if value is None else str(value))]) for name, value in rows])


def in_force(opened: SavedRun) -> dict[str, Any]:
    """Every setting: of those that were not typed, what the configuration chose."""
    saved, chosen = settings_file.read(opened.folder.settings), opened.run.chosen
    return saved | {name: f"{chosen[name]}{NOT_TYPED}" for name in chosen if name in saved and saved[name] is None}


def curves(opened: SavedRun) -> Charts:
    found, kimg, words = _logged(opened)
    found.pop("health", None)
    changes, note = card.old_settings(opened.folder), f"{PALE} {words}." if words else PALE
    note += " Dotted: from there on the run had other settings." if changes else ""
    return charts(found, note, kimg, changes) if found else Charts({}, NOTHING_LOGGED)


def health(opened: SavedRun) -> Charts:
    found, kimg, _ = _logged(opened)
    panel = {"health": found["health"]} if "health" in found else {}
    well = " ".join(f"{name}: {words}" for name, words in WELL.items() if name in panel.get("health", ()))
    return charts(panel, well, kimg)


def _logged(opened: SavedRun) -> tuple[dict[str, metrics.Panel], float, str]:
    rows = metrics.until(opened.folder, opened.step)
    return metrics.panels(rows), *metrics.clock(rows)


def charts(
    panels: Mapping[str, metrics.Panel], note: str, kimg: float = 0.0, changes: Mapping[int, str] | None = None
) -> Charts:
    drawn = partial(metrics.drawn, form="svg", kimg=kimg, changes=changes)
    return Charts({group: drawn({group: panel}) for group, panel in panels.items()}, note)


def over_time(opened: SavedRun, most: int = 12) -> Table:
    """The grids that training drew: the same samples at several steps. The checkpoint's own is drawn if it has none.

    A column of the grid becomes a row here, but in a grid of seeds all stay in their places. A row that is the same at
    every step, such as the truth, is shown once.
    """
    drawn = [(step, path) for step, path in opened.folder.grids().items() if step <= opened.step]
    if not drawn:
        return Table(note="This run has drawn no grids yet.")
    drawn = [drawn[k] for k in spread(len(drawn), most)]
    moments = [f"step {step:,}" for step, _ in drawn]
    sheets = [Image.open(path).convert("RGB") for _, path in drawn]

    # What the game shows now says how many columns a grid has, and of what size.
    columns = {} if opened.gone else shown_columns(opened.run.game, held_out(opened, SHOWN))
    if columns and drawn[-1][0] < opened.step:
        moments.append(f"step {opened.step:,}")
        sheets.append(grids.grid(columns, SHOWN))
    size = next((grids.picture(column[0]).size for column in columns.values()), (1, 1))
    pieces = [_cut(sheet, len(columns), size) for sheet in sheets if columns]
    if not pieces or not all(pieces):
        rows = [Row("grid", [Cell(pictures=tuple(sheets))])]
        return Table([""], rows, "The grids of training.", moments)
    rows = []
    for column, title in enumerate(columns):
        # On another number of ranks a grid has other numbers of samples.
        cells = [Cell(pictures=frames) for frames in zip(*(piece[column] for piece in pieces), strict=False)]
        still = all(each == cell.pictures[0] for cell in cells for each in cell.pictures)
        rows.append(Row(title, [Cell(pictures=cell.pictures[:1]) for cell in cells] if still else cells))
    if seeds_of(opened.run.game, ROWS).keys() == columns.keys():
        each = zip(*(with_seeds(opened.run.game, row, ROWS).cells for row in rows), strict=True)
        rows = [Row(f"row {number}", cells) for number, cells in enumerate(each, 1)]
        note = f"The same seeds at every step, from the first {ROWS} rows of each grid."
        return Table([*columns], rows, note, moments)
    what = "sound" if any(isinstance(each, Sound) for each in columns.values()) else "picture"
    titles = [f"{what} {number}" for number in range(min(len(piece[0]) for piece in pieces))]
    return Table(titles, rows, "The same held-out samples at every step.", moments)


def seeds_of(game: GanModule, rows: int) -> dict[str, list[int]]:
    """The seeds of the columns of a grid with so many rows, if the game draws from seeds."""
    found = game.shown_numbers(rows) if isinstance(game, FromNoise) else {}
    return {title: seeds.tolist() for title, seeds in found.items()}


def with_seeds(game: GanModule, row: Row, rows: int) -> Row:
    """A row that was a column of a grid of seeds: at most so many `rows` of the grid, each picture above its seed."""
    seeds = seeds_of(game, rows).get(row.title)
    cells = zip(row.cells, seeds or (), strict=False)
    return replace(row, cells=[replace(cell, words=f"seed {seed}") for cell, seed in cells]) if seeds else row


def masks(opened: SavedRun, count: int = SHOWN) -> Table:
    if not paints_masks(opened):
        return Table(note=NO_MASKS)
    batch = held_out(opened, count)
    columns = {"picture": batch["image"], "mask": batch["label"]}
    if "edges" in batch:
        columns["edges"] = 1 - 2.0 * batch["edges"].unsqueeze(1)
    if has_styles(opened):
        painter = Painter(opened)
        chosen = [painter.picture(str(number)) for number in range(len(batch["image"]))]
        columns["painted anew"] = [painter.paint(picture, painter.styles(picture)) for picture in chosen]
        note = "Painted anew: from the mask and the styles of the picture itself."
    else:
        columns |= made_by(opened, batch)
        note = "What the game made of each mask."
    rows = [Row(title, list(map(sample_cell, row))) for title, row in columns.items()]
    return Table([f"picture {number}" for number in range(len(batch["image"]))], rows, note)


def sounds(opened: SavedRun, count: int = 4) -> Table:
    """Held-out sounds beside what the game makes of them, to listen to."""
    columns = shown_columns(opened.run.game, held_out(opened, count))
    rows = [Row(title, list(map(sample_cell, each))) for title, each in columns.items() if isinstance(each, Sound)]
    if not rows:
        return Table(note="This game makes no sounds.")
    note = "Spectrograms: time goes to the right, pitch goes up, and loud is bright."
    return Table([f"sound {number}" for number in range(len(rows[0].cells))], rows, note)


def legend(opened: SavedRun, count: int = SHOWN) -> Table:
    """The colours of the labels in the masks that `masks` shows, with each label's share of the pixels."""
    if not paints_masks(opened):
        return Table(note=NO_MASKS)
    label = held_out(opened, count)["label"]
    own = getattr(getattr(opened.run.data, "val", None), "label_names", ())
    names = own or [str(number) for number in range(int(label.max()) + 1)]
    shares = label.flatten().bincount(minlength=len(names)) / label.numel()
    rows = [
        Row(name, [Cell(f"{shares[number]:.1%}")], grids.colour(number))
        for number, name in enumerate(names)
        if shares[number] > 0
    ]
    return Table(rows=rows)


def nearest(opened: SavedRun, count: int = SHOWN, among: int = 1000, show: int = 3) -> Table:
    """Pictures that the run made, each with the training pictures most like it: are they copies?

    Pictures are compared at 16 x 16 pixels. The same distance is measured for held-out pictures, which the run has not
    learned from: it says what distance is usual.
    """
    if not has_numbers(opened.run.data):
        return Table(note="The loaders of this run do not say which samples it trains on, so none are compared.")
    train, batch = opened.run.data.train, held_out(opened, count)
    kinds = [name for name, value in as_item(train[0]).items() if isinstance(value, tv_tensors.Image)]
    shows, seeds = made_by(opened, batch), isinstance(opened.run.game, FromNoise)
    if seeds:  # the first row of a grid has the first seeds
        shows = {"drawn": torch.stack([column[0] for column in shows.values() if isinstance(column, Tensor)][:count])}
    columns: dict[tuple[str, ...], tuple[str, Tensor]] = {}  # the first one of each kind
    for title, each in shows.items():
        if isinstance(each, Tensor) and each.is_floating_point():  # and no label map, and no sound
            columns.setdefault(_kinds_of(title, kinds), (title, each))
    if not kinds or not columns:
        return Table(note=NO_PICTURES)
    chosen = spread(len(train), among)
    items = (to_tensors(as_item(train[k])) for k in chosen)
    coarse = [{kind: _coarse(item[kind][None]) for kind in kinds} for item in items]
    among_all = f"among {len(chosen):,} of {len(train):,} training samples"
    names = {kind: _names(train, kind) for kind in kinds}
    rows, notes = [], [f"Made pictures and the most like them {among_all}."]
    for own, (title, made) in columns.items():
        places = [(index, kind) for index in chosen for kind in own]
        known = torch.cat([each[kind] for each in coarse for kind in own])
        distances = _distances(_coarse(made), known)
        usual = _distances(_coarse(torch.cat([batch[kind] for kind in own])), known).amin(1)
        near = distances.topk(min(show, len(places)), largest=False)
        rows.append(Row(f"made: {title}" if len(columns) > 1 else "made", list(map(sample_cell, made))))
        for rank in range(near.indices.shape[1]):
            cells = []
            for distance, place in zip(near.values[:, rank].tolist(), near.indices[:, rank].tolist(), strict=True):
                index, kind = places[place]
                name = names[kind][index % len(names[kind])] if names[kind] else f"no. {index}"
                cells.append(sample_cell(to_tensors(as_item(train[index]))[kind], f"{name}: {distance:.1%}"))
            rows.append(Row(f"nearest {rank + 1}", cells))
        who = f"Those {title}" if len(columns) > 1 else "They"
        median = f"{distances.amin(1).median():.1%} away (median), and held-out pictures {usual.median():.1%}."
        notes.append(f"{who} are {median}")
    what = "seed" if seeds else "picture"
    return Table([f"{what} {number}" for number in range(len(rows[0].cells))], rows, " ".join(notes))


def _names(train: Any, kind: str) -> list[str]:
    """The files of the training pictures of this kind, of two sides those of its own; none if they are drawn."""
    side = getattr(getattr(train, kind, None), "pictures", train)
    return [printable(os.fsdecode(name)) for name in getattr(side, "sample_names", ())]


def _kinds_of(title: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds of pictures that a made column is of: of two sides the one that the title names, as "as a", else b."""
    named = title.removeprefix("as ")
    return (named,) if named in kinds else ("b",) if "b" in kinds else tuple(kinds)


def exchange(
    opened: SavedRun, subject: int | str = 0, others: Sequence[int | str] | None = None, most: int = 12
) -> Table:
    """One picture with the style of one region (a row) taken from another picture (a column).

    Pictures are named as `python -m gan.sample` names them. By default there are six other pictures. The rows are the
    `most` largest regions.
    """
    if not has_styles(opened):
        return Table(note=NO_STYLES)
    painter = Painter(opened)
    if others is None:
        others = [number for number in range(len(painter.val)) if number != subject][:6]
    picture, sources = painter.picture(str(subject)), [painter.picture(str(other)) for other in others]
    own, styles = painter.styles(picture), [painter.styles(source) for source in sources]

    # A row a region. Its first cell shows where the region is. A picture without the region has no style to give.
    rows = [Row("the picture", [sample_cell(each.image) for each in (picture, *sources)])]
    areas = picture.label.flatten().bincount()
    large = [region for region in areas.argsort(descending=True).tolist() if areas[region] > SPECK * areas.sum()]
    for region in large[:most]:
        cells = [
            sample_cell(painter.paint(picture, own.taking(other, [region])))
            if other.present[region]
            else Cell("has none")
            for other in styles
        ]
        where = sample_cell(picture.spotlight(region))
        rows.append(Row(painter.label_names[region], [where, *cells], grids.colour(region)))
    whole = [painter.paint(picture, own.taking(other, other.present.nonzero().flatten().tolist())) for other in styles]
    rows.append(Row("all regions", list(map(sample_cell, [painter.paint(picture, own), *whole]))))
    note = f"Picture {picture.title} with the style of one region taken from another picture."
    return Table([f"picture {picture.title}", *(f"style of picture {each.title}" for each in sources)], rows, note)


def paints_masks(opened: SavedRun) -> bool:
    """Whether the game paints label maps: then it shows them."""
    batch = held_out(opened, 1)
    masks = isinstance(batch, dict) and "label" in batch
    return masks and any(column is batch["label"] for column in shown_columns(opened.run.game, batch).values())


def held_out(opened: SavedRun, count: int) -> Any:
    """The first held-out samples as a batch, on the game's device; of a run without, those that it trains on."""
    if has_numbers(opened.run.data):
        known = Prepared(opened.run.data.val)
        batch = default_collate([known[0, number] for number in range(min(count, len(known)))])
    else:
        batch = first_samples(first_batches(opened.run, count)[0], count)
    return move_data_to_device(batch, next(opened.run.game.parameters()).device)


def made_by(opened: SavedRun, batch: Any) -> dict[str, Tensor | Sound]:
    """Those columns of the game's grid that are not simply what the batch has."""
    return grids.made(shown_columns(opened.run.game, batch), batch)


def _samples(opened: SavedRun) -> tuple[str, str]:
    if opened.gone:
        return "data", opened.gone.partition(";")[0]
    first = next(iter(shown_columns(opened.run.game, held_out(opened, 1)).values()), None)
    if first is None:
        return "samples", "not shown"
    if isinstance(first, Sound):
        return "sounds", f"{first.seconds:.3g} seconds at {first.rate:,} Hz"
    height, width = first.shape[-2:]
    return "pictures", f"{width} x {height} pixels"


def _coarse(images: Tensor) -> Tensor:
    return F.interpolate(images.cpu(), (COARSE, COARSE), mode="area").flatten(1)


def _distances(some: Tensor, others: Tensor) -> Tensor:
    """The root mean square difference of every pair, as a share of the difference between black and white."""
    return torch.cdist(some, others, compute_mode="donot_use_mm_for_euclid_dist") / some.shape[1] ** 0.5 / 2


def _cut(sheet: Image.Image, columns: int, size: tuple[int, int]) -> list[list[Image.Image]]:
    """Cut a picture of `grids.grid` into its cells, column by column; empty if another version drew other columns."""
    zoom = max(1, grids.CELL // size[0])
    width, height = size[0] * zoom + grids.MARGIN, size[1] * zoom + grids.MARGIN
    wide = grids.is_wide(size)
    lines, rest = divmod(sheet.height - grids.TITLE - grids.MARGIN, height)
    first = sheet.width - (1 if wide else columns) * width
    if rest or (lines % columns or first < grids.MARGIN if wide else first != grids.MARGIN):
        return []
    cells = [
        [
            sheet.crop((left, top, left + size[0] * zoom, top + size[1] * zoom)).resize(size, Image.Resampling.NEAREST)
            for top in range(grids.TITLE, grids.TITLE + lines * height, height)
        ]
        for left in range(first, sheet.width, width)
    ]
    return [cells[0][column::columns] for column in range(columns)] if wide else cells
