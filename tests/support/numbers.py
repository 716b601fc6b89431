"""A data set of numbers."""

from torch.utils.data import Dataset


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"index": index}
