"""ddp: only the learners' bytes, and reduction during backward; that it trains as one device: tests/scenes/."""

from typing import ClassVar

import pytest
from torch import nn

from tests.support.hard_games import One, TwoPhases
from tests.support.parity import in_buckets, often
from tests.support.watch import moved, operations, sizes_of

# ---- bytes ----


def test_a_phase_with_two_learners_moves_both_and_asks_once_for_what_was_not_reached(ranks):
    sizes = sizes_of(TwoPhases)
    for _, phase, collectives in ranks(2).run(moved, TwoPhases, "ddp", 2, 3)[0][-3:]:
        gradients, questions = ([size for _, size in collectives if (size > 8 * 7) == of] for of in (True, False))
        assert sum(gradients) == sizes["discriminator"] + (sizes["generator"] if phase == "both" else 0)
        # One head of the discriminator is out of reach in the phases of the other: a byte for each of six weights.
        assert questions == ([] if phase == "both" else [6])


# ---- reduction during backward ----


class Wide(One):
    of_play: ClassVar = {"micro_batches": 2}

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())])

    def play(self, batch):
        return self.net(batch["x"].repeat(1, 43)[:, :256]).square().mean()


@pytest.mark.parametrize(
    ("policy", "collective"),
    often([("ddp", "c10d.allreduce"), *((zero, "c10d._reduce_scatter") for zero in ("zero2", "zero3"))]),
)
def test_reduction_starts_before_backward_has_ended(policy, collective, ranks):
    names = ranks(2).run(in_buckets, 2 * 8 * 256 * 256, operations, Wide, policy, 2, 3)[0]
    reductions = [number for number, name in enumerate(names) if name.startswith(collective)]
    slopes = [number for number, name in enumerate(names) if name.startswith("aten.tanh_backward")]
    assert len(reductions) > 1
    assert reductions[0] < slopes[-1]  # gradients are still computed after the first bucket has left
    assert reductions[0] > slopes[len(slopes) // 2 - 1]  # and none leaves in the first micro-batch
