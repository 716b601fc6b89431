"""Any folder of pictures and label maps."""

from pathlib import Path

from datasets.files.pairs import PICTURES, Column, Pairs, Size, look_up_split
from gan.errors import UserError


class FolderPairs(Pairs):
    """`root/images/<name>.jpg` (or png, webp ...) with `root/labels/<name>.png`, resized to one size.

    Names may contain folders. A label map is a PNG, one-channel or palette, of the numbers 0 to num_labels - 1.
    `flip_pairs` are pairs of labels that change places when a picture is mirrored, such as left and right eye.

    Split "val" is the last `held_out` pictures by name, "train" is the others, and "all" is all of them. If there are
    folders `root/train` and `root/test`, each with images/ and labels/ (CelebA-HQ as prepared for SEAN), these are
    "train" and "val".
    """

    def __init__(
        self,
        root: str | Path,
        num_labels: int,
        size: Size,
        flip_pairs: tuple[tuple[int, int], ...] = (),
        *,
        split: str = "all",
        held_out: int = 16,
    ) -> None:
        if not 1 <= num_labels <= 65536:
            raise UserError(f"{num_labels} labels do not fit into a label map; try 1 to 65536")
        self.num_labels, self.flip_pairs = num_labels, flip_pairs
        self.label_names = tuple(str(label) for label in range(num_labels))
        root = Path(root).expanduser()
        prepared = not (root / "images").is_dir() and (root / "train" / "images").is_dir()
        parts = {"train": ("train/",), "val": ("test/",), "all": ("train/", "test/")}
        folders = look_up_split(split, parts if prepared else dict.fromkeys(parts, ("",)))
        pictures = Column("picture", tuple(f"{part}images" for part in folders), suffixes=PICTURES)
        super().__init__(root, (pictures, Column("label map", tuple(f"{part}labels" for part in folders))), size)
        if split == "all" or prepared:
            return
        if not 0 < held_out < len(self):
            raise UserError(
                f"{len(self)} pictures in '{root}', {held_out} to hold out; type a --held-out of 1 to {len(self) - 1}"
                if len(self) > 1
                else f"one picture in '{root}' is none to hold out; add a second"
            )
        self.keep_only(slice(-held_out) if split == "train" else slice(-held_out, None))
