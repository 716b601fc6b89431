"""A checkpoint that is written while training goes on is that of its step, to the last bit, and whole or absent."""

import errno
import gc
import multiprocessing
import threading
import time
import weakref
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from lightning.pytorch.callbacks import LambdaCallback

from gan.app.run.folder import RunFolder
from gan.files.errors import UserError
from gan.files.tensors import pieces
from gan.pool import ImagePool
from strategies import PhaseStrategy
from strategies.checkpoint import folders, writing
from strategies.checkpoint.folders import part_of
from strategies.checkpoint.writing import save
from tests.ranks.test_checkpoints import in_a_thread
from tests.ranks.test_contract import POLICY
from tests.support.commands import until
from tests.support.composite import Composite
from tests.support.duel import fit
from tests.support.hard_games import Plain
from tests.support.parity import distance, often, parts, trainer
from tests.support.saved import names, numbered
from tests.unit.gan.app.fitting.test_keep import Full, kept_when_full

STEPS, HALF = 5, 2


@contextmanager
def gated():
    """Nothing is written beside training until this gate is set."""
    gate, real = threading.Event(), writing._write_file

    def write(*args):
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)
        return real(*args)

    with mock.patch.object(writing, "_write_file", write):
        try:
            yield gate
        finally:
            gate.set()


class At(Callback):
    """Does something after some of the steps."""

    def __init__(self, deeds):
        self.deeds = deeds

    def on_train_batch_end(self, trainer, *_):
        self.deeds.get(trainer.global_step, lambda _: None)(trainer)


# ---- what training changes meanwhile is not in it ----


class Live(Composite):
    """It also shows checkpoints what it changes in each step: images of a pool, a tensor and a list of its own."""

    def __init__(self):
        super().__init__()
        self.pool = ImagePool(16)
        self.noted, self.words = torch.zeros(3), []

    def judge(self, batch):
        return super().judge({"x": self.pool.query(batch["x"])})

    def on_train_batch_end(self, *_):
        self.noted += 1
        self.words.append(float(self.noted[0]))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"noted": self.noted, "words": self.words}


def saved_twice(policy, folder):
    """Saves one step at once and in the background, where nothing is written before the last step.

    Returns what was trained, the same from a resumed run, and the bytes that were copied.
    """
    now, later = folder / "now.ckpt", folder / "later.ckpt"
    world = 2 if policy != "single" else 1
    sizes, real = [], writing._copy

    def copy(share):
        sizes.append(share.tensor.nbytes)
        return real(share)

    def twice(trainer):
        trainer.save_checkpoint(now)
        trainer.strategy.save_in_background(later)

    def last(_):
        assert not later.exists()
        gate.set()

    train = partial(fit, Live, policy, world, STEPS, size=2**20, sync_batchnorm=True)
    with mock.patch.object(writing, "_copy", copy):
        with gated() as gate:
            unbroken = train(callbacks=[At({HALF: twice, STEPS: last})])
        assert later.exists()  # when `fit` returns
        resumed = train(resume=later)
    return unbroken, resumed, sum(sizes)


def on_ranks(ranks, policy, folder):
    return [saved_twice(policy, folder)] if policy == "single" else ranks(2).run(saved_twice, policy, folder)


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def elements(file):
    """The bytes of a file without its header, and those of the players in it."""
    sizes = {name: piece.nbytes for name, piece in pieces(file).items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if not name.startswith("values/"))


TAKEN = [each for each in POLICY if each.values != ("pipeline",)]  # a pipeline refuses both players of `Live`


@pytest.mark.parametrize(
    "policy", often([*TAKEN, "zero1+offload", "zero3+offload", "generator=zero3,*=ddp"], ["zero3"])
)
def test_it_is_the_one_of_its_step_bit_for_bit_and_resumes(policy, ranks, tmp_path):
    found = on_ranks(ranks, policy, tmp_path)
    assert contents(tmp_path / "now.ckpt") == contents(tmp_path / "later.ckpt")
    for unbroken, resumed, _ in found:
        assert distance(unbroken, resumed) == 0
    copied = [size for *_, size in found]  # a rank copies no more than it writes
    written, of_players = zip(*map(elements, (tmp_path / "now.ckpt").glob("shard-*")), strict=True)
    assert sorted(copied) == sorted(written)
    assert max(of_players) < 1.1 * sum(of_players) / len(of_players)


def test_the_copies_are_given_back(tmp_path):
    alive, real = [], writing._copy

    def copy(share):
        made = real(share)
        alive.append(weakref.ref(made.tensor))
        return made

    with mock.patch.object(writing, "_copy", copy), gated() as gate:
        background = in_a_thread(tmp_path / "x.ckpt", numbered(1))
        assert [each() is not None for each in alive] == [True, True]
        gate.set()
        background.wait()
    gc.collect()
    assert until(lambda: [each() for each in alive] == [None, None], 10)  # `wait` returns before its thread


# ---- who waits for it ----


def test_the_next_save_waits_and_what_a_person_saves_is_there_at_once(tmp_path):
    a, b, c = (tmp_path / f"{name}.ckpt" for name in "abc")

    def person(trainer):
        assert not a.exists()
        threading.Timer(0.1, gate.set).start()
        trainer.save_checkpoint(b)
        assert a.exists() and b.exists()

    with gated() as gate:
        deeds = {
            1: lambda trainer: trainer.strategy.save_in_background(a),
            3: person,
            4: lambda trainer: trainer.strategy.save_in_background(c),
        }
        made = trainer(PhaseStrategy("single"), 1, 5, callbacks=[At(deeds)])
        made.fit(Plain(), parts(5))
    assert names(tmp_path) == ["a.ckpt", "b.ckpt", "c.ckpt"]
    made.strategy.save_in_background(tmp_path / "d.ckpt")  # nothing trains, so there is nothing to hold up
    assert (tmp_path / "d.ckpt").exists()


def test_an_error_in_training_waits_until_it_is_whole(tmp_path):
    def fails(_):
        threading.Timer(0.1, gate.set).start()
        raise ZeroDivisionError

    deeds = {2: lambda trainer: trainer.strategy.save_in_background(tmp_path / "a.ckpt"), 3: fails}
    with gated() as gate, pytest.raises(ZeroDivisionError):
        trainer(PhaseStrategy("single"), 1, 5, callbacks=[At(deeds)]).fit(Plain(), parts(5))
    assert names(tmp_path) == ["a.ckpt"]


# ---- failures ----


def failing(folder):
    """What each rank says, and after which step, if one cannot write what is saved after the second of many steps."""
    rank, real = dist.get_rank(), writing._write_file

    def write(part, *rest):
        if rank == 1 and part.name.startswith("b"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(part, *rest)

    def both(trainer):
        trainer.strategy.save_in_background(folder / "a.ckpt")
        trainer.strategy.save_in_background(folder / "b.ckpt")
        trainer.strategy.remove_checkpoint(folder / "a.ckpt")

    slowly = LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.02))
    made = trainer(PhaseStrategy("zero3", check=False), 2, 200, callbacks=[At({2: both}), slowly])
    with mock.patch.object(writing, "_write_file", write):
        try:
            made.fit(Plain(), parts(200, 2))
        except Exception as error:  # noqa: BLE001 - whatever it is
            return f"{type(error).__name__}: {error}", made.global_step
    return None


def test_if_one_rank_cannot_write_all_say_so_after_the_same_step_and_the_older_one_stays(ranks, tmp_path):
    (first, step), (second, other) = ranks(2).run(failing, tmp_path)
    words = f"DiskError: cannot write checkpoint {tmp_path / 'b.ckpt'}: rank 1: No space left on device"
    assert first == second == words and step == other < 200
    assert names(tmp_path) == ["a.ckpt"]


def full_on_one_rank(folder, *steps):
    """A run's last step, the checkpoints that its Keep has written, and what is said when it is over."""
    keep, ended = kept_when_full(folder, Full(*steps, ranks=[1]), True, steps=6, ranks=2)
    try:
        keep.refuse_if_not_saved(True)
    except UserError as error:
        return ended, keep.wrote, str(error)
    return ended, keep.wrote, ""


@pytest.mark.promise("a rank cannot write its part of a checkpoint: its disk is full")
def test_if_its_disk_is_full_all_train_on_and_say_so_at_the_end_if_the_last_one_was_not_saved(ranks, tmp_path):
    """test_checkpoints.py has what all say where they wait for it."""
    assert ranks(2).run(full_on_one_rank, tmp_path / "a", 4) == [(6, [2, 6], "")] * 2
    assert RunFolder(tmp_path / "a").steps() == [2, 6]
    for ended, wrote, said in ranks(2).run(full_on_one_rank, tmp_path / "b", 6):
        assert (ended, wrote) == (6, [2, 4]) and "the last checkpoint was not saved, and the newest one is" in said
        assert "step-000006.ckpt: rank 1: No space left on device" in said
    assert RunFolder(tmp_path / "b").steps() == [2, 4]


# ---- a process that is forked meanwhile ----


def stays(here):
    here.set()
    time.sleep(60)


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    """As a loader's worker is, when an epoch begins. Without letting go, leftovers would stay as long as it lives."""
    with folders.new_part(tmp_path / "x.ckpt"):
        here = multiprocessing.get_context("fork").Event()
        worker = multiprocessing.get_context("fork").Process(target=stays, args=(here,))
        worker.start()
        assert here.wait(60)
    try:
        assert part_of(tmp_path / "x.ckpt").exists()  # as if the process that saves had been killed
        save(tmp_path / "y.ckpt", numbered(1))
        assert names(tmp_path) == ["y.ckpt"]
    finally:
        worker.kill()
        worker.join()
