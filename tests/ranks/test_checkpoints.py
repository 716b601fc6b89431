"""A checkpoint is one directory, there whole or not at all, to which every rank writes its share and no more."""

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gan.files import tensors
from gan.files.checkpoint import Share, load, read
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.checkpoint import folders, writing
from strategies.checkpoint.folders import remove
from strategies.checkpoint.writing import ALONE, Background, prepare, save
from strategies.world import World
from tests.support.hard_games import One
from tests.support.parity import often, parts, trainer, words_of
from tests.support.saved import names, number_of, numbered, read_checkpoint

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


class Memory(TorchDispatchMode):
    """The bytes of all tensors that operations made, in memory of their own; of the largest, and the largest moved."""

    made = largest = moved = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {each.data_ptr() for each in given}
        result = function(*args, **(kwargs or {}))
        out = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        self.made += sum(each.nbytes for each in out if each.data_ptr() not in known)
        self.largest = max([self.largest, *(each.nbytes for each in out)])
        if str(function).startswith("c10d"):
            self.moved = max([self.moved, *(each.nbytes for each in given)])
        return result


# ---- what goes in comes out ----


def test_tensors_of_every_kind_and_shape_come_back_bit_for_bit(tmp_path):
    tensors = {str(kind): (torch.randn(3, 4) * 5).to(kind) for kind in KINDS}
    tensors["a number"], tensors["nothing"] = torch.tensor(2.5), torch.zeros(0, 3)
    tensors["scattered"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors["a/b.c"], tensors["transposed"] = torch.randn(5), torch.randn(3, 7).t()
    tensors["odd"] = torch.randint(256, (1001,), dtype=torch.uint8)
    both = torch.randn(6)
    tensors["tied"], tensors["tied too"], tensors["part of it"] = both, both.view(2, 3), both[2:4]
    values = {"list": [1, "two", None, {"x": (3.0,)}], "own tensor": torch.arange(3)}
    save(tmp_path / "x.ckpt", {**values, "tensors": {name: Share.whole(value) for name, value in tensors.items()}})
    tree = read_checkpoint(tmp_path / "x.ckpt")
    assert tree["list"] == values["list"] and torch.equal(tree["own tensor"], values["own tensor"])
    assert tree["tensors"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tree["tensors"][name].dtype == tensor.dtype
        assert torch.equal(tree["tensors"][name], tensor), name
    (file,) = (tmp_path / "x.ckpt").glob("*.safetensors")
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begins = {name: header[f"tensors/{name}"]["data_offsets"][0] for name in tensors if tensors[name].numel()}
    assert length % 8 == 0 and all(begin % tensors[name].itemsize == 0 for name, begin in begins.items())


def test_writing_copies_no_tensor_but_one_that_is_not_contiguous(tmp_path):
    tensors = {str(number): torch.full((25_000,), float(number)) for number in range(40)}
    tensors["scattered"] = torch.zeros(100, 250).t()
    with Memory() as memory:
        save(tmp_path / "x.ckpt", {name: Share.whole(tensor) for name, tensor in tensors.items()})
    assert memory.made == 100_000
    with Memory() as control:
        save(tmp_path / "y.ckpt", {name: Share.whole(tensor.clone()) for name, tensor in tensors.items()})
    assert control.made == 4_200_000
    for name, tensor in read_checkpoint(tmp_path / "x.ckpt").items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoint_reads_the_files(ranks, tmp_path):
    ranks(2).run(save_shares, tmp_path / "x.ckpt")
    found = {"dealt/out": torch.zeros(103), "all/w": torch.zeros(50)}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "x.ckpt")), no_dist=True)
    assert torch.equal(found["dealt/out"], WHOLE.view(-1)) and torch.equal(found["all/w"], torch.arange(50.0))


CUTS = {1: [0, 103], 2: [0, 41, 103], 4: [0, 7, 7, 90, 103]}  # where each rank's share of 103 elements begins
WHOLE = torch.arange(103.0).view(103, 1)


def save_shares(path):
    """A tensor in uneven shares, one of them empty; one that all have; one that each has of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, last = CUTS[size][rank : rank + 2]
    tree = {"values": rank, "all": {"w": Share.whole(torch.arange(50.0))}, "own": {rank: Share.whole(WHOLE[:rank])}}
    tree["all"] |= {f"more {n}": Share.whole(torch.full((1000,), float(n))) for n in range(8)}
    if first < last:
        tree["dealt"] = {"out": Share(WHOLE[first:last], WHOLE.shape, first)}
    save(path, tree, World(size, rank))


def read_shares(path):
    """What a rank reads of it, and how many bytes of it that took."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, last = CUTS[size][rank : rank + 2]
    mine = torch.zeros(last - first)
    with seen_reads() as seen:
        read({load(path)["dealt"]["out"]: Share(mine, WHOLE.shape, first)})
    assert torch.equal(mine, WHOLE[first:last, 0])
    return sum(seen)


def in_small_chunks(deed, path):
    """With a checksum for every four elements."""
    with mock.patch.object(tensors, "CHUNK", 16):
        return deed(path)


@contextlib.contextmanager
def seen_reads():
    """The bytes of everything that is read from a file, but for its header."""
    seen, real = [], tensors.fill

    def fill(file, content):
        if file.tell() != 8:  # there the header begins
            seen.append(len(content))
        real(file, content)

    with mock.patch.object(tensors, "fill", fill):
        yield seen


def test_shares_are_cut_differently_for_another_number_of_ranks(ranks, tmp_path):
    for size in (2, 4):
        path = tmp_path / f"{size}.ckpt"
        ranks(size).run(in_small_chunks, save_shares, path)
        tree = in_small_chunks(read_checkpoint, path)
        assert tree["values"] == 0  # the first rank's
        assert torch.equal(tree["dealt"]["out"], WHOLE) and torch.equal(tree["all"]["w"], torch.arange(50.0))
        assert all(torch.equal(tree["own"][rank], WHOLE[:rank]) for rank in range(size))
        for other in (2, 4):
            read_in_all = sum(ranks(other).run(in_small_chunks, read_shares, path))
            assert 4 * 103 <= read_in_all < 4 * 103 + 5 * 2 * 16  # whole chunks, at both ends of up to 5 ranges


def test_what_all_ranks_have_is_written_once_by_all_in_turn_and_a_share_that_is_missing_is_noticed(ranks, tmp_path):
    ranks(4).run(save_shares, tmp_path / "x.ckpt")
    sizes = [path.stat().st_size for path in (tmp_path / "x.ckpt").glob("shard-*")]
    assert len(sizes) == 4
    content = 4 * (8 * 1000 + 50 + 103 + 6)
    assert content < sum(sizes) < content + 4 * 2000  # headers
    assert max(sizes) < 1.2 * sum(sizes) / 4
    next((tmp_path / "x.ckpt").glob("shard-00001-*")).unlink()
    with pytest.raises(UserError, match=r"shard-00001-model-00001-of-00001.safetensors is missing"):
        read_checkpoint(tmp_path / "x.ckpt")


# ---- complete or absent ----


LAST, PART, REPLACED = "last.ckpt", "last.ckpt.part", "last.replaced.ckpt"
POINTS = {  # where a process is killed, and what is there then
    "before anything is written": [LAST, PART],
    "in the middle of the tensors": [LAST, PART],
    "between the tensors and the values": [LAST, PART],
    "in the middle of the values": [LAST, PART],
    "before it gets its name": [LAST, PART],
    "between the two renames": [PART, REPLACED],
    "before the older one is removed": [LAST, REPLACED],
    "while the older one is removed": [LAST, f"{REPLACED}.part"],
}


def kill_in(point, path, number, how=save):
    """A process that saves is killed at a point of the save."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def save_and_die():
        place, name, deed = {
            "before anything is written": (writing, "_write_file", die),
            "in the middle of the tensors": (os, "fsync", die),
            "between the tensors and the values": (writing, "_complete", die),
            "in the middle of the values": (os, "fsync", the_second_time(os.fsync, die)),
            "before it gets its name": (writing, "put_in_place", die),
            "between the two renames": (Path, "rename", the_second_time(Path.rename, die)),
            "before the older one is removed": (folders, "remove", the_second_time(folders.remove, die)),
            "while the older one is removed": (shutil, "rmtree", die),
        }[point]
        with mock.patch.object(place, name, deed):
            how(path, numbered(number))

    # A fork, so that nothing has to be imported; it may not return into pytest.
    process = multiprocessing.get_context("fork").Process(target=save_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def in_a_thread(path, tree):
    background = Background()
    background.start(partial(prepare(path, tree, copied=True), ALONE), pytest.fail)
    return background


def saved_in_a_thread(path, tree):
    in_a_thread(path, tree).wait()


def the_second_time(real, deed):
    calls = []

    def call(*args):
        calls.append(args)
        return deed() if len(calls) == 2 else real(*args)

    return call


@pytest.mark.promise(
    "a kill while a checkpoint is written",
    "a whole checkpoint is there, and nothing half is taken for one",
)
@pytest.mark.parametrize(
    ("point", "how"),
    [
        *((point, save) for point in POINTS),
        *((point, saved_in_a_thread) for point in ("in the middle of the tensors", "between the two renames")),
    ],
)
def test_a_kill_while_saving_leaves_a_whole_checkpoint(point, how, tmp_path):
    path, left = tmp_path / LAST, POINTS[point]
    save(path, numbered(1))
    kill_in(point, path, 2, how)
    assert names(tmp_path) == left
    if PART in left:
        with pytest.raises(UserError, match=r"last.ckpt.part is not complete"):
            load(tmp_path / PART)
    if LAST in left:
        assert number_of(path) == (1 if PART in left else 2)
    else:
        with pytest.raises(UserError, match=r"no checkpoint at .*last.ckpt; last.replaced.ckpt is there, the one bef"):
            load(path)
        assert number_of(tmp_path / REPLACED) == 1
    save(tmp_path / "another.ckpt", numbered(3))  # the next save removes what is not whole
    assert names(tmp_path) == ["another.ckpt", *(name for name in left if not name.endswith(".part"))]
    assert number_of(tmp_path / "another.ckpt") == 3
    save(path, numbered(4))
    assert names(tmp_path) == ["another.ckpt", LAST] and number_of(path) == 4


def test_a_rename_that_fails_gives_the_older_one_its_name_back(tmp_path):
    save(tmp_path / LAST, numbered(1))
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    failing = mock.patch.object(Path, "rename", the_second_time(Path.rename, full))
    with failing, pytest.raises(UserError, match="No space left on device"):
        save(tmp_path / LAST, numbered(2))
    assert names(tmp_path) == [LAST] and number_of(tmp_path / LAST) == 1


def test_a_checkpoint_that_is_removed_is_never_half_there(tmp_path):
    path = tmp_path / "x.ckpt"
    save(path, numbered(1))
    with mock.patch("shutil.rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        remove(path)
    assert names(tmp_path) == ["x.ckpt.part"]
    save(tmp_path / "y.ckpt", numbered(2))
    remove(tmp_path / "absent.ckpt")
    assert names(tmp_path) == ["y.ckpt"]


def save_and_stop(path):
    with mock.patch.object(writing, "_complete", lambda *_: time.sleep(600)):
        save(path, numbered(9))


@contextlib.contextmanager
def living(path):
    """A process that has stopped in the middle of a save and lives."""
    process = multiprocessing.get_context("fork").Process(target=save_and_stop, args=(path,))
    process.start()
    try:
        while not list((path.parent / f"{path.name}.part").glob("shard-*")):
            assert process.is_alive()
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.join()


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    first, second, ours = (tmp_path / name for name in ("first.ckpt", "second.ckpt", "ours.ckpt"))
    with contextlib.ExitStack() as stack:
        with living(first):
            stack.enter_context(living(second))
            save(ours, numbered(1))
            assert names(tmp_path) == ["first.ckpt.part", "ours.ckpt", "second.ckpt.part"]
        save(ours, numbered(2))
        assert "second.ckpt.part" in names(tmp_path)
        with pytest.raises(UserError, match=r"cannot write checkpoint .*second.ckpt: .* is in the way"):
            save(second, numbered(1))
    save(second, numbered(3))
    assert names(tmp_path) == ["ours.ckpt", "second.ckpt"] and (number_of(ours), number_of(second)) == (2, 3)


def test_without_locks_only_leftovers_of_the_same_name_are_removed(tmp_path):
    for name in ("x.ckpt.part", "theirs.ckpt.part"):
        (tmp_path / name).mkdir()
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        save(tmp_path / "x.ckpt", numbered(1))
        save(tmp_path / "x.ckpt", numbered(2))
    assert names(tmp_path) == ["theirs.ckpt.part", "x.ckpt"] and number_of(tmp_path / "x.ckpt") == 2


@pytest.mark.promise("checkpoints and files that a run did not write")
def test_a_folder_of_other_things_is_neither_replaced_nor_removed(tmp_path):
    for name in ("results", "results.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="there is a folder of this name that is no checkpoint"):
        save(tmp_path / "results", numbered(1))
    with pytest.raises(UserError, match="there is a folder of this name that is no checkpoint"):
        remove(tmp_path / "results")
    save(tmp_path / "x", numbered(1))
    with pytest.raises(UserError, match="it is no checkpoint; remove it"):
        shutil.rmtree(tmp_path / "results")
        save(tmp_path / "results", numbered(1))
    assert names(tmp_path) == ["results.part", "x"] and names(tmp_path / "results.part") == ["thesis.tex"]


# ---- a rank that cannot ----


def failing(path, who, what):
    """What the ranks say when one of them cannot write."""
    rank, size = dist.get_rank(), dist.get_world_size()
    save(path, numbered(1), World(size, rank))
    error = {"disk": OSError(errno.ENOSPC, "No space left on device"), "ours": ZeroDivisionError("a mistake")}
    cause = error[what] if rank == who and what in error else writing._write_file
    with mock.patch.object(writing, "_write_file", side_effect=cause, autospec=True):
        try:
            save(path, {**numbered(2), "function": failing if what == "values" else None}, World(size, rank))
        except Exception as failure:  # noqa: BLE001 - whatever it is
            assert number_of(path) == 1
            said = str(failure).removeprefix(f"cannot write checkpoint {path}: ").partition(", which could")[0]
            return f"{type(failure).__name__}: {said}"
    return None


@pytest.mark.promise(
    "a rank cannot write its part of a checkpoint: its disk is full",
    "all ranks say who; the older checkpoint stays. gan.fit trains on and tries again at the next save, and "
    "ends with status 2 if the last one was not saved",
)
@pytest.mark.parametrize(
    ("what", "who", "said"),
    [
        ("disk", 0, ["DiskError: rank 0: No space left on device"] * 2),
        ("disk", 1, ["DiskError: rank 1: No space left on device"] * 2),
        ("ours", 1, ["RuntimeError: rank 1: ZeroDivisionError: a mistake", "ZeroDivisionError: a mistake"]),
        ("values", 0, ["UserError: 'function' is a function", "UserError: rank 0: 'function' is a function"]),
    ],
)
def test_a_rank_that_cannot_write_is_named_on_all_and_the_old_checkpoint_stays(what, who, said, ranks, tmp_path):
    """A mistake of ours is not called the user's, and no rank waits for values that cannot be written."""
    assert ranks(2).run(failing, tmp_path / "x.ckpt", who, what) == said
    assert names(tmp_path) == ["x.ckpt"]


def on_disks_of_their_own(folder):
    return words_of(save, folder / f"disk{dist.get_rank()}" / "x.ckpt", numbered(1), World(2, dist.get_rank()))


def test_a_disk_that_the_machines_do_not_share_is_refused(ranks, tmp_path):
    (tmp_path / "disk1").mkdir()
    for said in ranks(2).run(on_disks_of_their_own, tmp_path):
        assert "rank 1" in said or "disk1" in said
        assert said.endswith("it is not there; save to a disk that all machines share")
    assert names(tmp_path / "disk0") == names(tmp_path / "disk1") == []


# ---- nothing of a sharded player is gathered ----


class Huge(One):
    """One weight is nearly all of it. It is watched while it is saved, and while it is loaded."""

    of_net: ClassVar = {"ema": 0.9}

    def __init__(self, folder):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 30), nn.Linear(30, 4001), nn.Linear(4001, 1))
        self.folder = folder
        self.saving, self.loading = Memory(), Memory()

    def on_train_batch_end(self, *_):
        if self.step == 1:
            with self.saving:
                self.trainer.save_checkpoint(self.folder / "x.ckpt")

    def on_load_checkpoint(self, _):
        self.loading.__enter__()

    def on_train_start(self):
        if self.trainer.ckpt_path is not None:
            self.loading.__exit__(None, None, None)


def weighed(policy, folder):
    """What was made, moved and read while a game was saved and loaded, and the bytes of its weight and of its state."""
    world = dist.get_world_size()
    data, saved, loaded = parts(2, world), Huge(folder), Huge(folder)
    trainer(PhaseStrategy(policy, check=False), world, 2).fit(saved, data)
    with seen_reads() as seen:
        trainer(PhaseStrategy(policy, check=False), world, 2).fit(loaded, data, ckpt_path=folder / "x.ckpt")
    sizes = 8 * saved.net[1].weight.numel(), 8 * 4 * sum(p.numel() for p in saved.net.parameters())
    return saved.saving, loaded.loading, sum(seen), *sizes


@pytest.mark.parametrize("policy", often(["zero2", "zero3"]))
def test_no_rank_makes_or_moves_a_players_tensors_to_save_or_load_it(policy, ranks, tmp_path):
    """Weights, average and two moments are dealt out among four ranks; zero2 shows the weights on all of them."""
    for saving, loading, seen, weight, state in ranks(4).run(weighed, policy, tmp_path):
        assert 0.1 * weight < saving.largest < 0.3 * weight
        assert saving.moved < 0.1 * weight  # random states, 15 KB a rank, and what torch says of its plans
        if policy == "zero3":  # zero2 gathers weights in place, as after each of its updates
            assert loading.largest < 0.3 * weight
            assert loading.moved < 0.01 * weight
        assert seen < 0.3 * state
