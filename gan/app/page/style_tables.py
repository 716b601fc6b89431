"""Tables of what styles do: regions painted in the style of other pictures. See `run_tables.py` for the others."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gan.app.page.table import Cell, Row, Table, sample_cell
from gan.app.painting import grids
from gan.app.painting.painter import Painter, Picture, has_styles
from gan.app.painting.reopen import SavedRun
from gan.app.painting.styles import Styles, regions
from gan.files.errors import UserError

SPECK = 0.002  # a region of a smaller share of its picture gets no row
Which = int | str  # a held-out picture by number, or any other as gan.sample names it
NO_STYLES = "This game has no styles, so there are none to exchange."


def exchange(opened: SavedRun, subject: Which = 0, others: Sequence[Which] | None = None, most: int = 12) -> Table:
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
    plain = painter.paint(picture, own)

    # A row a region. Its first cell shows where the region is. A picture without the region has no style to give.
    rows = [Row("the picture", [sample_cell(each.image) for each in (picture, *sources)])]
    inside, outside = [], []
    for region in _by_area(picture)[:most]:
        here = picture.label == region
        cells = [sample_cell(picture.spotlight(region))]
        for other in styles:
            if not other.present[region]:
                cells.append(Cell("has none"))
                continue
            made = painter.paint(picture, own.taking(other, [region]))
            moved = (made - plain).abs().mean(0) / 2
            inside.append(moved[here].mean())
            outside.append(moved[~here].mean())
            cells.append(sample_cell(made))
        rows.append(Row(painter.label_names[region], cells, grids.colour(region)))
    whole = [painter.paint(picture, own.taking(other, other.present.nonzero().flatten().tolist())) for other in styles]
    rows.append(Row("all regions", [sample_cell(plain), *map(sample_cell, whole)]))

    note = f"Picture {picture.title} with the style of one region taken from another picture."
    if inside:
        near, far = (torch.stack(parts).nanmean() for parts in (inside, outside))
        note += f" On average this moved the region's own pixels by {near:.1%} and the others by {far:.2%}."
    return Table([f"picture {picture.title}", *(f"style of picture {each.title}" for each in sources)], rows, note)


def edit(
    opened: SavedRun,
    picture: Which = 0,
    region: str | int | None = None,
    other: Which | None = 1,
    amounts: Sequence[float] = (0, 0.25, 0.5, 0.75, 1),
) -> Table:
    """One picture with one region's style moved by some amounts.

    0 is the region's own style, 1 that of the same region in the `other` picture, and more goes beyond. Where `other`
    is None, the region's own code is multiplied by the amount. By default the region is the one that would change
    most, apart from label 0.
    """
    if not has_styles(opened):
        return Table(note=NO_STYLES)
    painter = Painter(opened)
    subject, source = painter.picture(str(picture)), None if other is None else painter.picture(str(other))
    own, names = painter.styles(subject), painter.label_names
    nothing = replace(own, codes=torch.zeros_like(own.codes))
    start, end = (nothing, own) if source is None else (own, painter.styles(source))
    known = [each for each in _by_area(subject, speck=0) if own.present[each] and end.present[each]]
    if not known:
        raise UserError(f"pictures {picture} and {other} have no region in common; choose another picture")
    (label,) = [_most_moved(subject, known, start, end)] if region is None else regions([region], names)
    if label not in known:
        where = f"picture {picture}" if other is None else f"both pictures {picture} and {other}"
        have = ", ".join(names[each] for each in known)
        raise UserError(f"region {region!r} is not in {where}; choose from {have}")

    # Paint with the one code moved, and show below where the picture changed.
    made = [painter.paint(subject, own.taking(start.towards(end, amount), [label])) for amount in amounts]
    plain = painter.paint(subject, own)
    moved = [1 - (each - plain).abs().mean(0, keepdim=True) for each in made]
    given = {} if source is None else {f"picture {source.title}": source.image}
    shown = [subject.spotlight(label), *given.values(), *made]
    rows = [
        Row(names[label], list(map(sample_cell, shown)), grids.colour(label)),
        Row("moved", [*(Cell() for _ in range(1 + len(given))), *map(sample_cell, moved)]),
    ]
    what = "scaled" if source is None else f"on the way to that of picture {source.title}"
    note = f"The style of {names[label]} {what}. Regions to choose from: {', '.join(names[each] for each in known)}."
    return Table([f"picture {subject.title}", *given, *(f"{amount:.0%}" for amount in amounts)], rows, note)


def _by_area(picture: Picture, speck: float = SPECK) -> list[int]:
    """The regions of a picture, the largest first; those below a share of `speck` are left out."""
    areas = picture.label.flatten().bincount()
    return [region for region in areas.argsort(descending=True).tolist() if areas[region] > speck * areas.sum()]


def _most_moved(picture: Picture, known: Sequence[int], start: Styles, end: Styles) -> int:
    """The region that should change most, by its area and by how far its code moves.

    Label 0, the rest of a picture, is taken only where there is no other.
    """
    return max(
        (label for label in known if label > 0 or len(known) == 1),
        key=lambda label: (picture.label == label).sum() * (start.codes[label] - end.codes[label]).norm(),
    )
