"""CMP facades (Tylecek and Sara 2013): 606 rectified house fronts."""

from pathlib import Path

import numpy as np

from datasets.files.pairs import PICTURES, Column, Pairs, Size, look_up_split


class Facades(Pairs):
    """`base/cmp_b####.{jpg,png}` and `extended/cmp_x####.{jpg,png}`: picture and label map side by side.

    Labels are numbered as in the files: the classes are 1 to 12. The files do not use 0, but published models count
    it too (13 labels). The set has no published split. Here, of every six pictures in the order of their names, four
    are for "train", the fifth is for "val" and the sixth for "test": 404, 101 and 101. (pix2pix has a random split of
    400, 100 and 106.)
    """

    label_names = (
        "none", "background", "facade", "window", "door", "cornice", "sill", "balcony", "blind", "deco", "molding",
        "pillar", "shop",
    )  # fmt: skip
    num_labels = len(label_names)

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256) -> None:
        turns = look_up_split(split, {"train": (0, 1, 2, 3), "val": (4,), "test": (5,)})
        folders, kinds = ("base", "extended"), tuple(kind for kind in PICTURES if kind != ".png")
        columns = (Column("picture", folders, suffixes=kinds), Column("label map", folders))
        super().__init__(Path(root).expanduser(), columns, size)
        self.keep_only(np.flatnonzero(np.isin(np.arange(len(self)) % 6, turns)))
