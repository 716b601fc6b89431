"""Data sets, and the one DataModule that splits them over ranks.

`datasets` is also the name of a well-known package: give this one an environment of its own.
"""

from datasets.augment import Augment
from datasets.batches import GlobalBatches, ResumableLoader
from datasets.data import GanData
from datasets.faces import FLIP_PAIRS, LABELS, LOOKS, FaceDomains, Faces, FaceTransfers
from datasets.folder import FolderPairs

__all__ = [
    "FLIP_PAIRS",
    "LABELS",
    "LOOKS",
    "Augment",
    "FaceDomains",
    "FaceTransfers",
    "Faces",
    "FolderPairs",
    "GanData",
    "GlobalBatches",
    "ResumableLoader",
]
