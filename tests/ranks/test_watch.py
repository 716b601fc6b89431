"""A signal to end reaches a rank that waits for the others in vain. A step that is only slow is not ended."""

import os
import signal
import threading
import time
from contextlib import ExitStack
from unittest import mock

import pytest

from strategies import PhaseStrategy
from strategies.processes import watch
from strategies.processes.places import Places
from strategies.processes.stopping import Signals, Stopped
from strategies.processes.watch import Watch
from tests.ranks.test_places import Alone
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer
from tests.support.worlds import Ranks

QUICK = {"TICK": 0.1, "SLOW": 0.2, "LEAST": 0.6}


@pytest.fixture
def pair():
    """Two ranks for one test, because one of them ends. The control's do not end by SIGTERM."""
    world = Ranks(2)
    yield world
    for process in world.processes:
        process.kill()


class Slow(Plain):
    """Step 2 takes five times as long as others, and in it this rank is told to end."""

    def judge(self, batch):
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5 if self.step == 2 else 0.3)
        return super().judge(batch)


def trained(game, without=()):
    """The error in words. A rank that the watch ends returns nothing."""
    with ExitStack() as held:
        held.enter_context(mock.patch.multiple(watch, **QUICK))
        for name in without:
            held.enter_context(mock.patch.object(Watch, name, lambda *_: False))
        try:
            trainer(PhaseStrategy("ddp", check=False), 2, 10).fit(game(), parts(10, 2))
        except BaseException as error:  # noqa: BLE001, whatever it is, the test reads it
            return f"{type(error).__name__}: {error}"
    return None


def told(world, who, number, *args):
    """Begin the training, and send a signal to one rank when the ranks wait for each other."""
    for pipe in world.pipes:
        pipe.send((trained, (Alone, *args), {}))
    time.sleep(2)
    os.kill(world.processes[who].pid, number)


@pytest.mark.parametrize(
    ("who", "number"), [(0, signal.SIGTERM), pytest.param(1, signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_rank_that_waits_in_vain_ends_when_it_is_told(who, number, pair):
    told(pair, who, number)
    assert pair.pipes[1 - who].poll(10)
    said = pair.pipes[1 - who].recv()[1]
    pair.processes[who].join(10)
    assert pair.processes[who].exitcode == 2
    assert f"RankLost: {signal.Signals(number).name} asked this run to end, but rank {who} plays phase" in said
    assert "plays phase 'discriminator' of step 2, in gan.ranks.mean (test_places.py, line" in said


@pytest.mark.slow
def test_the_control_without_the_watch_waits_on(pair):
    told(pair, 0, signal.SIGTERM, ("stuck",))
    assert not pair.pipes[0].poll(3) and not pair.pipes[1].poll()


@pytest.mark.slow
def test_a_slow_step_ends_as_it_should(ranks):
    for said in ranks(2).run(trained, Slow):
        assert said is not None and said.startswith(Stopped.__name__)


def seen(since, longest, playing=True):
    """A watch over a rank that plays a phase, with the longest time of each phase so far."""
    places, one = Places(), Watch.__new__(Watch)
    places.begin(7, "judge")
    places.here = places.here._replace(playing=playing)
    places.longest, one.places = longest, places
    return one.stuck(since)


@pytest.mark.parametrize(
    ("seconds", "longest", "playing", "stuck"),
    [
        (19, {"judge": 2.0}, True, False),
        (21, {"judge": 2.0}, True, True),
        (21, {"judge": 2.0}, False, False),  # validation, or saving
        (290, {"fool": 2.0}, True, False),  # its first time
        (310, {"fool": 2.0}, True, True),
        (59, {}, False, False),  # before the first phase has ended
        (61, {}, False, True),
    ],
)
def test_what_is_stuck(seconds, longest, playing, stuck):
    assert seen(seconds, longest, playing) is stuck


def test_the_longest_time_of_each_phase_is_known():
    places = Places()
    for now, phase in [(0, "judge"), (3, "fool"), (4, "judge"), (6, None), (90, "judge")]:
        with mock.patch("time.monotonic", return_value=now):
            places.begin(0, phase) if phase else places.end_step()
    assert places.longest == {"judge": 3, "fool": 1}


def test_it_leaves_nothing_behind():
    before, threads = signal.set_wakeup_fd(-1), threading.active_count()
    signal.set_wakeup_fd(before)
    Watch(Places(), print).close()
    now = signal.set_wakeup_fd(before)
    assert now == before and threading.active_count() == threads


def test_a_forked_process_has_no_part_in_it():
    """A loader's worker: what it gets is no wish, and the watch ends before the worker does."""
    one = Watch(Places(), print)
    worker = os.fork()
    if not worker:
        os._exit(0 if signal.set_wakeup_fd(-1) == -1 and one.tell.fileno() == -1 else 1)
    one.close()
    assert not one.thread.is_alive() and os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0


def test_only_signals_that_are_handled_as_wishes_are_wishes():
    assert signal.SIGUSR1 not in watch.wishes()
    signals = Signals()
    signals.take([signal.SIGUSR1], lambda *_: None)
    assert signal.SIGUSR1 in watch.wishes()
    signals.give_back()
    assert signal.SIGUSR1 not in watch.wishes()
