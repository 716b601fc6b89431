"""CycleGAN's pool of past images, which gives the same images at any number of ranks.

[Note: a pool that follows the sample]
The published pool is one list, which every image of a batch goes through in turn. Ranks could not share it without
communication. Here each place of the global batch has its own slots (size / global batch, at least one) and its own
random numbers. The rank that holds the place holds its slots. So there is no communication, and the same images come
back at any number of ranks.
"""

import random

import torch
from torch import Tensor, nn

from gan import noise


class ImagePool(nn.Module):
    """Shows the discriminator a past fake half of the time (Shrivastava et al. 2017; CycleGAN has a size of 50).

    The images are part of the module's state, so a checkpoint holds the images of all ranks.
    """

    def __init__(self, size: int = 50) -> None:
        super().__init__()
        self.size = size
        self.slots: dict[int, list[Tensor]] = {}
        self._visited: set[int] = set()

    @torch.no_grad()
    def query(self, images: Tensor) -> Tensor:
        """The images, some of them exchanged for earlier ones. Outside a phase, and with a size of 0, they stay."""
        place = noise.here()
        if place is None or not self.size:
            return images.detach()
        depth = max(1, self.size // place.total)
        shown = []
        numbers, seeds = place.numbers(len(images)), place.seeds(len(images))
        for row, (image, seed) in enumerate(zip(images.detach(), seeds, strict=True)):
            number = numbers[row % len(numbers)]
            slots = self.slots.setdefault(number, [])
            self._visited.add(number)
            coin = random.Random(seed)
            if len(slots) < depth:
                slots.append(image.clone())
            elif coin.random() > 0.5:
                slot = coin.randrange(depth)
                image, slots[slot] = slots[slot].to(image), image.clone()
            shown.append(image)
        return torch.stack(shown)

    def own(self) -> dict[int, list[Tensor]]:
        """The slots of the places that this rank holds; all loaded slots before its first query."""
        return {number: self.slots[number] for number in self._visited or self.slots}

    def get_extra_state(self) -> dict[int, dict[int, Tensor]]:
        """torch calls this to put the slots into the state dict."""
        return {place: dict(enumerate(slots)) for place, slots in self.own().items()}

    def set_extra_state(self, state: dict[int, dict[int, Tensor]]) -> None:
        """torch calls this with the slots of all places. The places of other ranks are never used here."""
        self.slots = {place: [slots[number].clone() for number in sorted(slots)] for place, slots in state.items()}
        self._visited = set()
