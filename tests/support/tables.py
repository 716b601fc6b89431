"""Looking into the tables of gan/app/page/."""

from gan.app.page.table import Cell, Table
from gan.app.painting import grids


def row(table: Table, title: str) -> list[Cell]:
    (found,) = (row for row in table.rows if row.title == title)
    return found.cells


def picture_of(sample) -> bytes:
    """The bytes of a sample, as a cell shows it."""
    return grids.picture(sample).tobytes()
