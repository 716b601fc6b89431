"""Cityscapes (Cordts et al. 2016): 2,975 + 500 street scenes with fine annotations, 35 labels and instances."""

from pathlib import Path

from torchvision.datasets import Cityscapes as Published

from datasets.files.pairs import Column, Pairs, Size, look_up_split

CLASSES = sorted(Published.classes, key=lambda kind: kind.id % 35)  # the last is -1, the licence plate


class Cityscapes(Pairs):
    """`leftImg8bit/{split}/{city}/X_leftImg8bit.png` with `gtFine/{split}/{city}/X_gtFine_labelIds.png`.

    With `edges`, also `X_gtFine_instanceIds.png` beside the label maps. Splits are "train" and "val"; the test set has
    no labels. Labels are the published ids. The licence plate has the id -1, which is 255 in a byte; it becomes 34.
    """

    label_names = tuple(kind.name for kind in CLASSES)
    num_labels = len(label_names)
    void = {255: 34}  # noqa: RUF012

    def __init__(self, root: str | Path, split: str = "train", size: Size = (256, 512), edges: bool = True) -> None:
        look_up_split(split, {"train": None, "val": None})
        maps = (f"gtFine/{split}",)
        columns = [
            Column("picture", (f"leftImg8bit/{split}",), "_leftImg8bit", (".png", ".jpg")),
            Column("label map", maps, "_gtFine_labelIds"),
        ]
        if edges:
            columns.append(Column("instance map", maps, "_gtFine_instanceIds"))
        super().__init__(Path(root).expanduser(), columns, size)
