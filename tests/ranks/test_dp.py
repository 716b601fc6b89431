"""dp: ranks that one process starts itself, and what comes back to it."""

import csv
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import threading
import warnings
from dataclasses import replace
from functools import partial
from inspect import getattr_static
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from datasets import GlobalLoader
from gan import Phase, noise
from gan.files.errors import UserError
from strategies import PhaseStrategy, private
from strategies.batches import random_state
from strategies.batches.loaders import DealtLoader
from strategies.batches.micro_batches import Batches
from strategies.processes import own_ranks
from strategies.processes.own_ranks import OwnRanks
from strategies.processes.starting import Scripts
from tests.support.hard_games import BatchNorms, Plain
from tests.support.parity import BATCH, EXACT, Whole, distance, often, parts, snapshot, train, trainer, vectors
from tests.support.saved import read_checkpoint
from tests.support.worlds import context, free_port

SEED = {"PL_GLOBAL_SEED": "11"}
SECOND_OF_TWO = {"LOCAL_RANK": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}


def fit(game, policy="dp", devices=2, steps=1, data=None, start_method="popen", **settings):
    strategy = PhaseStrategy(policy, check=False, start_method=start_method)
    made = trainer(strategy, devices, steps, **{"sync_batchnorm": True, **settings})
    with mock.patch.dict(os.environ, SEED):
        made.fit(game, parts(steps) if data is None else data)
    return made


def made_of(trained):
    return snapshot(trained.lightning_module, trained.strategy)


# ---- sameness ----


def test_on_one_device_it_is_that_device():
    made = trainer(PhaseStrategy("dp"), 1, 1)
    assert isinstance(made.strategy.launcher, Scripts)
    assert distance(train(Plain, policy="dp", steps=2, devices=1), train(Plain, policy="single", steps=2)) == 0


def test_the_generator_of_a_spawned_ranks_loader_is_in_its_pickle():
    """torch's own way shares memory, which is gone before the rank opens it."""
    own = torch.Generator().manual_seed(7)
    with mock.patch.object(torch.UntypedStorage, "_share_fd_cpu_", side_effect=AssertionError("memory is shared")):
        pickled = ForkingPickler.dumps(DataLoader([*range(8)], 4, generator=own))
    assert torch.equal(torch.rand(3, generator=pickle.loads(pickled).generator), torch.rand(3, generator=own))


# ---- what the loader gives is the global batch ----


class Locked(Plain):
    """A lock, and a function that holds a network, which no pickle could take along."""

    def __init__(self):
        super().__init__()
        self.lock, network = threading.Lock(), self.generator
        self.paint = lambda z: network(z)


class Lambdas(Locked):
    """In a copy the function would call the network of another game."""

    def fake(self, real):
        return self.paint(noise.randn((len(real), 4), like=real))

    def configure_phases(self):
        discriminator, judge = self.discriminator, partial(self.judge)
        yield Phase(
            "discriminator", lambda batch: {**judge(batch), "half": 0.5 * judge(batch)["real"]}, "discriminator"
        )
        yield Phase("generator", lambda batch: -discriminator(self.fake(batch["x"])).mean(), "generator")


class Stream(IterableDataset):
    """Draws its samples from torch's own generator."""

    def __iter__(self):
        for _ in range(3 * BATCH):
            yield {"x": torch.randn(6, dtype=torch.float64)}


ROWS = [{"x": each} for step in range(2) for each in vectors(step)["x"]]
LOADERS = {
    "shuffled": lambda: DataLoader(ROWS, batch_size=BATCH, shuffle=True),
    "by workers": lambda: DataLoader(ROWS, batch_size=BATCH, shuffle=True, num_workers=1),
    "a stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "whole batches": lambda: DataLoader([vectors(0), vectors(1)], batch_size=None),
    "made before the ranks": lambda: GlobalLoader(ROWS, BATCH),
}


def taught(loader, policy, devices):
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the first batch has")
        settings = dict(max_epochs=2, use_distributed_sampler=True)
        return made_of(fit(Lambdas(), policy, devices, -1, LOADERS[loader](), **settings))


class OfTwo(Plain):
    """Two loaders that shuffle, one after the other, by one generator."""

    def judge(self, batch):
        few = self.discriminator(batch["few"]["x"]).square().mean()
        return {**super().judge(batch["many"]), "few": few}

    def fool(self, batch):
        return super().fool(batch["few"])


@pytest.mark.slow
def test_several_loaders_give_the_batches_of_one_device():
    found = []
    for policy, devices in (("dp", 2), ("single", 1)):
        torch.manual_seed(5)
        data = {name: DataLoader(ROWS, size, shuffle=True) for name, size in (("many", 16), ("few", 8))}
        found.append(made_of(fit(OfTwo(), policy, devices, 3, data, use_distributed_sampler=True)))
    assert distance(*found) < EXACT


# "by workers" shuffles too, and what a person reads, below, comes of a GlobalLoader.
@pytest.mark.parametrize("loader", often(LOADERS, ["by workers"]))
def test_every_loader_gives_the_batches_of_one_device(loader):
    assert distance(taught(loader, "dp", 2), taught(loader, "single", 1)) < EXACT


# ---- what comes back ----


class Counts(Callback):
    """It remembers how many steps there were, from when it is set up."""

    def setup(self, trainer, pl_module, stage):
        self.states = getattr(self, "states", {"steps": 0})

    @property
    def steps(self):
        return self.states["steps"]

    def on_train_batch_end(self, *_):
        self.states["steps"] += 1

    def state_dict(self):
        return self.states

    def load_state_dict(self, state):
        self.states.update(state)


class Data(LightningDataModule):
    steps = opened = 0

    def setup(self, stage):
        self.rate, self.opened = 0.1, self.opened + 1

    def teardown(self, stage):
        self.opened -= 1

    def state_dict(self):
        return {"steps": self.trainer.global_step}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def train_dataloader(self):
        return GlobalLoader(ROWS, BATCH)

    def val_dataloader(self):
        return DataLoader(ROWS[:BATCH], BATCH // 4)

    test_dataloader = val_dataloader


class Remembers(Plain):
    """Makes its networks late and a callback of its own, asks data and trainer, and logs more than a pipe holds."""

    def __init__(self):
        super().__init__()
        self.late, self.count, self.seen = (self.generator, self.discriminator), 0, []
        del self.generator, self.discriminator

    def setup(self, stage):
        self.generator = self.late[0]

    def configure_model(self):
        self.discriminator = self.late[1]

    def configure_callbacks(self):
        return [Counts()]

    def configure_players(self):
        rate = self.trainer.datamodule.rate / self.trainer.estimated_stepping_batches
        generator, discriminator = super().configure_players()
        yield replace(generator, optimizer=partial(Adam, lr=rate, betas=(0.5, 0.9)))
        yield discriminator

    def judge(self, batch):
        self.count += 1
        self.seen.append(self.step)
        self.log("rows", float(len(batch["x"])))
        if self.step == 3:  # the last one of the first fit
            self.log_dict({f"number {number}": 1.0 for number in range(400)})
        return super().judge(batch)

    def validation_step(self, batch, index):
        self.log("val/real", self.discriminator(batch["x"]).mean(), sync_dist=True)
        self.log("val/samples", float(len(batch["x"])), reduce_fx="sum", sync_dist=True)

    def test_step(self, batch, index):
        self.log("test/real", self.discriminator(batch["x"]).mean(), sync_dist=True)


def told(policy, devices, folder, start_method="popen"):
    """What a person may read after fit, validate, test, a checkpoint, and another fit."""
    game, data, strategy = Remembers(), Data(), PhaseStrategy(policy, check=False, start_method=start_method)
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1)
    saving = ModelCheckpoint(monitor="val/real", save_top_k=2)
    made = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, precision="64-true",
        logger=[CSVLogger(folder), board := TensorBoardLogger(folder)], callbacks=[saving], **quiet,
    )  # fmt: skip
    board.experiment.add_text("before", "x", 0)  # a forked rank has no thread of this writer
    found = {}

    def look(what):
        with strategy.averaged():
            average = sum(weight.sum().item() for weight in game.parameters())
        metrics = {name: value.item() for name, value in made.callback_metrics.items() if name != "rows"}
        found[what] = {**metrics, "average": average, "score": float(saving.best_model_score)}
        found[what] |= {"step": made.global_step, "epoch": made.current_epoch}
        found[what] |= {"count": game.count, "seen": game.seen[-1]}
        found[what]["best"] = Path(saving.best_model_path).name
        found[what]["its own callback"] = [each.steps for each in made.callbacks if isinstance(each, Counts)]
        with open(Path(made.logger.log_dir) / "metrics.csv") as file:
            found[what]["rows of its log"] = len(list(csv.DictReader(file)))

    with mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"):
        made.fit(game, datamodule=data)
        look("fit")
        assert (data.steps, data.opened) == (4 * (devices > 1), 0)
        found["rates"] = [group["lr"] for optimizer in made.optimizers for group in optimizer.param_groups]
        made.logger.log_metrics({"mine": 1.0}, 99)
        made.logger.save()
        made.save_checkpoint(folder / "after.ckpt")
        found["validate"] = made.validate(game, datamodule=data, verbose=False)
        found["test"] = made.test(game, datamodule=data, verbose=False)
        made.fit_loop.max_epochs = 3
        made.fit(game, datamodule=data)
        look("fit again")
        found["best"] = made.validate(game, datamodule=data, ckpt_path="best", verbose=False)
    return found


def close(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == pytest.approx(other, abs=1e-6) if isinstance(one, float) else one == other  # logged in float32


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What it leaves, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("told") / "single"
    return told("single", 1, folder), folder


@pytest.mark.parametrize(
    ("policy", "start_method"), [("dp", "popen"), pytest.param("zero3", "fork", marks=pytest.mark.slow)]
)
def test_a_person_reads_after_it_what_one_device_leaves(policy, start_method, one_device, tmp_path):
    """And goes on from there: the checkpoint that this process saves resumes on one device."""
    alone, folder = one_device
    several = told(policy, 2, tmp_path / policy, start_method)
    assert {key: (alone[key], several[key]) for key in alone if not close(alone[key], several[key])} == {}
    assert len(alone["fit"]) > 400 and alone["fit"]["its own callback"] == [4]
    assert alone["validate"][0]["val/samples"] == BATCH, "held-out samples are read once"
    found = []
    for devices, which, other in ((1, "single", tmp_path / policy), (2, policy, folder)):
        game, strategy = Remembers(), PhaseStrategy(which, check=False, start_method=start_method)
        made = trainer(strategy, devices, 8)  # without max_epochs, which Lightning sets where it trains
        made.fit(game, datamodule=Data(), ckpt_path=other / "after.ckpt")
        found.append(made_of(made))
        assert (made.global_step, made.current_epoch, game.count, len(game.seen)) == (8, 4, 8, 8)
    assert distance(*found) < EXACT


@pytest.mark.slow
def test_a_second_fit_begins_an_epoch_as_on_one_device():
    """Though the first one has ended in the midst of an epoch, by max_steps."""

    def twice(policy, devices, start_method="popen"):
        data = GlobalLoader(ROWS, BATCH // 2)
        made = fit(Plain(), policy, devices, 3, data, start_method)
        made.fit_loop.epoch_loop.max_steps = 8
        with mock.patch.dict(os.environ, SEED):
            made.fit(made.lightning_module, data)
        return made_of(made)

    alone = twice("single", 1)
    assert max(distance(twice("dp", 2), alone), distance(twice("zero3", 2, "fork"), alone)) < EXACT


@pytest.mark.slow
def test_it_leaves_nothing_open():
    found = []
    for _ in range(3):
        fit(Plain())
        gc.collect()
        found.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert found[1] == found[2]


def test_lightning_finds_the_place_of_a_loader_that_is_dealt_out():
    """It asks `isinstance` of a protocol, which since Python 3.12 looks past `__getattr__`, as this does."""

    def has_place(loader):
        return getattr_static(DealtLoader(loader, 0, 2, Batches()), "load_state_dict", None) is not None

    assert has_place(Whole(3))
    assert not has_place(LOADERS["shuffled"]())


class Late(Plain):
    def on_fit_start(self):
        self.register_buffer("late", torch.zeros(1))


def test_what_cannot_be_loaded_after_the_training_is_kept(tmp_path):
    with pytest.raises(UserError, match=rf"has ended, .* which is in {tmp_path}/gan-ranks-.*ckpt: .*ed: late\)"):
        fit(Late(), default_root_dir=tmp_path)
    (kept,) = tmp_path.glob("*.ckpt")
    assert read_checkpoint(kept)["global_step"] == 1


# ---- how ranks are started ----


class Threaded(Plain):
    """Computes on several threads, as the process did that has started the rank."""

    def judge(self, batch):
        torch.set_num_threads(4)
        torch.randn(512, 512).mm(torch.randn(512, 512)).exp().sum()
        return super().judge(batch)


@pytest.mark.slow
def test_ranks_compute_on_several_threads_though_this_process_has_done_so():
    """Without end_openmp a forked rank would wait for threads that it does not have."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.randn(512, 512).mm(torch.randn(512, 512)).exp().sum()
        assert fit(Threaded()).global_step == 1
    finally:
        torch.set_num_threads(before)


def compiles():
    torch._inductor.async_compile.AsyncCompile.submit(int).result(timeout=10)


@pytest.mark.parametrize("use", [compiles, forkserver.ensure_running])
def test_a_forked_rank_has_helpers_of_its_own_though_this_process_has_some(use):
    importlib.import_module("torch._inductor.async_compile")
    with torch._inductor.config.patch(compile_threads=2):
        use()
        rank = multiprocessing.get_context("fork").Process(target=own_ranks._apart, args=(random_state.capture(), use))
        rank.start()
        rank.join(60)
    assert rank.exitcode == 0


def test_a_rank_makes_its_pool_of_threads_before_other_threads_ask_for_it(monkeypatch, tmp_path):
    """See [Note: the thread pool of a fork]: else torch aborts some ranks on a busy machine."""
    asked, here = [], os.getpid()

    class Game(Plain):
        def setup(self, stage):
            if os.getpid() != here:  # afterwards it is called in this process too
                (tmp_path / f"{self.trainer.global_rank}").write_text(str(len(asked)))

    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    with mock.patch.object(own_ranks, "survive", partial(counted, asked, own_ranks.survive)):
        fit(Game())
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["1", "1"]


def counted(asked, survive, *args, **kwargs):
    """What a rank does, with no call counted of before."""
    asked.clear()
    return survive(*args, **kwargs)


def test_where_a_gpu_is_in_use_ranks_are_spawned(monkeypatch):
    game, kinds = Plain(), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(private.FunctionLauncher, "launch", lambda self, *_, **__: kinds.append(self._start_method))
    monkeypatch.setattr(OwnRanks, "_found", lambda self: {"results": None})
    fit(game)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    fit(game)
    trainer(PhaseStrategy("dp", start_method="spawn"), 2, 1).fit(game, parts(1))
    assert kinds == ["spawn", "fork", "spawn"]


def nested(x, depth=80):
    return checkpoint(nested, x, depth - 1, use_reentrant=True) if depth else x.sin()


def differentiates_deeply():
    assert own_ranks.can_fork("cpu")
    nested(torch.ones(2, requires_grad=True)).sum().backward()
    assert not own_ranks.can_fork("cpu")


def test_where_forked_ranks_could_not_differentiate_they_are_spawned():
    """Backwards deep inside of each other begin a thread of autograd, as each does where there is a GPU."""
    process = context().Process(target=differentiates_deeply)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_game_that_cannot_be_pickled_is_refused(monkeypatch):
    monkeypatch.setattr(own_ranks, "can_fork", lambda kind: False)
    with pytest.raises(
        UserError, match=r"ranks are spawned, .*, and the game, .* cannot be pickled: cannot pickle .*lo"
    ):
        fit(Locked())
    monkeypatch.setattr("sys.ps1", ">>>", raising=False)
    with pytest.raises(UserError, match=r"a notebook cannot do that: restart it, and let fit\(\) be the first that"):
        fit(Plain())


class Banked(Plain):
    """Draws from Python, and writes into a tensor that is no buffer, through another name of its memory."""

    def __init__(self):
        super().__init__()
        self.bank = torch.zeros(6, dtype=torch.float64)
        self.part = self.bank[2:4]

    def fool(self, batch):
        self.part += random.random()
        return super().fool(batch) * (1 + self.bank.sum())


@pytest.mark.parametrize(
    ("policy", "start_method"), [("ddp", "forkserver"), pytest.param("dp", "fork", marks=pytest.mark.slow)]
)
def test_a_rank_has_memory_of_its_own_and_draws_as_the_process_that_started_it(policy, start_method):
    def trained(policy, world):
        random.seed(3)
        torch.manual_seed(5)
        game, strategy = Banked(), PhaseStrategy(policy, start_method=start_method, check=False)
        data = [sample for step in range(4) for sample in vectors(step)["x"]]
        loader = GlobalLoader([{"x": each} for each in data], batch_size=16, shuffle=False)
        with mock.patch.dict(os.environ):
            os.environ.pop("PL_GLOBAL_SEED", None)
            trainer(strategy, world, 4).fit(game, loader)
        return {name: value.clone() for name, value in game.state_dict().items()}

    assert distance(trained(policy, 2), trained("single", 1)) < EXACT


def test_ranks_that_somebody_else_has_started_train_as_they_are():
    with mock.patch.dict(os.environ, SECOND_OF_TWO, RANK="1", WORLD_SIZE="2"):
        made = trainer(PhaseStrategy("dp"), 2, 1)
        assert isinstance(made.strategy.launcher, Scripts) and (made.world_size, made.global_rank) == (2, 1)


def test_the_process_that_starts_them_is_a_world_of_its_own():
    made = trainer(PhaseStrategy("dp"), 4, 1)
    assert isinstance(made.strategy.launcher, OwnRanks) and made.strategy.launcher.is_interactive_compatible
    assert (made.world_size, made.global_rank, made.num_devices) == (1, 0, 4)


@pytest.mark.slow
def test_each_training_meets_at_a_free_port(monkeypatch):
    """The port of the last one may be another program's by now. What a person has set stays."""
    with mock.patch("lightning.fabric.plugins.environments.lightning.find_free_network_port", wraps=free_port) as asked:
        made = fit(Plain())
        made.fit(Plain(), parts(1))
    assert (made.world_size, made.global_rank) == (1, 0)  # this process is a world of its own still
    assert asked.call_count == 2 and "MASTER_PORT" not in os.environ
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    before = os.environ["MASTER_PORT"]
    fit(Plain())
    assert os.environ["MASTER_PORT"] == before


# ---- errors ----


class Broken(BatchNorms):
    """Fails on one rank, while the others wait for its batch norm."""

    def judge(self, batch):
        if self.trainer.global_rank == 1:
            raise ZeroDivisionError("by chance")
        return super().judge(batch)


class Refused(Plain):
    def judge(self, batch):
        if self.trainer.global_rank == 1:
            raise UserError("this rank is refused")
        return super().judge(batch)


def test_an_error_of_a_rank_is_raised_here(tmp_path):
    """Also where a callback saves at an error, and the other rank cannot take part."""
    saving = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "enable_checkpointing": True}
    with pytest.raises(Exception, match=r"(?s)Process 1 terminated.*in judge.*ZeroDivisionError: by chance\s*$"):
        fit(Broken(), **saving)


class Ends(Plain):
    last = 0

    def on_train_batch_end(self, *_):
        if self.step == self.last:
            raise ZeroDivisionError("by chance")


def test_callbacks_hear_of_an_error_where_the_training_was(tmp_path):
    game, saving = Ends(), OnExceptionCheckpoint(tmp_path, "error")
    made = trainer(PhaseStrategy("dp", check=False), 2, 2, callbacks=[saving], enable_checkpointing=True)
    made.fit(game, parts(2))
    made.fit_loop.epoch_loop.max_steps, game.last = 5, 4
    with pytest.raises(Exception, match="by chance"):
        made.fit(game, parts(5))
    assert read_checkpoint(tmp_path / "error.ckpt")["global_step"] == 4  # and not 2, as this process has
    assert saving in made.callbacks and "MASTER_PORT" not in os.environ
    assert not any(each.is_alive() for each in made.strategy.launcher.procs)


@pytest.mark.slow
def test_weights_and_biases_has_one_run_with_what_was_logged_also_before_an_error(tmp_path):
    game, logger = Ends(), WandbLogger(save_dir=tmp_path, offline=True)
    made = fit(game, logger=logger, log_every_n_steps=1)
    made.fit_loop.epoch_loop.max_steps, game.last = 5, 3
    with pytest.raises(Exception, match="by chance"):
        made.fit(game, parts(5))
    files = sorted(tmp_path.glob(f"wandb/offline-*/run-{logger.version}.wandb"))
    assert [b"generator" in each.read_bytes() for each in files] == [True, True]
    logger._experiment = object()
    with pytest.raises(UserError, match=r"has begun a run .*; leave logger.watch\(...\) and .* to the game's on_fit_"):
        made.fit(game, parts(5))


class Unsaved(Callback):
    """Has a function when the training has ended, or from the beginning."""

    def __init__(self, has):
        self.has = has

    def teardown(self, *_, stage):
        self.has = print

    def state_dict(self):
        return {"has": self.has}


@pytest.mark.parametrize(("has", "plays"), [(print, False), (0, True)])
def test_what_no_checkpoint_can_have_is_refused_before_the_first_step_if_it_is_there(has, plays, capfd):
    class Tells(Plain):
        def judge(self, batch):
            print("a step")
            return super().judge(batch)

    with pytest.raises(UserError, match=r"^(cannot write .*: )?'callbacks/Unsaved/has' is a builtin"):
        fit(Tells(), callbacks=[Unsaved(has)])
    assert ("a step" in capfd.readouterr().out) == plays


class Interrupted(Plain):
    """As a notebook does: the process that has started the ranks gets the signal, and each rank."""

    def on_train_batch_end(self, *_):
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            if self.trainer.is_global_zero:
                os.kill(os.getppid(), signal.SIGINT)


def test_what_was_trained_before_an_interrupt_is_here():
    game = Interrupted()
    try:
        with pytest.raises(SystemExit):
            fit(game, steps=9)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from there on
    assert game.trainer.interrupted and game.trainer.global_step == 3
    assert distance(made_of(game.trainer), made_of(fit(Plain(), "single", 1, 3))) < EXACT


def test_after_an_error_it_can_be_tried_again():
    game = Refused()
    made = trainer(PhaseStrategy("dp", check=False), 2, 1)
    with pytest.raises(UserError, match=r"^this rank is refused$"):
        made.fit(game, parts(1))
    game.judge = partial(Plain.judge, game)
    game.phases = tuple(game.configure_phases())
    made.fit(game, parts(1))
    assert made.global_step == 1


def test_it_is_for_one_machine():
    with pytest.raises(UserError, match="dp trains on one machine, and there are 2"):
        trainer(PhaseStrategy("dp"), 2, 1, num_nodes=2)
    others = mock.patch.dict(os.environ, SECOND_OF_TWO, RANK="1", WORLD_SIZE="4")
    with (
        others,
        pytest.raises(UserError, match="strategy dp trains on one machine, and there are 2; type --strategy ddp"),
    ):
        trainer(PhaseStrategy("dp"), 2, 1)
