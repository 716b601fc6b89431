"""All ranks end after the same step, whoever was told to and whenever, without waiting for each other."""

import os
import random
import signal
from unittest import mock

import pytest
import torch.distributed as dist
from lightning import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from strategies import PhaseStrategy
from strategies.processes.stopping import OTHERS, SIGNALS, Ending, Stopped
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer

# ---- in every order of events ----


class Seldom(Ending):
    """Asks only after every first, second or third step, from its third on."""

    MEASURED, MOST = range(2, 3), 3

    def _measure(self, store):
        with mock.patch("time.monotonic", side_effect=lambda: random.uniform(0, 0.3)):
            super()._measure(store)


def endings_of(kind, count):
    """Of ranks that have one store."""
    store = dist.HashStore()
    return [kind(store) for _ in range(count)]


def ends(kind, dice, ranks=3, steps=12):
    """At which phase each rank ended. A rank may be a phase ahead of another, as gradients are averaged."""
    endings = endings_of(kind, ranks)
    begun, told = [0] * ranks, dice.sample(range(ranks), dice.randint(1, ranks))
    wishes = {(who, dice.randint(0, 6)) for who in told}  # after which event of a rank
    playing, events, ended = [False] * ranks, [0] * ranks, {}
    while len(ended) < ranks:
        who = dice.choice([rank for rank in range(ranks) if rank not in ended])
        one = endings[who]
        if playing[who] and min(begun) < begun[who]:
            others = [r for r in range(ranks) if begun[r] < begun[who]]
            if all(other in ended for other in others):
                return None  # it waits for one that has ended
            continue
        if playing[who]:
            one.played += 1
            playing[who] = False
        elif one.look() or one.played == steps:
            ended[who] = one.played
        else:
            begun[who] += 1
            playing[who] = True
        if (who, events[who]) in wishes:
            one.wish()
        events[who] += 1
    return ended


@pytest.mark.parametrize("kind", [Ending, Seldom])
def test_all_end_after_the_same_phase_in_whatever_order_they_are_told(kind):
    seen = set()
    for seed in range(250):
        ended = ends(kind, random.Random(seed))
        assert ended is not None and len(set(ended.values())) == 1
        seen |= set(ended.values())
    assert 1 not in seen and len(seen) > 2 and max(seen) < 12  # not before the phase after it was told


def strides(pauses):
    """After how many steps each of the ranks asks in the end, if its steps take this long."""
    endings = endings_of(Ending, len(pauses))
    for one, pause in zip(endings, pauses, strict=True):
        for step in range(40):
            with mock.patch("time.monotonic", return_value=step * pause):
                one.played += 2
                assert not one.look()
    return [one.stride for one in endings]


@pytest.mark.parametrize(
    ("pauses", "stride"), [((0.01, 0.02), 25), ((0.02, 0.01), 12), ((0.3, 0.3), 1), ((1e-9, 1e-9), 64)]
)
def test_ranks_ask_four_times_a_second_and_all_after_the_same_steps(pauses, stride):
    assert strides(pauses) == [stride] * len(pauses)


def test_what_is_seen_between_two_steps_does_not_change_before_the_next():
    """Who saves has asked: an end that is wished afterwards is one without a save."""
    one = Ending()
    one.wish(signal.SIGTERM, None)
    assert not one.look(), "before its first phase there is nothing yet to save"
    one = Ending()
    one.played = 1
    assert not one.look()
    one.wish()
    assert not one.look()
    one.played = 2
    assert one.look()


# ---- under a Trainer of one's own ----


class Told(Callback):
    """One rank gets a signal in its third step."""

    def __init__(self, who, number):
        self.who, self.number = who, number

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2 and trainer.global_rank == self.who:
            os.kill(os.getpid(), self.number)


def end_of(who, number):
    strategy = PhaseStrategy("ddp", check=False)
    made = trainer(strategy, 2, 30, callbacks=[Told(who, number)])
    before = signal.getsignal(number)
    with pytest.raises(Stopped):
        made.fit(Plain(), parts(30, 2))
    assert signal.getsignal(number) is before
    return made.global_step, strategy.ending.signal


@pytest.mark.parametrize(("who", "number"), [(0, signal.SIGTERM), (1, signal.SIGUSR1)])
def test_a_signal_to_one_rank_ends_all_of_them_after_the_same_step(who, number, ranks):
    first, second = ranks(2).run(end_of, who, number)
    assert first == second and 3 <= first[0] <= 4
    assert first[1] == number


def alone(number):
    made = trainer(PhaseStrategy("single"), 1, 6, callbacks=[Told(0, number)])
    made.fit(Plain(), parts(6))
    return made.global_step


@pytest.mark.parametrize("number", SIGNALS)
def test_one_process_ends_between_two_steps(number):
    before = signal.getsignal(number)
    with pytest.raises(SIGTERMException):
        alone(number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", OTHERS)
def test_a_signal_that_is_ignored_or_handled_by_another_is_left_to_it(number):
    seen = []
    before = signal.getsignal(number)
    try:
        for handler in (signal.SIG_IGN, lambda *_: seen.append(1)):
            signal.signal(number, handler)
            assert alone(number) == 6
            assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
    assert seen == [1]


def collectives_between_phases():
    """How often ranks waited for each other in a step, but for the two phases' gradients."""
    counts = []
    counting = LambdaCallback(on_train_batch_end=lambda *_: counts.append(broadcast.call_count))
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        trainer(PhaseStrategy("ddp", check=False), 2, 4, callbacks=[counting]).fit(Plain(), parts(4, 2))
    return counts[-1] - counts[0]


def test_asking_moves_nothing_between_ranks(ranks):
    assert ranks(2).run(collectives_between_phases) == [0, 0]
