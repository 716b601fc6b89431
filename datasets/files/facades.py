"""CMP facades (Tylecek and Sara 2013): 606 rectified house fronts."""

from pathlib import Path

import numpy as np

from datasets.files.pairs import PICTURES, Column, Pairs, Size, choose


class Facades(Pairs):
    """`base/cmp_b####.{jpg,png}` and `extended/cmp_x####.{jpg,png}`: picture and label map side by side.

    Labels are numbered as in the files: the classes from 1 to 12, and 0 for no class, which the files do not
    use but published models count (13 labels). The set has no published split: of every six pictures, in
    order of their names, four are for "train", the fifth for "val" and the sixth for "test" (404, 101 and
    101; pix2pix drew 400, 100 and 106 by chance).
    """

    label_names = (
        "none", "background", "facade", "window", "door", "cornice", "sill", "balcony", "blind", "deco", "molding",
        "pillar", "shop",
    )  # fmt: skip
    num_labels = len(label_names)

    def __init__(self, root: str | Path, split: str = "train", size: Size = 256) -> None:
        turns = choose(split, {"train": (0, 1, 2, 3), "val": (4,), "test": (5,)})
        folders, kinds = ("base", "extended"), tuple(kind for kind in PICTURES if kind != ".png")
        columns = (Column("picture", folders, suffixes=kinds), Column("label map", folders))
        super().__init__(Path(root).expanduser(), columns, size)
        self.keep(np.flatnonzero(np.isin(np.arange(len(self)) % 6, turns)))
