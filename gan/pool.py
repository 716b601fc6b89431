"""CycleGAN's pool of past images, made to follow the sample.

[Note: a pool that follows the sample]
The published pool is one list that every image of a batch passes through in turn, which no two ranks could
share without talking. Here each place of the global batch has slots of its own (size / global batch, at
least one) and its own coin. Whoever holds the place holds its slots: no communication, and the same images
come back at any number of ranks.
"""

import random

import torch
from torch import Tensor, nn

from gan import noise


class ImagePool(nn.Module):
    """Shows the discriminator a past fake half of the time (Shrivastava et al. 2017; CycleGAN uses 50).

    Its images are part of the module's state: a checkpoint has those of all ranks.
    """

    def __init__(self, size: int = 50) -> None:
        super().__init__()
        self.size = size
        self.slots: dict[int, list[Tensor]] = {}
        self._visited: set[int] = set()

    @torch.no_grad()
    def query(self, images: Tensor) -> Tensor:
        """These images, some of them exchanged for earlier ones; outside a phase they pass unchanged."""
        place = noise.here()
        if place is None:
            return images.detach()
        depth = max(1, self.size // place.total)
        shown = []
        for row, (image, seed) in enumerate(zip(images.detach(), place.seeds(len(images)), strict=True)):
            number = place.first + row
            slots = self.slots.setdefault(number, [])
            self._visited.add(number)
            coin = random.Random(seed)
            if len(slots) < depth:
                slots.append(image.clone())
            elif coin.random() < 0.5:
                slot = coin.randrange(depth)
                image, slots[slot] = slots[slot].to(image), image.clone()
            shown.append(image)
        return torch.stack(shown)

    def own(self) -> dict[int, list[Tensor]]:
        """The slots this rank answers for: the places it has visited, or all that was loaded if none yet."""
        return {number: self.slots[number] for number in self._visited or self.slots}

    def get_extra_state(self) -> dict[int, dict[int, Tensor]]:
        """torch's hook: the slots, numbered, go into the state dict."""
        return {place: dict(enumerate(slots)) for place, slots in self.own().items()}

    def set_extra_state(self, state: dict[int, dict[int, Tensor]]) -> None:
        """torch's hook: take the slots of all places; those of other ranks are simply never visited."""
        self.slots = {place: [slots[number].clone() for number in sorted(slots)] for place, slots in state.items()}
        self._visited = set()
