"""Data sets, and the one DataModule that splits them over ranks.

`datasets` is also the name of a well-known package: give this one an environment of its own.
"""

from datasets.ade20k import ADE20K
from datasets.augment import Augment
from datasets.batches import GlobalBatches, ResumableLoader
from datasets.celebamask import CelebAMask
from datasets.cityscapes import Cityscapes
from datasets.coco import CocoStuff
from datasets.data import GanData
from datasets.facades import Facades
from datasets.faces import FLIP_PAIRS, LABELS, LOOKS, FaceDomains, Faces, FaceTransfers
from datasets.folder import FolderPairs
from datasets.pairs import Pairs

__all__ = [
    "ADE20K",
    "FLIP_PAIRS",
    "LABELS",
    "LOOKS",
    "Augment",
    "CelebAMask",
    "Cityscapes",
    "CocoStuff",
    "Facades",
    "FaceDomains",
    "FaceTransfers",
    "Faces",
    "FolderPairs",
    "GanData",
    "GlobalBatches",
    "Pairs",
    "ResumableLoader",
]
