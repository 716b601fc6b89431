"""Networks on the meta device: made module by module; that they train as on one device: tests/scenes/meta.py."""

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from gan import Player
from gan.files.errors import UserError
from gan.noise import seed_for
from strategies import PhaseStrategy
from tests.support.counted import Counted, forget, held
from tests.support.duel import fit
from tests.support.hard_games import Plain
from tests.support.meta_games import OnMeta, Vectors
from tests.support.parity import distance, in_buckets, often, on, parts, refused, trainer
from tests.support.saved import tensors


def start(policy: str, world: int) -> dict[str, Any]:
    game, strategy = OnMeta(), PhaseStrategy(policy, check=False)
    found = {}

    def look(*_: Any) -> None:
        with strategy.gathered():
            found.update({name: value.detach().clone() for name, value in game.state_dict().items()})

    with mock.patch.dict("os.environ", PL_GLOBAL_SEED="11"):
        looks = LambdaCallback(on_train_start=look)
        trainer(strategy, world, 1, callbacks=[looks], sync_batchnorm=True).fit(game, parts(1, world))
    return found


def test_a_module_is_made_as_its_constructor_makes_it_under_its_own_seed(ranks):
    found = start("single", 1)
    torch.set_default_dtype(torch.float64)
    try:
        for name, make in (("0", lambda: nn.Linear(4, 8)), ("2", lambda: nn.Linear(8, 6))):
            torch.manual_seed(seed_for(11, "generator", name))
            layer = make()
            assert torch.equal(found[f"generator.{name}.weight"], layer.weight)
            assert torch.equal(found[f"generator.{name}.bias"], layer.bias)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found["judge.attention.out_proj.bias"].abs().sum() == 0  # nn.MultiheadAttention makes it zero
    assert found["judge.attention.out_proj.weight"].abs().sum() > 0
    assert distance(ranks(2).run(start, "zero3", 2)[1], found) == 0


def resumed(policy: str, world: int, path: str) -> dict[str, Any]:
    game = OnMeta()
    with mock.patch.object(nn.Linear, "reset_parameters", side_effect=AssertionError("made before it was loaded")):
        return fit(lambda: game, policy, world, 4, resume=path, sync_batchnorm=True)


@pytest.mark.parametrize(("policy", "world"), often([("zero3", 2), ("fsdp", 2), ("single", 1)], ["zero3"]))
def test_a_checkpoint_resumes_and_its_weights_are_not_made_before(policy, world, ranks, tmp_path):
    path = str(tmp_path / "half.ckpt")
    fit(OnMeta, "single", 1, 2, path)
    assert distance(on(ranks, world)(resumed, policy, world, path)[0], resumed("single", 1, path)) < 1e-10


def test_a_game_on_meta_is_loaded_from_a_checkpoint(tmp_path):
    path = str(tmp_path / "half.ckpt")
    fit(OnMeta, "single", 1, 2, path)
    game = OnMeta.load_from_checkpoint(path)
    loaded = game.state_dict()
    for key, value in tensors(path, ["state_dict"]).items():  # a weight with two names is saved under one
        assert torch.equal(loaded[key.removeprefix("/state_dict/")].float(), value.float())
    assert torch.equal(game.judge.shifted.scale, 1 + torch.arange(6.0) / 6)


# ---- memory ----

LAYERS, WIDTH = 64, 24


class Deep(Vectors):
    """A frozen teacher of many layers has most of its bytes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device(self.device_of_networks):
            layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
            self.teacher = nn.Sequential(nn.Linear(6, WIDTH), *layers, nn.Linear(WIDTH, 1))

    def configure_players(self):
        yield from (player for player in super().configure_players() if player.name != "teacher")
        yield Player("teacher", self.teacher, blocks=[str(number + 1) for number in range(LAYERS)], **self.of_teacher)


def peak(policy: str, world: int) -> tuple[int, int]:
    """The most bytes of tensors while a game is made and set up, and those that training keeps between steps."""
    counted, strategy, kept = Counted(), PhaseStrategy(policy, check=False), []
    setup = strategy.setup

    def set_up(*args: Any) -> None:
        with counted:
            setup(*args)

    strategy.setup = set_up
    forget()
    with counted:
        module = Deep()
    between = LambdaCallback(on_train_batch_end=lambda *_: kept.append(held()))
    trainer(strategy, world, 2, callbacks=[between]).fit(module, parts(2, world))
    return counted.peak, kept[-1]


@pytest.mark.parametrize("policy", often(["zero3", "fsdp", "pipeline"], ["zero3"]))
def test_set_up_needs_no_more_than_a_tenth_above_what_training_holds(policy, ranks):
    bytes_ = sum(weight.numel() * 8 for weight in Deep().parameters())
    world = 4 if policy == "pipeline" else 2
    for most, kept in ranks(world).run(in_buckets, WIDTH * WIDTH * 8, peak, policy, world):
        assert bytes_ / world < kept and most < 1.1 * kept


# ---- after a training that sharded what does not fit ----


class Interrupts(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise KeyboardInterrupt


def left(how: str, policy: str) -> str | None:
    """What is said of a second training, where the first was interrupted, or has ended where little memory is free."""
    game, callbacks = (Vectors(), []) if how == "ended" else (Plain(), [Interrupts()])
    made = trainer(PhaseStrategy(policy, check=False), 2, 2, callbacks=callbacks)
    with mock.patch("strategies.training.players.memory", return_value=64.0), suppress(SystemExit):
        made.fit(game, parts(2, 2))
    with pytest.raises(UserError, match="its values are not on this rank"):
        game.generator[0].weight.sum(), game.generator[2].weight.sum()
    return refused(lambda: game, policy=policy, world=2, steps=2)


@pytest.mark.parametrize(
    ("policy", "how"),
    often(
        [
            *((policy, how) for policy in ("zero3", "fsdp") for how in ("ended", "interrupted")),
            ("generator=pipeline,*=ddp", "interrupted"),
        ]
    ),
)
def test_what_stays_sharded_is_not_made_anew_nor_trained_on(policy, how, ranks):
    for told in ranks(2).run(left, how, policy):
        assert "has no values: they were sharded in a training that was interrupt" in told and "ckpt_path=" in told
