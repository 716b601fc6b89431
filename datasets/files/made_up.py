"""Samples that are made up, for the plan of a run whose pictures are not here."""

from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from datasets.files.pairs import Size, as_size


class MadeUp(Dataset):
    """Samples of the right shape for a plan. Labels are in blocks, which is about what a label map costs on a CPU."""

    flip_pairs, classes, class_names, sample_names = (), 0, (), ()

    def __init__(self, size: Size, channels: int = 3, num_labels: int = 0, edges: bool = False) -> None:
        self.size, self.channels = as_size(size), channels
        self.num_labels, self.edges = num_labels, edges

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {"image": tv_tensors.Image(torch.zeros(self.channels, *self.size, dtype=torch.uint8))}
        if self.num_labels:
            down, across = (torch.arange(length) * 8 // length for length in self.size)
            label = (index + across + 8 * down[:, None]) % self.num_labels
            item["label"] = tv_tensors.Mask(label)
            item |= {"edges": tv_tensors.Mask(label % 2)} if self.edges else {}
        return item
