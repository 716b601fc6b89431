"""Tables of styles that are exchanged and edited."""

import pytest
import torch
from PIL import Image

from gan.app.page import run_tables, style_tables
from gan.app.painting import grids
from gan.app.painting.painter import Painter
from gan.app.painting.reopen import open_run
from gan.files.errors import UserError
from tests.support.tables import picture_of, row


@pytest.fixture(scope="module")
def run(sean_run):
    return open_run(str(sean_run))


@pytest.fixture(scope="module")
def lively(sean_run):
    """The run with changed weights: after two steps styles make hardly a difference yet."""
    opened = open_run(str(sean_run))
    dice = torch.Generator().manual_seed(0)
    for name, weight in opened.run.game.generator.named_parameters():
        if "style" in name or "region" in name:
            weight += 0.3 * torch.randn(weight.shape, generator=dice)
    return opened


def moved(one: Image.Image, other: Image.Image) -> torch.Tensor:
    """Which pixels differ, [H, W]."""
    bytes_of = lambda image: torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)  # noqa: E731
    return (bytes_of(one) != bytes_of(other)).view(one.height, one.width, 3).any(2)


def test_one_region_at_a_time_is_exchanged(lively):
    table = style_tables.exchange(lively, 0, [1, 2])
    assert list(table.columns) == ["picture 0", "style of picture 1", "style of picture 2"]
    painter = Painter(lively)
    own, theirs = (painter.styles(painter.picture(number)) for number in "01")
    given = 0
    for each in table.rows[1:-1]:
        region = painter.label_names.index(each.title)
        if not theirs.present[region]:
            assert each.cells[1].words == "has none"
            continue
        made = painter.paint(painter.picture("0"), own.taking(theirs, [region]))
        assert each.cells[1].pictures[0].tobytes() == picture_of(made)
        given += 1
    assert given > 3
    assert "own pixels by" in table.note


def test_regions_of_a_picture_come_by_size_and_where_they_lie_is_shown(run):
    table, item = style_tables.exchange(run, 2, [1]), run_tables.held_out(run, 3)
    label, names = item["label"][2], run.run.data.val.label_names
    regions = [names.index(each.title) for each in table.rows[1:-1]]
    areas = label.flatten().bincount()[regions].tolist()
    assert areas == sorted(areas, reverse=True) and len(areas) > 3
    (spot,) = table.rows[1].cells[0].pictures
    change = moved(spot, grids.picture(item["image"][2]))
    assert not change[label == regions[0]].any() and change[label != regions[0]].float().mean() > 0.9


def test_an_edit_goes_from_ones_own_style_to_anothers(lively):
    painter = Painter(lively)
    one, other = painter.picture("0"), painter.picture("1")
    own, theirs = painter.styles(one), painter.styles(other)
    table = style_tables.edit(lively, 0, "skin", 1, [0, 0.5, 1])
    assert list(table.columns) == ["picture 0", "picture 1", "0%", "50%", "100%"]
    label = painter.label_names.index("skin")
    start, half, end = (cell.pictures[0].tobytes() for cell in row(table, "skin")[2:])
    assert start == picture_of(painter.paint(one, own))
    assert end == picture_of(painter.paint(one, own.taking(theirs, [label])))
    assert len({start, half, end}) == 3
    still = row(table, "moved")[2].pictures[0]
    assert still.getextrema() == ((255, 255),) * 3


def test_a_style_is_scaled_where_there_is_no_other(lively):
    painter = Painter(lively)
    one = painter.picture("0")
    own = painter.styles(one)
    table = style_tables.edit(lively, 0, "skin", None, [0, 1, 2])
    none, same, _ = (cell.pictures[0].tobytes() for cell in row(table, "skin")[1:])
    assert same == picture_of(painter.paint(one, own)) != none


def test_without_a_name_the_region_that_changes_most_is_taken(lively):
    table = style_tables.edit(lively)
    assert table.rows[0].title in lively.run.data.val.label_names[1:]


@pytest.mark.parametrize(
    "choice, told",
    [
        ({"picture": 99}, "there is no held-out picture 99; choose from 0 to 3"),
        ({"region": "moon"}, "there is no region 'moon'"),
        ({"other": 77}, "there is no held-out picture 77"),
    ],
)
def test_what_cannot_be_edited_is_said(run, choice, told):
    with pytest.raises(UserError, match=told):
        style_tables.edit(run, **choice)


def test_a_region_that_one_of_them_lacks_is_said(run):
    labels = [set(run.run.data.val[number]["label"].unique().tolist()) for number in range(2)]
    lacking = (set(range(19)) - (labels[0] & labels[1])).pop()
    name = run.run.data.val.label_names[lacking]
    with pytest.raises(UserError, match=f"region '{name}' is not in both pictures 0 and 1; choose from "):
        style_tables.edit(run, region=name)
