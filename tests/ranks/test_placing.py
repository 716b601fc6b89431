"""Frozen players on ranks of their own: exact, with checkpoints that travel, or refused by name."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gan import Phase, ranks
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.placing import server
from strategies.placing.server import Server
from strategies.processes import call_on_ranks
from strategies.processes.stopping import Stopped
from tests.support.parity import EXACT, Whole, equals, often, snapshot, trainer
from tests.support.placed_games import AsAWhole, Distil, Teacher, write
from tests.support.worlds import apart

STEPS, HALF = 4, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("teachers")
    write(path)
    return str(path)


def batches(training: int) -> Whole:
    return Whole(8, min(int(os.environ.get("RANK", 0)), training - 1), training)


def fit(
    game: Callable[[], Any],
    policy: str,
    training: int = 1,
    total: int = 1,
    steps: int = STEPS,
    save: str | None = None,
    resume: str | None = None,
    around: Callable[[], Any] | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """Train, and return what learners have learned: on ranks that train."""
    strategy, module = PhaseStrategy(policy, check=(save or resume) is None), game()
    made = trainer(
        strategy, total, steps, val_check_interval=HALF, limit_val_batches=1, sync_batchnorm=True, **settings
    )
    if around is not None:
        around(made, module)
    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="3"), mock.patch("strategies.sharding.bucket.SIZE", 400):
        made.fit(module, batches(training), batches(training), ckpt_path=resume)
    with strategy.gathered():  # also where the ranks that have served are gone
        pass
    if save is not None:
        made.save_checkpoint(save)
    with torch.no_grad():
        for name in ("teacher", "eye"):  # what a person would read of all the game's weights
            if hasattr(module, name) and strategy.world_size < total:
                delattr(module, name)
    return snapshot(module, strategy) | {"score": made.callback_metrics["score"].double()}


def placed(policy: str, training: int, total: int, game: Callable[[], Any], **how: Any) -> list[dict[str, Tensor]]:
    """The same on ranks, of which some serve: what those that train have found."""
    return apart(partial(fit, game, policy, training, total, **how), total)[:training]


def learned(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if "teacher" not in name and "eye" not in name}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "policy", "training", "total"),
    [
        (Distil, "teacher=zero3@2-3,eye=ddp@2-3,*=ddp@0-1", 2, 4),
        (Distil, "teacher=zero3@1-2,*=ddp", 1, 3),
        (Distil, "teacher=ddp@1,eye=zero2@1,*=ddp", 1, 2),
        (Distil, "teacher=zero3@2,eye=ddp@3,*=zero3", 2, 4),
        (Distil, "teacher=zero3+recompute@2-3,eye=zero3+offload@2-3,*=fsdp", 2, 4),
        (Distil, "teacher=fsdp@2-3,*=zero2", 2, 4),
        (Distil, "teacher=zero3+whole@1-3,*=ddp", 1, 4),
        (AsAWhole, "teacher=zero3@2-3,generator=pipeline,*=zero1", 2, 4),
        (Distil, "teacher=zero3@4-6,*=zero3", 4, 7),
        (AsAWhole, "teacher=pipeline@2-3,*=ddp", 2, 4),
        (AsAWhole, "teacher=pipeline@1-3,eye=zero3@1-3,*=ddp", 1, 4),
    ],
)
def test_it_is_what_one_device_does(folder, game, policy, training, total):
    """`make test` has the same in `test_checkpoints_travel`, and in test_rehearsal.py."""
    one = fit(partial(game, folder), "single")
    equals([learned(each) for each in placed(policy, training, total, partial(game, folder))], learned(one))


def holds_nothing(made: Any, module: Distil) -> None:
    """Look at memory in the midst of the training."""

    def look(*_: Any) -> None:
        parameters = list(module.teacher.parameters())
        assert all(each.untyped_storage().nbytes() <= 8 for each in parameters), "the teacher has memory here"
        with pytest.raises(UserError, match="the weights of player 'teacher' are on ranks 1-2"):
            module.teacher.start.weight.sum()

    module.on_train_batch_end = look


def test_checkpoints_travel(folder, tmp_path):
    """From ranks that are served to others and to one device. Ranks that train hold nothing of the teacher."""
    game, half = partial(Distil, folder), str(tmp_path / "half.ckpt")
    one = fit(game, "single")
    placed("teacher=zero3@1-2,eye=ddp@1-2,*=ddp", 1, 3, game, steps=HALF, save=half, around=holds_nothing)
    assert not any("teacher.blocks" in name for name in os.listdir(half)), "the teacher's weights are in its file"
    for found in (fit(game, "single", resume=half), *placed("teacher=zero3@2,*=zero3", 2, 3, game, resume=half)[:1]):
        names = learned(one).keys() - {"score"}
        assert max((found[name] - one[name]).abs().max() for name in names) < EXACT


class Wasteful(Distil):
    """A call in each turn of which nothing is differentiated."""

    def fool(self, batch: Any) -> Any:
        self.eye(self.shared("fake", self.fake, batch))
        return super().fool(batch)


def drops_graphs(made: Any, module: Distil) -> None:
    """A serving rank keeps no graph longer than the rank that has called."""
    answer, most = Server._answer, 6

    def watched(self: Server, *args: Any, **kwargs: Any) -> None:
        answer(self, *args, **kwargs)
        assert len(self.answers.graphs) <= most, f"{len(self.answers.graphs)} graphs are kept"

    Server._answer = watched


@pytest.mark.slow
def test_graphs_do_not_pile_up(folder):
    game = partial(Wasteful, folder)
    placed("teacher=ddp@1,eye=ddp@1,*=ddp@0", 1, 2, game, steps=8, around=drops_graphs)


class Odd(Teacher):
    def over_ranks(self, x: Tensor) -> Tensor:
        return ranks.sum(x)

    def in_place(self, x: Tensor) -> Tensor:
        return x.mul_(2)

    def collect(self, x: Tensor, found: list[Tensor]) -> None:
        found.append(self.start(x))

    def keeping(self, x: Tensor) -> Tensor:
        self.last = self.start(x)
        return self.last


def penalty(game: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(game.eye(game.generator(x)).sum(), x, create_graph=True)[0].square().mean()


def into_a_list(game: Any, x: Tensor) -> Tensor:
    game.teacher.collect(x, found := [])
    return found[0].mean()


def setting(game: Any, x: Tensor) -> Tensor:
    game.teacher.strength = 0.7
    return game.seen(x, 0.1).score.mean()


def not_alike(game: Any, x: Tensor) -> Tensor:
    if not ranks.more_than_one() or int(os.environ["RANK"]) != 1:
        return x.new_zeros(())
    return 0 * game.teacher.features(x @ torch.ones(6, 8, dtype=x.dtype)).mean()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "penalty": penalty,
    "func": lambda game, x: torch.func.grad(lambda x: game.eye(x).sum())(x).mean(),
    "sums": lambda game, x: game.teacher.over_ranks(x).mean(),
    "list": into_a_list,
    "set": setting,
    "keeps": lambda game, x: game.teacher.keeping(x).mean(),
    "in place": lambda game, x: game.teacher.in_place(x * 2).mean(),
    "not alike": not_alike,
}


class Changed(Distil):
    """One thing about the teacher is not as it should be, or a loss has one more term."""

    teacher_of = Odd

    def __init__(self, folder: str, what: str) -> None:
        super().__init__(folder)
        self.what = what
        if what == "hook":
            self.teacher.blocks[0].register_forward_hook(lambda *_: None)
        if what == "tied":
            self.judge[0].weight = self.eye[0].weight

    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, weights=None) if (self.what, player.name) == ("no file", "eye") else player

    def configure_phases(self):
        for phase in super().configure_phases():
            yield Phase(phase.name, phase.loss, phase.learners, second_order=self.what == "penalty")

    def fool(self, batch: dict[str, Tensor]) -> Any:
        losses = super().fool(batch)
        if self.what not in LOSSES:
            return losses
        return {**losses, self.what: LOSSES[self.what](self, batch["x"].clone().requires_grad_())}


def refusal(typed: str, training: int, total: int, game: Callable[[], Any]) -> Any:
    """How a training on ranks is refused."""
    with pytest.raises(call_on_ranks.WorldFailed) as caught:
        placed(typed, training, total, game)
    return caught.value.failure


CANNOT_BE_SERVED = {
    "no file": "weights='eye.safetensors'",
    "tied": "player 'judge' has some of its weights too",
    "hook": "'blocks.0' has a forward hook, which would run there and not here",
    "penalty": "a loss differentiates a gradient that goes through it",
    "func": "torch.func and forward mode do not go through other ranks",
    "sums": "uses gan.ranks",
    "in place": "writes into a tensor that it is called with",
    "list": "changes a list, dict or object that it is called with",
    "set": "'strength' of its network was changed after the set-up, and ranks 1, which serve the player, have",
    "keeps": "'keeping' of player 'teacher', which is on another rank, changes 'last' of its network; return it",
}


@pytest.mark.parametrize("what", often(CANNOT_BE_SERVED, ["no file", "penalty", "list", "set"]))
def test_what_cannot_be_served_is_refused(folder, what):
    """tests/unit/strategies/test_placing.py has all that can be changed; test_plan.py a player that learns."""
    training, total = (2, 3) if what == "sums" else (1, 2)
    typed = f"teacher=ddp@{total - 1},eye=ddp@{total - 1},*=ddp"
    said = refusal(typed, training, total, partial(Changed, folder, what))
    assert said.whole and CANNOT_BE_SERVED[what] in said.why, said


@pytest.mark.slow
def test_ranks_that_call_differently_or_serve_nobody_are_named(folder):
    said = refusal("teacher=zero3@2-3,*=ddp", 2, 4, partial(Changed, folder, "not alike"))
    assert "all must make the same calls in the same order; type teacher=ddp@2-3" in said.why
    said = refusal("generator=ddp,judge=ddp,teacher=ddp,eye=ddp,*=zero3@1", 1, 2, partial(Distil, folder))
    assert "gives ranks 1 to '*'" in said.why


class OneCalls(Distil):
    """From its second step on one rank alone calls the teacher, in each step."""

    def tell(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.judge(batch["x"]).mean()
        if self.step and int(os.environ["RANK"]) == 1:
            loss = loss + 0 * self.seen(batch["x"], 0.1).score.mean()
        return loss

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return self.judge(self.fake(batch)).mean()


def impatient(path: str, made: Any, module: Distil) -> None:
    server.PATIENCE = 0.5
    server.print = lambda *words, **_: Path(path).write_text(" ".join(words))


@pytest.mark.slow
def test_it_is_said_who_waits_for_whom(folder, tmp_path):
    said = tmp_path / "said"
    with pytest.raises(call_on_ranks.WorldHangs):
        game, around = partial(OneCalls, folder), partial(impatient, str(said))
        apart(partial(fit, game, "teacher=zero3@2-3,*=ddp", 2, 4, around=around), 4, limit=15)
    assert "rank 1 waits for 0.5 s, because other ranks that train have not made the same call" in said.read_text()


@pytest.mark.slow
def test_a_network_of_its_own_calls_may_differ(folder):
    """Where every serving rank has the whole teacher, each training rank calls it as it likes."""
    placed("teacher=ddp@2-3,*=ddp", 2, 4, partial(Changed, folder, "not alike"))


def calls_between_phases(made: Any, module: Distil) -> None:
    module.on_train_batch_end = lambda outputs, batch, index: module.teacher.features(batch["x"])


@pytest.mark.slow
def test_a_call_between_phases_says_what_to_type(folder):
    with pytest.raises(call_on_ranks.WorldFailed, match="called between phases"):
        placed("teacher=zero3@1-2,*=ddp", 1, 3, partial(Distil, folder), around=calls_between_phases)


def warned(made: Any, module: Distil) -> None:
    """The serving rank gets SIGTERM when it has answered for a while. The run ends after the step, saved or not."""
    answer, calls = Server._answer, []

    def after_some(self: Server, *args: Any, **kwargs: Any) -> None:
        answer(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    Server._answer = after_some


def stopped(game: Callable[[], Any], policy: str, training: int, total: int) -> int:
    """At which step a run of many steps ends by itself."""
    seen: list[int] = []

    def around(made: Any, module: Distil) -> None:
        warned(made, module)
        module.on_train_batch_end = lambda *_: seen.append(made.global_step)

    with pytest.raises(Stopped):
        fit(game, policy, training, total, steps=500, around=around)
    return seen[-1]


@pytest.mark.slow
def test_a_signal_to_a_serving_rank_ends_the_run(folder):
    found = apart(partial(stopped, partial(Distil, folder), "teacher=zero3@2-3,*=ddp", 2, 4), 4)
    assert found[0] == found[1] < 500
