"""Tables of pictures as HTML."""

import base64
import re
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from gan.app.page.table import Cell, Charts, Row, Table, encode, spread

RED, BLUE = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))


def decoded(uri: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(uri.partition(",")[2])))


def noise(size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8))


def test_rows_and_columns_have_headings_and_pictures_say_where_they_are():
    html = Table(["one", "two"], [Row("eyes", [Cell(pictures=(RED,)), Cell("has none")], (1, 2, 3))]).html()
    assert re.findall(r'<th scope="col">(.*?)</th>', html) == ["one", "two"]
    assert '<th scope="row"><span class="swatch" style="background:rgb(1, 2, 3)"></span>eyes</th>' in html
    assert 'width="4" height="4" alt="eyes, one">' in html
    assert '<td class="words">has none</td>' in html


def test_words_below_a_picture_are_also_in_its_alt():
    html = Table(["one"], [Row("near", [Cell("no. 3", (RED,))])]).html()
    assert 'alt="near, one: no. 3"' in html and "<small>no. 3</small>" in html


def test_what_is_not_ours_is_escaped():
    table = Table(["<a>"], [Row("<b>", [Cell('<c> "', (RED,))])], "<d>")
    html = table.html()
    assert not re.search(r"<[abcd]>", html)
    assert 'alt="&lt;b&gt;, &lt;a&gt;: &lt;c&gt; &quot;"' in html
    assert "&lt;e&gt;" in Charts({"<e>": "<svg/>"}).html()


def test_a_table_without_rows_is_its_note():
    assert Table(note="nothing").html() == '<div class="table"><p class="note">nothing</p></div>'


def test_words_beside_words_are_plain_and_with_colours_a_legend():
    assert 'class="table plain"' in Table(rows=[Row("size", [Cell("64")])]).html()
    assert 'class="table plain legend"' in Table(rows=[Row("hair", [Cell("3%")], (0, 0, 0))]).html()
    assert 'class="table"' in Table(["x"], [Row("hair", [Cell(pictures=(RED,))])]).html()


def test_moments_are_in_the_page_and_only_the_last_is_shown():
    html = Table(["x"], [Row("output", [Cell(pictures=(RED, BLUE))])], moments=["step 0", "step 9"]).html()
    first, last = re.findall(r"<img.*?>", html)
    assert 'alt="output, x, step 0" hidden' in first
    assert 'alt="output, x, step 9">' in last
    assert '<td class="moving">' in html


def test_unrolled_has_a_row_a_moment_and_leaves_still_rows_alone():
    moving = Cell(pictures=(RED, RED, RED, BLUE))
    table = Table(["x"], [Row("shape", [Cell(pictures=(RED,))]), Row("output", [moving])], "note", list("abcd"))
    rows = table.unrolled(most=2).rows
    assert [row.title for row in rows] == ["shape", "output, a", "output, d"]
    assert [row.cells[0].pictures for row in rows] == [(RED,), (RED,), (BLUE,)]
    assert table.unrolled().html() in table._repr_html_()
    assert not table.unrolled().moments


@pytest.mark.parametrize(
    "length, most, numbers",
    [(0, 3, []), (1, 3, [0]), (3, 3, [0, 1, 2]), (10, 4, [0, 3, 6, 9]), (5, 2, [0, 4]), (5, 1, [4]), (5, 0, [])],
)
def test_spread_has_the_first_and_the_last(length, most, numbers):
    assert spread(length, most) == numbers


def test_small_pictures_are_kept_to_the_pixel():
    small = noise(96)
    assert np.array_equal(np.array(decoded(encode(small))), np.array(small))
    assert 'class="exact"' in Table(["x"], [Row("y", [Cell(pictures=(small,))])]).html()


def test_large_pictures_are_packed_and_large_masks_are_exact():
    large = noise(256).resize((200, 200), Image.Resampling.BICUBIC)
    assert encode(large).startswith("data:image/webp;")
    off = np.abs(np.array(decoded(encode(large)), int) - np.array(large)).mean()
    assert 0 < off < 30
    assert 'class="exact"' not in Table(["x"], [Row("y", [Cell(pictures=(large,))])]).html()
    mask = RED.resize((300, 300))
    assert np.array_equal(np.array(decoded(encode(mask)).convert("RGB")), np.array(mask))


def test_charts_are_in_the_page_as_they_are():
    html = Charts({"losses": "<svg>ü</svg>"}, "pale")._repr_html_()
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,(.*?)"', html)
    assert base64.b64decode(data).decode() == "<svg>ü</svg>"
    assert 'alt="curves of losses over the steps"' in html and "pale" in html
