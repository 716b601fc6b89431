"""The masks of SPADE and SEAN: both turns of a step get the same planes."""

import pytest
import torch

from gan.games.spade import Spade
from nets.blocks import edges_of, onehot
from nets.discriminator import MultiScaleDiscriminator
from nets.sean.generator import SeanGenerator

LABELS = 4


def game(edges: bool = False) -> Spade:
    generator = SeanGenerator(LABELS, None, width=2, hidden=3, upsamplings=2, edges=edges)
    return Spade(generator, MultiScaleDiscriminator(LABELS + edges + 3, width=2, layers=2), labels=LABELS)


def label(seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, LABELS, (2, 4, 4), generator=draw).repeat_interleave(4, 1).repeat_interleave(4, 2)


@pytest.mark.parametrize("edges", [False, True])
def test_both_turns_of_a_step_have_one_mask(edges, monkeypatch):
    made, labels = game(edges), label()
    compare, masks = made.compare, []
    monkeypatch.setattr(made, "compare", lambda mask, *pictures: masks.append(mask) or compare(mask, *pictures))
    batch = {"image": torch.rand(2, 3, 16, 16), "label": labels}
    made.fool(batch)
    made.judge(batch)
    made.forget_shared()
    made.judge(batch)
    first, second, later = masks
    assert second is first and later is not first
    assert torch.equal(first[:, :LABELS], onehot(labels, LABELS, first))
    assert not edges or torch.equal(first[:, LABELS], edges_of(labels).to(first.dtype))
    assert made.double().mask(labels).dtype == torch.float64


def test_edges_of_the_batch_are_the_batchs_own():
    made, labels = game(edges=True), label()
    for edges in (torch.zeros(2, 16, 16), torch.ones(2, 16, 16)):
        assert torch.equal(made.mask(labels, edges)[:, LABELS], edges)
