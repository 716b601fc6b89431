"""Data sets, and the one DataModule that splits them over ranks.

`datasets` is also the name of a well-known package: give this one an environment of its own.
"""

from typing import TYPE_CHECKING

from gan.files.loading import by_name

if TYPE_CHECKING:
    from datasets.augment import Augment
    from datasets.batches import GlobalBatches, ResumableLoader
    from datasets.drawn.faces import FLIP_PAIRS, LABELS, LOOKS, FaceDomains, FaceLooks, Faces, FaceTransfers
    from datasets.drawn.tones import Tones
    from datasets.files.layouts import ADE20K, CelebAMask, Cityscapes, CocoStuff, Facades, FolderPairs
    from datasets.files.pairs import Pairs
    from datasets.files.pictures import Pictures
    from datasets.loaders import GanData, GlobalLoader, GlobalStream

PLACES = {
    "datasets.augment": "Augment",
    "datasets.batches": "GlobalBatches ResumableLoader",
    "datasets.drawn.faces": "FLIP_PAIRS LABELS LOOKS FaceDomains FaceLooks Faces FaceTransfers",
    "datasets.drawn.tones": "Tones",
    "datasets.files.layouts": "ADE20K CelebAMask Cityscapes CocoStuff Facades FolderPairs",
    "datasets.files.pairs": "Pairs",
    "datasets.files.pictures": "Pictures",
    "datasets.loaders": "GanData GlobalLoader GlobalStream",
}
__all__ = [name for names in PLACES.values() for name in names.split()]
__getattr__ = by_name(__name__, PLACES)
