"""Every game: it learns, shows and scores, and its training is the same at every world size."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning import seed_everything
from torch import nn
from torch.utils.data import DataLoader

from gan import GanModule
from gan.games.cyclegan import CycleGan
from gan.games.decay import half_then_down
from gan.games.pix2pix import Pix2pix
from gan.games.r3gan import R3Gan, projections, wasserstein
from gan.games.sean import Sean
from nets.discriminator import MultiScaleDiscriminator, PatchDiscriminator
from nets.r3 import R3Discriminator, R3Generator
from nets.resnet import ResnetGenerator
from nets.sean import SeanGenerator
from nets.style import StyleEncoder
from nets.unet import UNet
from strategies import PhaseStrategy
from tests.parity import BATCH, distance, snapshot, train, trainer

LABELS, SIZE = 4, 16


def sean() -> Sean:
    torch.manual_seed(0)
    return Sean(
        StyleEncoder(4, 2, gain=1.0),
        SeanGenerator(LABELS, 4, 2, 3, upsamplings=2, gain=1.0),
        MultiScaleDiscriminator(LABELS + 3, 2, 2, gain=1.0),
        labels=LABELS,
        steps=12,
        generator_rate=1e-3,
        discriminator_rate=4e-3,
    )


def pix2pix() -> Pix2pix:
    torch.manual_seed(0)
    net = UNet(LABELS, 3, 2, depth=3, dropouts=1)
    return Pix2pix(net, PatchDiscriminator(LABELS + 3, 2, 2), labels=LABELS, steps=12, rate=1e-3)


def cyclegan() -> CycleGan:
    torch.manual_seed(0)
    make = partial(ResnetGenerator, width=2, blocks=1), partial(PatchDiscriminator, 3, 2, 2)
    return CycleGan(*make, steps=12, rate=1e-3, pool=2 * BATCH)


def r3gan() -> R3Gan:
    torch.manual_seed(0)
    return R3Gan(R3Generator(4, (4, 4, 2)), R3Discriminator((4, 4, 2)), rate=1e-3, ema=0.9)


GAMES = {game.__name__: game for game in (sean, pix2pix, cyclegan, r3gan)}


def pictures(step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """A batch with everything that any game asks for; label 3 is in few pictures."""
    generator = torch.Generator().manual_seed(2000 + step)

    def picture() -> torch.Tensor:
        return torch.rand(BATCH, 3, SIZE, SIZE, generator=generator, dtype=torch.float64).to(dtype) * 2 - 1

    def label() -> torch.Tensor:
        coarse = torch.randint(0, 3, (BATCH, 4, 4), generator=generator)
        coarse[step % BATCH, 0] = 3
        return coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)

    names = ("image", "style_image", "truth", "a", "b", "truth_a", "truth_b")
    return {name: picture() for name in names} | {"label": label(), "style_label": label()}


# ---- parity ----


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """Each game trained in one process."""
    return {name: train(game, pictures, "single") for name, game in GAMES.items()}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", GAMES)
def test_every_world_size_trains_the_same(name, world, ranks, alone):
    for together in ranks(world).run(train, GAMES[name], pictures, "ddp", world=world):
        assert distance(alone[name], together) < 1e-10


@pytest.mark.parametrize("name", GAMES)
def test_without_synchronisation_training_differs(name, ranks, alone):
    apart = ranks(2).run(train, GAMES[name], pictures, "deaf", world=2)
    assert min(distance(alone[name], one) for one in apart) > 1e-6


def _score(game, world: int) -> float:
    """The validation score of an untrained game on two batches."""
    rank = torch.distributed.get_rank() if world > 1 else 0
    size = BATCH // world
    batches = [{k: v[rank * size : (rank + 1) * size] for k, v in pictures(step).items()} for step in range(2)]
    module = game()
    (result,) = trainer(PhaseStrategy("ddp"), world, 1).validate(
        module, DataLoader(batches, batch_size=None), verbose=False
    )
    return result["val/distance"]


def test_the_distance_of_r3gan_is_the_same_on_two_ranks(ranks):
    one = _score(r3gan, 1)
    assert ranks(2).run(_score, r3gan, 2) == pytest.approx([one, one], rel=1e-6)


# ---- one step, a score, a grid ----


def fitted(game, steps: int = 1, **kwargs) -> GanModule:
    batches = [pictures(step) for step in range(steps)]
    module = game()
    trainer(PhaseStrategy("ddp"), 1, steps, **kwargs).fit(
        module, DataLoader(batches, batch_size=None), DataLoader(batches[:1], batch_size=None)
    )
    return module


@pytest.mark.parametrize("name", GAMES)
def test_every_player_learns_and_the_score_is_logged(name):
    before = GAMES[name]().state_dict()
    module = GAMES[name]()
    batches = DataLoader([pictures(0)], batch_size=None)
    run = trainer(PhaseStrategy("ddp"), 1, 1)
    run.fit(module, batches, batches)
    scores = {key: value for key, value in run.callback_metrics.items() if key.startswith("val/")}
    assert len(scores) == 1
    assert all(math.isfinite(value) and value > 0 for value in scores.values())
    moved = {key.split(".")[0] for key, value in module.state_dict().items() if not _same(value, before[key])}
    assert moved >= set(module.players)


def _same(one, other) -> bool:
    return not isinstance(one, torch.Tensor) or torch.equal(one.double(), other.double())


@pytest.mark.parametrize("name", GAMES)
def test_show_gives_titled_pictures(name):
    columns = GAMES[name]().eval().show(pictures(0, torch.float32))
    assert len(columns) >= 3
    for column in columns.values():
        assert not column.requires_grad
        maps = column.dtype == torch.int64
        assert column.shape == ((BATCH, SIZE, SIZE) if maps else (BATCH, 3, SIZE, SIZE))


# ---- what is particular to a game ----


def painted(game: GanModule, monkeypatch, colour: float) -> None:
    """Let a generator paint everything in one grey."""
    monkeypatch.setattr(
        game.generator, "forward", lambda mask, *rest: torch.full((len(mask), 3, *mask.shape[2:]), colour)
    )


def test_sean_scores_only_regions_that_the_style_picture_has(monkeypatch):
    game = sean()
    painted(game, monkeypatch, 0.0)
    logged = {}
    monkeypatch.setattr(game, "log", lambda name, value, **_: logged.update({name: value.item()}))
    batch = pictures(0, torch.float32)
    batch["label"] = torch.zeros(BATCH, SIZE, SIZE, dtype=torch.int64)
    batch["label"][:, :, 8:] = 1
    batch["style_label"] = torch.zeros_like(batch["label"])
    batch["truth"] = torch.full_like(batch["truth"], 0.5)
    batch["truth"][:, :, :, 8:] = 1.0  # label 1, of which the styles say nothing
    game.validation_step(batch)
    assert logged == {"val/transfer_error": pytest.approx(0.25)}


def test_sean_takes_styles_from_the_other_picture():
    game = sean().eval()
    batch = pictures(0, torch.float32)
    torch.manual_seed(0)
    one = game.transfer(batch)
    torch.manual_seed(0)
    same = game.transfer(batch | {"image": torch.zeros_like(batch["image"])})
    torch.manual_seed(0)
    other = game.transfer(batch | {"style_image": torch.zeros_like(batch["image"])})
    assert torch.equal(one, same)
    assert not torch.allclose(one, other, atol=1e-3)


def test_pix2pix_paints_once_a_step_and_uses_it_twice(monkeypatch):
    game, painted = pix2pix(), []
    forward = game.generator.forward
    monkeypatch.setattr(game.generator, "forward", lambda mask: painted.append(forward(mask)) or painted[-1])
    trainer(PhaseStrategy("ddp"), 1, 3).fit(game, DataLoader([pictures(k) for k in range(3)], batch_size=None))
    assert len(painted) == 3


def test_pix2pix_in_micro_batches_has_a_fake_each():
    """The shared fake follows the micro-batch: without batch norm, two halves train as the whole does."""

    class Halves(Pix2pix):
        def configure_phases(self):
            for phase in super().configure_phases():
                yield replace(phase, micro_batches=2)

    found = []
    for kind in (Pix2pix, Halves):
        torch.manual_seed(0)
        net = UNet(LABELS, 3, 2, depth=2, dropouts=1)
        for stage in (*net.down[1:], *net.up):
            for number, layer in enumerate(stage):
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    stage[number] = nn.Identity()
        game = kind(net, PatchDiscriminator(LABELS + 3, 2, 2), labels=LABELS, steps=12, rate=1e-3)
        strategy = PhaseStrategy("ddp")
        run = trainer(strategy, 1, 3)
        seed_everything(0, verbose=False)
        run.fit(game, DataLoader([pictures(k) for k in range(3)], batch_size=None))
        found.append(snapshot(game, strategy))
    assert distance(*found) < 1e-10


def test_cyclegan_shows_past_fakes_to_the_discriminators():
    game = cyclegan()
    trainer(PhaseStrategy("ddp"), 1, 4).fit(game, DataLoader([pictures(k) for k in range(4)], batch_size=None))
    assert {len(slots) for slots in game.past_b.slots.values()} == {2}
    assert set(game.past_a.slots) == set(range(BATCH))


def test_r3gan_averages_its_generator_only():
    game = r3gan()
    strategy = PhaseStrategy("ddp")
    trainer(strategy, 1, 2).fit(game, DataLoader([pictures(k) for k in range(2)], batch_size=None))
    assert strategy.policies["generator"].ema is not None
    assert strategy.policies["discriminator"].ema is None


def test_numbered_fakes_are_the_same_each_time():
    game = r3gan()
    like = torch.zeros(1)
    some = game.numbered(torch.tensor([3, 5]), like)
    torch.testing.assert_close(game.numbered(torch.tensor([5]), like), some[1:])
    assert not torch.allclose(some[0], some[1], atol=1e-2)


def test_the_distance_sees_a_shift_and_not_the_order():
    generator = torch.Generator().manual_seed(0)
    one = projections(torch.rand(64, 3, 16, 16, generator=generator))
    assert wasserstein(one, one.flip(0)) == 0
    other = projections(torch.rand(64, 3, 16, 16, generator=generator))
    assert wasserstein(one, other + 1) > 5 * wasserstein(one, other) > 0


def test_linear_decay_holds_and_then_falls_to_zero():
    assert [half_then_down(8, update) for update in (0, 4, 5, 6, 8, 9)] == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
