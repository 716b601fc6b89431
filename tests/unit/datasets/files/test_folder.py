"""Folders of the user's own: what is paired, and what is wrong with a folder."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import FolderPairs
from datasets.files.cache import cache_folder
from gan.files.errors import UserError
from tests.support.layouts import labels, put
from tests.support.layouts import pairs as good_pairs
from tests.support.posix import where_case_counts


@pytest.fixture
def root(tmp_path):
    return good_pairs(tmp_path, "a", "b")


def names(pairs):
    return [pairs.paths(k)[1].relative_to(pairs.root).with_suffix("").as_posix() for k in range(len(pairs))]


def test_the_last_by_name_are_held_out(tmp_path):
    assert len(FolderPairs(good_pairs(tmp_path, 0), 4, 8)) == 1
    with pytest.raises(UserError, match=r"one picture .* is none to hold out; add a second"):
        FolderPairs(tmp_path, 4, 8, split="val", held_out=1)
    good_pairs(tmp_path, *range(5))
    train, val = (FolderPairs(tmp_path, 4, 8, split=split, held_out=2) for split in ("train", "val"))
    assert names(train) == ["labels/0", "labels/1", "labels/2"] and names(val) == ["labels/3", "labels/4"]
    assert len(list(cache_folder(tmp_path).glob("checked-*.jsonl"))) == 1, "one index for both"
    for few in (5, 16, 0, -1, 0.0):
        with pytest.raises(UserError, match=f"5 pictures in .*, {few} to hold out; type a --held-out of 1 to 4"):
            FolderPairs(tmp_path, 4, 8, split="train", held_out=few)


def test_a_share_is_held_out_by_names_and_stays_when_pictures_are_added(tmp_path):
    def split():
        return [{*names(FolderPairs(tmp_path, 4, 8, split=part, held_out=0.25))} for part in ("train", "val")]

    good_pairs(tmp_path, *range(40))
    train, val = split()
    assert train | val == {f"labels/{number}" for number in range(40)} and not train & val
    assert 4 < len(val) < 18 and val != {f"labels/{number}" for number in range(40 - len(val), 40)}
    good_pairs(tmp_path, *range(100, 120))
    more_train, more_val = split()
    assert train < more_train and not more_val & train  # a set of 40 may hold out a few more than its share


def opened(root, count=4, **options):
    return FolderPairs(root, count, 8, **options)


def put_in(place, values, **how):
    return lambda root: put(root / place, values, **how) and opened(root)


def texts(text, *of_pairs, **options):
    """A labels.txt."""
    return lambda root: (root / "labels.txt").write_bytes(text.encode("latin1")) and opened(root, *of_pairs, **options)


def without_labels(root):
    for path in (root / "labels").iterdir():
        path.rename(path.with_suffix(".jpg"))
    opened(root)


def empty(root):
    (root / "empty" / "images").mkdir(parents=True)
    opened(root / "empty")


ANY = r"\*.jpg, \*.jpeg, \*.png, \*.webp, \*.bmp, \*.tif, \*.tiff"
VOID, CALLED = dict(void={255: 3}), ".* is called {0} already; take the line of {0} out"
WRONG = {
    r"there is no folder .*nowhere; give the folder": lambda root: opened(root / "nowhere"),
    r"there are no label maps \(\*\.png\) in .*labels, but there is [ab]\.jpg": without_labels,
    rf"there are no pictures \({ANY}\) in .*(?s:.*)no folder .*/labels; put the label maps": empty,
    "0 labels do not fit into a label map; try 1 to 65536": partial(opened, count=0),
    "65537 labels do not fit into a label map": partial(opened, count=65537),
    r"b\.png has the colour #000000, of no label; leave --labels out for advice": put_in(
        "labels/b.png", labels(), mode="RGB"
    ),
    r"b\.png has more than 8 bits a channel \(mode I;16\); save it with 8": put_in(
        "images/b.png", Image.fromarray(np.full((8, 8), 40000, np.uint16))
    ),
    "there is no colour 'snow white'": partial(opened, fit="pad", background="snow white"),
    # labels.txt
    "line 3: label 1 is in line 2 already; write each label once": texts("\n1 hat\n1 hair"),
    "line 3: name hat is in line 1 already": texts("1 hat\n\n2 hat"),
    "line 2: name hat is in line 1 already": texts("hat\nhat"),
    "line 2: 'x 1' is no number and a name; write it such as 3 hair": texts("0 sky\nx 1"),
    "line 1: 'x 1' is no number and a name": texts("x 1\n-1 foo"),
    "line 2: '1' is no number and a name": texts("0 sky\n1"),
    "line 3: label 0 is in line 2 already": texts("# mine\n0 sky\n0 hat"),
    "line 2: 'sky, ball, floor' may be a list; write each label on a line": texts("# mine\nsky, ball, floor\n\n"),
    "line 2: colour #000000 is in line 1 already": texts("#000000 none\n#000000 black"),
    "a name for label 6, .* are 0 to 4; type --labels 7": texts("6 hat\n", 5, void={255: 4}),
    f"255 in a map{CALLED.format('void')}": texts("2 void", **VOID),
    f"what --fit pad{CALLED.format('padding')}": texts("2 padding", fit="pad"),
    "cannot read .*labels.txt .*; write a label on each line, such as 3 hair": texts("\xff\xfe"),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_with_a_folder_is_said(words, root):
    with pytest.raises(UserError, match=words):
        WRONG[words](root)


@pytest.mark.promise("links that loop, names that differ in case, pictures that are none")
@where_case_counts
def test_capital_letters_in_names_count(root):
    with pytest.raises(UserError, match=r"no label map of the same name: .*/A.png; capital letters count too; add"):
        (root / "images" / "a.png").rename(root / "images" / "A.png") and opened(root)


@pytest.mark.parametrize(
    ("more", "count", "void"),
    [((), 4, {}), ((4,), 5, {}), ((255,), 5, {255: 4}), ((254, 255), 256, {}), ((9,), 10, {})],
)
def test_a_255_that_is_far_from_the_other_values_is_void(more, count, void, tmp_path):
    """Of twenty maps the last one has these values too."""
    good_pairs(tmp_path, *(f"{number:02}" for number in range(20)))
    values = labels()
    values[0, : len(more)] = more
    put(tmp_path / "labels" / "19.png", values)
    assert FolderPairs.find_labels(tmp_path) == (count, void)
    assert opened(tmp_path, count, void=void)[19]["label"].max() == count - 1


def test_more_labels_than_a_byte_holds(root):
    values = labels(top=1000)
    put(root / "labels" / "b.png", Image.fromarray(values.astype(np.uint16)))
    label = opened(root, 1000)[1]["label"]
    assert label.dtype == torch.int32 and (label.numpy() == values).all()


def coordinates(root, shape, times=1):
    """A picture whose red is the column and whose green the row, and a map whose labels are the eighth of the row."""
    rows, columns = np.indices(shape)
    pixels = np.stack([columns, rows, 0 * rows], 2).astype(np.uint8).repeat(times, 0).repeat(times, 1)
    put(root / "images" / "a.png", pixels)
    put(root / "labels" / "a.png", rows * 8 // shape[0])


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize(("shape", "across", "down"), [((40, 96), (28, 67), (0, 39)), ((97, 40), (0, 39), (28, 67))])
def test_a_crop_is_the_same_middle_of_picture_and_map(shape, across, down, times, tmp_path):
    coordinates(tmp_path, shape, times)
    pairs = FolderPairs(tmp_path, 8, 40, fit="crop")
    assert pairs.sizes.tolist() == [[times * shape[1], times * shape[0]]]
    item = pairs[0]
    assert item["image"].shape == (3, 40, 40) and item["label"].shape == (40, 40)
    red, green = (item["image"][row].long() for row in (0, 1))
    assert (int(red.min()), int(red.max())) == across and (int(green.min()), int(green.max())) == down
    assert torch.equal(item["label"].long(), green * 8 // shape[0])
    part = pairs.load_crop(0, 0.5, 0.5)
    assert part["image"].shape == (3, 40, 40)
    agree = part["label"].long() == (part["image"][1].long() * 8 / shape[0]).floor()
    assert agree.double().mean() > 0.9, "but at borders, where a picture is smooth"


def test_padding_has_a_colour_and_the_label_of_void_or_one_more(tmp_path):
    coordinates(tmp_path, (20, 40))
    pairs = FolderPairs(tmp_path, 8, 40, fit="pad", background="#0000ff")
    item = pairs[0]
    assert pairs.num_labels == len(pairs.label_names) == 9 and item["label"].shape == (40, 40)
    added = item["label"] == 8
    assert added[:10].all() and added[30:].all() and not added[10:30].any()
    assert (item["image"][:, added] == torch.tensor([0, 0, 255])[:, None]).all()
    assert item["image"][1, 10:30].unique().tolist() == [*range(20)]
    void = FolderPairs(tmp_path, 8, 40, fit="pad", void={255: 7})
    assert void.num_labels == 8 and (void[0]["label"][:10] == 7).all()
    put(tmp_path / "labels" / "a.png", np.full((20, 40), 8))
    with pytest.raises(UserError, match=r"a.png has the label 8; with 8 labels the allowed range is 0..7"):
        FolderPairs(tmp_path, 8, 40, fit="pad")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sky\nball\n\nfloor\n", ("sky", "ball", "2", "floor")),
        ("3 floor\r\n\r\n0: sky\r\n1,blue ball", ("sky", "blue ball", "2", "floor")),
        ("\ufeffsky\n", ("sky", "1", "2", "3")),
        ("# of mine\nsky\n # more\nball # red\n\ncar #2\n", ("sky", "ball", "2", "car #2")),
        ("# 7 labels\n0 sky\n3 floor  # or ground\n", ("sky", "1", "2", "floor")),
        ("sky, blue\nball\n", ("sky, blue", "ball", "2", "3")),
        ("", ("0", "1", "2", "3")),
    ],
)
def test_labels_have_names_in_labels_txt(root, text, names):
    (root / "labels.txt").write_bytes(text.encode())
    assert opened(root).label_names == names
    assert opened(root, fit="pad").label_names == (*names, "padding")
    assert opened(root, 5, fit="pad", void={255: 4}).label_names == (*names, "void")
    assert FolderPairs.find_labels(root) == (4, {})


def test_colours_of_label_maps_become_labels_by_labels_txt(root):
    colours = np.array([[0, 0, 0], [128, 64, 128], [244, 35, 232], [1, 2, 3]], np.uint8)
    wanted = [item["label"] for item in opened(root)]
    for path in (root / "labels").iterdir():
        Image.fromarray(colours[np.array(Image.open(path))]).convert("RGBA").save(path)
    listed = r"4 colours of no label; write .*labels.txt, .* such as #804080 road:\n#000000\n#010203\n#804080\n#f423e8$"
    with pytest.raises(UserError, match=listed):
        FolderPairs.find_labels(root)
    for text in (
        "# of mine\n#000000\n#804080 road  # wide\n#F423E8 side walk\n#010203 sky\n",
        "3 #010203 sky\n1 #804080 road\n2 #f423e8 side walk\n0 #000000",
    ):
        (root / "labels.txt").write_text(text)
        assert FolderPairs.find_labels(root) == (4, {})
        found = opened(root)
        assert found.label_names == ("0", "road", "side walk", "sky")
        assert all(torch.equal(item["label"], label) for item, label in zip(found, wanted, strict=True))


def test_names_say_how_many_labels_there_are_and_which_is_void(root):
    values = labels()
    values[0, 0] = 255
    put(root / "labels" / "a.png", values)
    (root / "labels.txt").write_text("255 nobody knows\n6 hat\n0 sky\n")
    count, void = FolderPairs.find_labels(root)
    assert (count, void) == (8, {255: 7})
    assert opened(root, count, void=void).label_names == ("sky", *"12345", "hat", "nobody knows")
    (root / "labels.txt").write_text("2 void\n255 unknown")
    assert opened(root, **VOID).label_names == ("0", "1", "void", "unknown")
