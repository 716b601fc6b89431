"""Where ranks come from: devices, and what ranks ask each other."""

import importlib
import os
from datetime import timedelta
from functools import partial
from itertools import count
from unittest import mock

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.plugins import MixedPrecision

from datasets import GlobalLoader, GlobalStream
from gan import Phase
from gan.files.errors import UserError
from strategies import PhaseStrategy, TorchAccelerator, world
from strategies.processes import rendezvous
from strategies.processes.rendezvous import GLOO
from strategies.training import ranks_strategy
from strategies.world import Groups, World
from tests.support.hard_games import Plain
from tests.support.parity import parts, trainer
from tests.support.posix import only_on_linux

# ---- groups ----


def phases(*learners):
    return [Phase(f"phase {number}", lambda batch: None, names) for number, names in enumerate(learners)]


@pytest.fixture
def made():
    """torch's groups are numbers here. The list has those that were ended."""
    ended, numbers = [], count()

    def new(timeout):
        assert timeout in (None, timedelta(seconds=7))
        return next(numbers)

    ours = {"new_group": new, "barrier": lambda: None, "destroy_process_group": ended.append}
    with mock.patch.multiple(world.dist, **ours):
        yield ended


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["a", "b", "c"], [0, 0, 0]),
        ([["a", "b"], "c"], [0, 1, 0]),
        (["a", ["a", "b"], ["b", "c"]], [0, 1, 0]),
        ([["a", "b"], ["b", "c"], ["c", "a"]], [0, 1, 2]),
    ],
)
def test_players_share_one_unless_they_learn_in_the_same_phase(turns, expected, made):
    group = Groups(phases(*turns))
    assert [group.shared(player) for player in "abc"] == expected


def test_one_of_its_own_is_never_shared_and_all_are_ended_once(made):
    group = Groups(phases("a", "b", "c"), timedelta(seconds=7))
    assert [group.shared("a"), group.own(), group.own(), group.shared("b")] == [0, 1, 2, 0]
    group.release()
    group.release()
    assert sorted(made) == [0, 1, 2]


@pytest.mark.parametrize("typed", [40, 40.0, timedelta(seconds=40)])
def test_ranks_wait_for_seconds(typed):
    assert PhaseStrategy(timeout=typed).groups.timeout == timedelta(seconds=40)


# ---- accelerator ----


@pytest.fixture
def found(monkeypatch):
    """`found(type, count)`: what torch finds on this machine."""

    def finds(kind, count=1):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(MPSAccelerator, "is_available", lambda: kind == "mps")

    return finds


@pytest.mark.parametrize(
    ("asked", "numbers"), [(2, [0, 1]), ([0, 2], [0, 2]), ("2", [0, 1]), ("0,2", [0, 2]), (-1, [0, 1, 2])]
)
def test_devices_are_a_number_or_numbers(asked, numbers, found):
    found("xpu", 3)
    assert TorchAccelerator.parse_devices(asked) == numbers
    assert TorchAccelerator.get_parallel_devices(numbers) == [torch.device("xpu", number) for number in numbers]


def test_apples_device_is_one_and_takes_our_strategy(found):
    found("mps")
    one = Trainer(strategy=PhaseStrategy(), accelerator=TorchAccelerator(), devices=1, logger=False)
    assert one.strategy.root_device == torch.device("mps", 0)
    with pytest.raises(UserError, match=r"devices=2: this machine has 1 GPU; type devices=1$"):
        Trainer(strategy=PhaseStrategy(), accelerator=TorchAccelerator(), devices=2)
    with pytest.raises(ValueError, match="not supported on the MPS accelerator"):  # if this passes, Lightning's will do
        Trainer(strategy=PhaseStrategy(), accelerator="mps")


def test_autocast_is_for_the_device_that_computes():
    game = Plain().float()
    lightning = trainer(PhaseStrategy(), 1, 1, precision="bf16-mixed")
    lightning.strategy.precision_plugin = MixedPrecision("bf16-mixed", "cuda")  # what Lightning makes for xpu
    lightning.fit(game, parts(1, batches=lambda step: {"x": torch.zeros(4, 6)}))
    assert lightning.strategy.precision_plugin.device == "cpu"


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_batches_are_pinned_where_the_run_computes_on_a_gpu(kind, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    strategy = PhaseStrategy()
    strategy.parallel_devices = [torch.device(kind)]
    strategy._lightning_module = Plain()
    strategy._lightning_module.trainer = trainer(PhaseStrategy(), 1, 1)
    for loader in (GlobalLoader([1, 2], 2), GlobalStream([1, 2], 2)):
        assert strategy.process_dataloader(loader).pin_memory == (kind == "cuda")


@pytest.mark.parametrize(
    ("kind", "expected"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl"), ("unknown", "gloo")]
)
def test_ranks_communicate_by_what_torch_has_for_the_device(kind, expected, monkeypatch):
    class Device:
        type = kind

    strategy = PhaseStrategy()
    monkeypatch.setattr(PhaseStrategy, "root_device", Device)
    assert strategy._get_process_group_backend() == expected


@only_on_linux
@pytest.mark.parametrize(("nodes", "talk"), [(1, ("lo", "127.0.0.1")), (2, ("far0", "10.0.0.7"))])
def test_ranks_of_one_host_talk_on_loopback_whatever_its_name_means(nodes, talk, monkeypatch):
    monkeypatch.setenv(GLOO, "")
    monkeypatch.delenv(GLOO)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setattr(rendezvous, "_interface", {"127.0.0.1": "lo", "10.0.0.7": "far0"}.get)
    monkeypatch.setattr(rendezvous, "own_address", lambda towards: towards)
    monkeypatch.setattr(ranks_strategy, "own_name", lambda main: main)
    strategy = trainer(PhaseStrategy("ddp"), 2, 1, num_nodes=nodes).strategy
    strategy.set_world_ranks = lambda: None
    monkeypatch.setattr(ranks_strategy.RanksStrategy, "_store", lambda self, rank, size: None)
    strategy.lockstep.survivor = mock.Mock(tie=mock.Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        strategy.setup_distributed()
    assert (os.environ[GLOO], strategy.lockstep.survivor.tie.call_args.args[2]) == talk


# ---- private ----


# What we override or set: under another name nothing of ours would be called, and no import would fail.
# Checked with torch 2.11 to 2.15 and Lightning 2.6.0 to 2.6.6.
LAUNCHERS, TORCH = "lightning.pytorch.strategies.launchers.", "torch.distributed.elastic.agent.server."
RESULTS = "_collect_rank_zero_results get_extra_results update_main_process_results"
NAMES = {
    f"{LAUNCHERS}multiprocessing:_MultiProcessingLauncher": RESULTS,
    f"{LAUNCHERS}subprocess_script:_SubprocessScriptLauncher": "_call_children_scripts",
    "lightning.pytorch.strategies:DDPStrategy": "_configure_launcher",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop": "_broadcast_sigterm_tensor",
    "lightning.pytorch.core:LightningModule": "on_validation_model_zero_grad",
    f"{TORCH}local_elastic_agent:LocalElasticAgent": "_monitor_workers _restart_workers _start_workers",
    "_accelerator_connector": "use_distributed_sampler",
    "_signal_connector": "_sigterm_notifier_fn _slurm_sigusr_handler_fn",
    "_checkpoint_connector": "_select_ckpt_path",
}


@pytest.mark.parametrize("place", NAMES)
def test_a_private_name_is_still_there(place):
    """Of a class, or of a part of a trainer."""
    module, _, name = place.partition(":")
    if name:
        found = getattr(importlib.import_module(module), name)
    else:
        found = getattr(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True), place)
    lost = [name for name in NAMES[place].split() if not hasattr(found, name)]
    assert not lost, f"there is no {', '.join(lost)} in {place} any more"


# ---- world ----


@pytest.mark.parametrize("ask", [lambda w: w.gather(1), lambda w: w.broadcast(1), lambda w: w.answer(bool)])
def test_whatever_ranks_do_together_what_an_error_has_left_undone_comes_first(ask):
    alone, done = World(), []
    alone.owed.work.append(partial(done.append, "left"))
    ask(alone)
    assert done == ["left"]
