"""Looking at what a run made: the tables that `samples/inspect.ipynb` and the page of `samples/gallery.py` show.

Every function takes an opened run and gives a table of pictures and words. Where a game lacks what a table is
about, such as styles, the table is empty and its note says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate
from torchvision import tv_tensors

from datasets.augment import Prepared, to_tensors
from gan.errors import UserError
from gan.fit import metrics as record
from gan.fit.callbacks import SHOWN
from gan.painting import grids as pictures
from gan.painting.painter import Painter, Picture, has_styles
from gan.painting.reopen import Opened
from gan.painting.styles import Styles, regions
from gan.painting.table import Cell, Charts, Row, Table, spread
from gan.runs import RUNS
from strategies import random_state

SPECK = 0.002  # a region of a smaller share of its picture is not worth a row
Which = int | str  # a held-out picture by number, or any other as gan.sample names it
COARSE = 16  # the size at which pictures are compared with training pictures
NO_MASKS = "This game does not paint masks, so there are none to show."
NO_STYLES = "This game has no styles, so there are none to exchange."


def facts(run: Opened) -> Table:
    """What the run is, how far it is and how good."""
    module, game = run.run.data, run.run.game
    height, width = next(value for value in held_out(run, 1).values() if value.ndim == 4).shape[-2:]
    sizes = {name: sum(weight.numel() for weight in net.parameters()) for name, net in game.named_children()}
    known = {
        "run": f"{run.folder.path.name}: {first_sentence(run)}",
        "trained": f"{run.step:,} of {run.run.max_steps:,} steps, {run.settings['batch_size']} pictures a step",
        "scores": "; ".join(scores(run)) + " (lower is better)" if scores(run) else "none yet",
        "pictures": f"{len(module.train):,} to train on, {len(module.val):,} held out, {width} x {height} pixels",
        "parameters": ", ".join(f"{name} {size:,}" for name, size in sizes.items() if size),
        "computed": f"strategy {run.settings['strategy']}, precision {run.settings['precision']}",
        "opened": run.checkpoint.name,
    }
    return Table(rows=[Row(name, [Cell(value)]) for name, value in known.items()])


def settings(run: Opened) -> Table:
    """Every setting of the run, as its settings.yaml has them."""
    saved = yaml.safe_load(run.folder.settings.read_text())
    return Table(rows=[Row(name, [Cell("" if value is None else str(value))]) for name, value in saved.items()])


def first_sentence(run: Opened) -> str:
    """What kind of run it is."""
    return RUNS[run.name].__doc__.splitlines()[0]


def scores(run: Opened) -> list[str]:
    """How good the run was on held-out samples, first and last, in each of its scores."""
    rows = [row for _, row in sorted(record.read(run.folder.metrics).items())]
    told = []
    for name, what in run.run.scores.items():
        values = [row[name] for row in rows if name in row]
        if values:
            told.append(f"{what}: {values[0]:.3g} at first, {values[-1]:.3g} now")
    return told


def curves(run: Opened) -> Charts:
    """A chart for each phase's losses, one for gradient norms and one for held-out scores."""
    groups = record.panels(record.read(run.folder.metrics))
    if not groups:
        return Charts({}, "This run has logged nothing yet.")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chart.svg"
        drawings = {}
        for group, panel in groups.items():
            record.draw_panels({group: panel}, path)
            drawings[group] = path.read_text()
    return Charts(drawings, "Pale: as logged. Full: the running mean over a twentieth of the curve.")


def over_time(run: Opened, most: int = 12) -> Table:
    """The grids that training drew: the same samples at several steps, beside what does not change."""
    paths = sorted(run.folder.samples.glob("step-*.png"), key=_step)
    if not paths:
        return Table(note="This run has drawn no grids yet.")
    paths = [paths[k] for k in spread(len(paths), most)]
    moments = [f"step {_step(path):,}" for path in paths]
    sheets = []
    for path in paths:
        with Image.open(path) as sheet:
            sheets.append(sheet.convert("RGB"))

    # Cut the sheets as the game's columns lie in them.
    shown = _show(run, held_out(run, 1))
    height, width = next(iter(shown.values())).shape[-2:]
    grids = [_cut(sheet, len(shown), (width, height)) for sheet in sheets]
    if not all(grids):
        rows = [Row("grid", [Cell(pictures=tuple(sheets))])]
        return Table([""], rows, "The grids as training drew them.", moments)
    rows = []
    for place, title in enumerate(shown):
        cells = [Cell(pictures=frames) for frames in zip(*(grid[place] for grid in grids), strict=True)]
        still = all(each == cell.pictures[0] for cell in cells for each in cell.pictures)
        rows.append(Row(title, [Cell(pictures=cell.pictures[:1]) for cell in cells] if still else cells))
    columns = [f"picture {number}" for number in range(len(grids[0][0]))]
    return Table(columns, rows, "The same held-out samples at every step, as training drew them.", moments)


def masks(run: Opened, count: int = SHOWN) -> Table:
    """Pictures beside their masks and beside what the game makes of the mask."""
    if not paints_masks(run):
        return Table(note=NO_MASKS)
    batch = held_out(run, count)
    rows = {"picture": batch["image"], "mask": batch["label"]}
    if "edges" in batch:
        rows["edges"] = 1 - 2.0 * batch["edges"].unsqueeze(1)
    if has_styles(run):
        painter = Painter(run)
        chosen = [painter.picture(str(number)) for number in range(len(batch["image"]))]
        rows["painted anew"] = [painter.paint(picture, painter.styles(picture)) for picture in chosen]
        note = "Painted anew: from the mask and the styles of the picture itself."
    else:
        rows |= made_by(run, batch)
        note = "What the game made of each mask."
    return _titled(rows, note)


def legend(run: Opened, count: int = SHOWN) -> Table:
    """The colours of the labels that the pictures of `masks` have, with the share of the pixels of each."""
    if not paints_masks(run):
        return Table(note=NO_MASKS)
    batch = held_out(run, count)
    shares = batch["label"].flatten().bincount(minlength=len(label_names(run))) / batch["label"].numel()
    rows = [
        Row(name, [Cell(f"{shares[label]:.1%}")], _colour(label))
        for label, name in enumerate(label_names(run))
        if shares[label] > 0
    ]
    return Table(rows=rows)


def exchange(run: Opened, subject: Which = 0, others: Sequence[Which] | None = None, most: int = 12) -> Table:
    """One picture with the style of one region (a row) taken from another picture (a column).

    Pictures are named as `python -m gan.sample` names them. Six others if none are named; the largest regions.
    """
    if not has_styles(run):
        return Table(note=NO_STYLES)
    painter = Painter(run)
    if others is None:
        others = [number for number in range(len(painter.val)) if number != subject][:6]
    picture, sources = painter.picture(str(subject)), [painter.picture(str(other)) for other in others]
    own, styles = painter.styles(picture), [painter.styles(source) for source in sources]
    plain = painter.paint(picture, own)

    # A row a region, first where it lies; what another picture lacks it cannot give.
    rows = [Row("the picture", [_cell(each.image) for each in (picture, *sources)])]
    inside, outside = [], []
    for region in _by_area(picture)[:most]:
        here = picture.label == region
        cells = [_cell(_spotlight(picture.image, here))]
        for other in styles:
            if not other.present[region]:
                cells.append(Cell("has none"))
                continue
            made = painter.paint(picture, own.taking(other, [region]))
            moved = (made - plain).abs().mean(0) / 2
            inside.append(moved[here].mean())
            outside.append(moved[~here].mean())
            cells.append(_cell(made))
        rows.append(Row(painter.label_names[region], cells, _colour(region)))
    whole = [painter.paint(picture, own.taking(other, other.present.nonzero().flatten().tolist())) for other in styles]
    rows.append(Row("all regions", [_cell(plain), *map(_cell, whole)]))

    note = f"Picture {picture.title} with the style of one region taken from another picture."
    if inside:
        near, far = (torch.stack(parts).nanmean() for parts in (inside, outside))
        note += f" On average this moved the region's own pixels by {near:.1%} and the others by {far:.2%}."
    return Table([f"picture {picture.title}", *(f"style of picture {each.title}" for each in sources)], rows, note)


def edit(
    run: Opened,
    picture: Which = 0,
    region: str | int | None = None,
    other: Which | None = 1,
    amounts: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
) -> Table:
    """One picture with one region's style moved by some amounts.

    From its own (0) to that of the region in another picture (1) and beyond; where `other` is None, its own code
    times the amount. Without a region's name it is the one that would change most, label 0 apart.
    """
    if not has_styles(run):
        return Table(note=NO_STYLES)
    painter = Painter(run)
    subject, source = painter.picture(str(picture)), None if other is None else painter.picture(str(other))
    own, names = painter.styles(subject), painter.label_names
    nothing = replace(own, codes=torch.zeros_like(own.codes))
    start, end = (nothing, own) if source is None else (own, painter.styles(source))
    known = [each for each in _by_area(subject, speck=0) if own.present[each] and end.present[each]]
    if not known:
        raise UserError(f"pictures {picture} and {other} have no region in common; choose another picture")
    (label,) = [_most_moved(subject, known, start, end)] if region is None else regions([region], names)
    if label not in known:
        have = f"picture {picture} has" if other is None else f"both pictures {picture} and {other} have"
        raise UserError(f"region {region!r} is none that {have}: {', '.join(names[each] for each in known)}")

    # Move the one code and look what moves in the picture.
    made = [painter.paint(subject, own.taking(start.towards(end, amount), [label])) for amount in amounts]
    plain = painter.paint(subject, own)
    moved = [1 - (each - plain).abs().mean(0, keepdim=True) for each in made]
    given = {} if source is None else {f"picture {source.title}": source.image}
    shown = [_spotlight(subject.image, subject.label == label), *given.values(), *made]
    rows = [
        Row(names[label], list(map(_cell, shown)), _colour(label)),
        Row("moved", [*(Cell() for _ in range(1 + len(given))), *map(_cell, moved)]),
    ]
    what = "scaled" if source is None else f"on the way to that of picture {source.title}"
    note = f"The style of {names[label]} {what}. Regions to choose from: {', '.join(names[each] for each in known)}."
    return Table([f"picture {subject.title}", *given, *(f"{amount:.0%}" for amount in amounts)], rows, note)


def nearest(run: Opened, count: int = SHOWN, among: int = 1000, show: int = 3) -> Table:
    """Pictures that the run made, each with the training pictures most like it: are they copies?

    Pictures are compared at 16 x 16 pixels. How far held-out pictures, which nothing could copy, are from their
    nearest says how near is near.
    """
    train, batch = run.run.data.train, held_out(run, count)
    made = next(iter(made_by(run, batch).values()))
    kinds = [name for name, value in train[0].items() if isinstance(value, tv_tensors.Image)]
    chosen = spread(len(train), among)
    places = [(index, kind) for index in chosen for kind in kinds]
    known = torch.cat([_coarse(item[kind][None]) for item in (to_tensors(train[k]) for k in chosen) for kind in kinds])
    distances = _distances(_coarse(made), known)
    usual = _distances(_coarse(torch.cat([batch[kind] for kind in kinds])), known).amin(1)

    near = distances.topk(min(show, len(places)), largest=False)
    rows = [Row("made", list(map(_cell, made)))]
    for rank in range(near.indices.shape[1]):
        cells = []
        for distance, place in zip(near.values[:, rank].tolist(), near.indices[:, rank].tolist(), strict=True):
            index, kind = places[place]
            cells.append(_cell(to_tensors(train[index])[kind], f"no. {index}: {distance:.1%}"))
        rows.append(Row(f"nearest {rank + 1}", cells))

    closest = distances.amin(1)
    verdict = (
        "One is much nearer than any of those: look whether it is a copy."
        if closest.min() < usual.min() / 2
        else "None is much nearer than those, so nothing points to copies."
    )
    note = (
        f"Made pictures and the most like them among {len(chosen):,} of {len(train):,} training samples. They are "
        f"{closest.median():.1%} away (median), the nearest {closest.min():.1%}; held-out pictures, which cannot be "
        f"copies, are {usual.median():.1%} away, the nearest {usual.min():.1%}. {verdict}"
    )
    return Table([f"picture {number}" for number in range(len(made))], rows, note)


def paints_masks(run: Opened) -> bool:
    """Whether the game paints label maps: then it shows them."""
    batch = held_out(run, 1)
    return "label" in batch and any(column is batch["label"] for column in _show(run, batch).values())


def held_out(run: Opened, count: int) -> dict[str, Tensor]:
    """The first held-out samples as a batch, where the game computes."""
    known = Prepared(run.run.data.val)
    batch = default_collate([known[0, number] for number in range(min(count, len(known)))])
    place = next(run.run.game.parameters()).device
    return {name: value.to(place) for name, value in batch.items() if isinstance(value, Tensor)}


def label_names(run: Opened) -> tuple[str, ...]:
    """The names of the labels."""
    return tuple(run.run.data.val.label_names)


def made_by(run: Opened, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the game's columns that are not of the data."""
    return {
        title: column
        for title, column in _show(run, batch).items()
        if not any(column is given for given in batch.values())
    }


@torch.no_grad()
def _show(run: Opened, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with random_state.untouched():
        random_state.reseed(0)
        return run.run.game.show(batch)


def _by_area(picture: Picture, speck: float = SPECK) -> list[int]:
    """The regions of a picture, the largest first, without specks."""
    areas = picture.label.flatten().bincount()
    return [region for region in areas.argsort(descending=True).tolist() if areas[region] > speck * areas.sum()]


def _most_moved(picture: Picture, known: Sequence[int], start: Styles, end: Styles) -> int:
    """The region whose code and size promise the greatest change; label 0, the rest of a picture, if nothing else."""
    return max(
        (label for label in known if label > 0 or len(known) == 1),
        key=lambda label: (picture.label == label).sum() * (start.codes[label] - end.codes[label]).norm(),
    )


def _titled(rows: Mapping[str, Sequence[Tensor]], note: str) -> Table:
    """A row a batch, a column a picture."""
    columns = [f"picture {number}" for number in range(len(next(iter(rows.values()))))]
    return Table(columns, [Row(title, list(map(_cell, batch))) for title, batch in rows.items()], note)


def _cell(sample: Tensor, words: str = "") -> Cell:
    return Cell(words, (pictures.picture(sample),))


def _colour(label: int) -> tuple[int, int, int]:
    return tuple(pictures.palette(label + 1)[label].tolist())


def _spotlight(image: Tensor, region: Tensor) -> Tensor:
    """The picture with all but a region faded to grey."""
    faded = 0.25 * image.mean(0, keepdim=True).expand_as(image) + 0.6
    return torch.where(region, image, faded)


def _coarse(images: Tensor) -> Tensor:
    return F.interpolate(images.cpu(), (COARSE, COARSE), mode="area").flatten(1)


def _distances(some: Tensor, others: Tensor) -> Tensor:
    """The root mean square difference of every pair, as a share of black to white."""
    exact = torch.cdist(some, others, compute_mode="donot_use_mm_for_euclid_dist")
    return exact / some.shape[1] ** 0.5 / 2


def _cut(sheet: Image.Image, columns: int, size: tuple[int, int]) -> list[list[Image.Image]]:
    """The pictures of a grid, column by column, at their own size: `pictures.grid` undone.

    Nothing where the grid is not one of so many columns, as one that another version of the game drew.
    """
    zoom = max(1, pictures.CELL // size[0])
    width, height = size[0] * zoom + pictures.MARGIN, size[1] * zoom + pictures.MARGIN
    lines, rest = divmod(sheet.height - pictures.TITLE - pictures.MARGIN, height)
    if rest or sheet.width != pictures.MARGIN + columns * width:
        return []
    return [
        [
            sheet.crop((left, top, left + size[0] * zoom, top + size[1] * zoom)).resize(size, Image.Resampling.NEAREST)
            for top in range(pictures.TITLE, pictures.TITLE + lines * height, height)
        ]
        for left in range(pictures.MARGIN, sheet.width, width)
    ]


def _step(path: Path) -> int:
    return int(path.stem.partition("-")[2])
