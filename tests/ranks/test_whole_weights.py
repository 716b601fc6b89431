"""What ranks hold and move where an optimizer looks at whole weights; how they train: tests/scenes/optimizers.py."""

import torch
from lightning import Callback
from torch import nn

from gan import GanModule, Phase, Player
from gan.files.errors import UserError
from strategies import PhaseStrategy
from tests.scenes.optimizers import SHAMPOO
from tests.support.parity import parts, trainer
from tests.support.watch import moved

# ---- what a rank holds, and what is moved ----


class Layers(GanModule):
    """Eight matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(8)))

    def configure_players(self):
        yield Player("net", self.net, SHAMPOO, ema=0.9)

    def configure_phases(self):
        yield Phase("net", lambda batch: self.net(batch["x"]).square().mean(), "net")


class Weighing(Callback):
    """How many numbers the optimizer and the average hold after a step."""

    def on_train_batch_end(self, trainer, *_):
        policy = trainer.strategy.policies["net"]
        factors = [factor for state in policy.optimizer.state.values() for factor in state["factors"]]
        self.held = sum(t.numel() for t in factors), sum(t.numel() for t in policy.ema.average)


def held(world):
    weighing = Weighing()
    trainer(PhaseStrategy("zero1", check=False), world, 2, callbacks=[weighing]).fit(Layers(), parts(2, world))
    return weighing.held


def test_state_and_average_are_shared_out(ranks):
    numbers = 8 * 36
    assert ranks(4).run(held, 4) == [(2 * numbers / 4, numbers / 4)] * 4


def test_an_update_moves_each_weight_once(ranks):
    exact = 8 * 8 * 36  # bytes
    step, _, collectives = ranks(2).run(moved, Layers, "zero1", 2, 3)[0][-1]
    assert step == 2
    assert collectives == [("allreduce_", exact), ("broadcast_", exact / 2), ("broadcast_", exact / 2)]


def stale_graph(policy, world):
    """A graph of before an update runs backward after it."""
    kept = []

    class Game(Layers):
        def configure_phases(self):
            yield from super().configure_phases()
            yield Phase("again", self.again, "net")

        def again(self, batch):
            kept.append(self.net(batch["x"]).square().mean())
            return kept[0]

    try:
        trainer(PhaseStrategy(policy, check=False), world, 2).fit(Game(), parts(2, world))
    except (RuntimeError, UserError) as error:
        return "modified by an inplace operation" in str(error) or "a second time" in str(error)
    return False


def test_a_graph_of_old_weights_is_an_error_on_every_rank(ranks):
    assert ranks(2).run(stale_graph, "zero1", 2) == [True, True]
