"""Samples that are made up, for the plan of a run whose pictures are not here."""

from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from datasets.augment import Samples
from datasets.files.pairs import as_size


class Labelled(Samples, Protocol):
    """A data set that knows how many labels it has."""

    num_labels: int


class MadeUp(Dataset):
    """Samples of the right shape for a plan. Labels are in blocks, which is about what a label map costs on a CPU."""

    flip_pairs = ()

    def __init__(self, num_labels: int, size: int | tuple[int, int], edges: bool) -> None:
        self.num_labels, self.size, self.edges = num_labels, as_size(size), edges

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        down, across = (torch.arange(length) * 8 // length for length in self.size)
        label = (index + across + 8 * down[:, None]) % self.num_labels
        image = tv_tensors.Image(torch.zeros(3, *self.size, dtype=torch.uint8))
        edges = {"edges": tv_tensors.Mask(label % 2)} if self.edges else {}
        return {"image": image, "label": tv_tensors.Mask(label), **edges}
