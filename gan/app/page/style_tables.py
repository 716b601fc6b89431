"""Tables of what styles do: regions painted in the style of other pictures. See `run_tables.py` for the others."""

from collections.abc import Sequence

import torch

from gan.app.page.table import Cell, Row, Table, sample_cell
from gan.app.painting import grids
from gan.app.painting.painter import Painter, Picture, has_styles
from gan.app.painting.reopen import SavedRun

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


def _by_area(picture: Picture) -> list[int]:
    """The regions of a picture, the largest first; specks are left out."""
    areas = picture.label.flatten().bincount()
    return [region for region in areas.argsort(descending=True).tolist() if areas[region] > SPECK * areas.sum()]
