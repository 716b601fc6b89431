"""The private names of Lightning that this package uses, and of torch those that it overrides or needs in many files.

They were checked with Lightning 2.6.0 to 2.6.6 and torch 2.11 to 2.15. If a newer version lacks a name,
tests/unit/strategies/test_world.py says which.
"""

import csv
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from traceback import walk_stack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from lightning.fabric.utilities.data import _set_sampler_epoch as set_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_threads
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.overrides.distributed import _sync_module_states as broadcast_module
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as FunctionLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as ScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput as WorkerOutput
from lightning.pytorch.strategies.launchers.subprocess_script import _basic_subprocess_cmd as same_command
from lightning.pytorch.trainer.call import _call_callback_hooks as call_callbacks
from lightning.pytorch.trainer.call import _call_lightning_datamodule_hook as call_data
from lightning.pytorch.trainer.call import _call_lightning_module_hook as call_module
from lightning.pytorch.trainer.call import _interrupt as interrupt
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor, nn
from torch._C import _DisableFuncTorch as outside_transforms
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed import _broadcast_coalesced as broadcast_coalesced
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler
from torch.utils.checkpoint import CheckpointFunction

# What Lightning itself calls, and torch has deprecated.
warnings.filterwarnings("ignore", ".*(LeafSpec|nn.functional.all_gather).* is deprecated", module="lightning")


def is_transformed(tensor: Tensor) -> bool:
    """Whether torch.func or forward mode differentiates it now."""
    return is_functorch_wrapped_tensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None


def in_transform() -> bool:
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def logs_are_due(trainer: Trainer) -> bool:
    return trainer._logger_connector.should_update_logs


def forget_logged(trainer: Trainer, names: Collection[str]) -> None:
    """Let loggers get no old value of these names again: Lightning keeps what was logged until the epoch ends."""
    for each in (trainer._results or {}).values():
        if each.meta.name in names:
            each.reset()


def log_anew(trainer: Trainer, hook: str, names: Collection[str]) -> None:
    """Let this hook log these names otherwise than in an earlier epoch, such as for no logger."""
    for name in names:
        (trainer._results or {}).pop(f"{hook}.{name}", None)


def call_hooks(trainer: Trainer, name: str, *args: Any) -> None:
    """Call a hook of the callbacks and then of the module, in which `self.log` works."""
    call_callbacks(trainer, name, *args)
    call_module(trainer, name, *args)


def count_step(trainer: Trainer) -> None:
    """Tell Lightning that one step is over, whatever the number of optimizers."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()


def altered(optimizer: Optimizer) -> bool:
    """Whether its steps have hooks, or are no longer its class's. A schedule wraps `step`, and adds nothing."""
    own = vars(optimizer).get("step")
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks) or not (own is None or hasattr(own, "_wrapped_by_lr_sched"))


def begin_epoch_again(trainer: Trainer) -> None:
    """Make the iterator of the training's loader anew. It may take a batch at once, so the epoch is told before."""
    loop: Any = trainer.fit_loop
    if loop._data_fetcher is not None:  # nothing is trained without a batch
        for each in loop._combined_loader.flattened:
            set_epoch(each, loop.epoch_progress.current.processed)
        iter(loop._data_fetcher)


def own_sampler(wrapper: DistributedSamplerWrapper) -> Any:
    """The author's sampler, of which Lightning's wrapper gives each rank its part."""
    inner: Any = wrapper.dataset
    return inner._sampler


def attach_callbacks(trainer: Trainer) -> None:
    """Let the trainer have what the game's configure_callbacks() makes."""
    trainer._callback_connector._attach_model_callbacks()


def states_beside(trainer: Trainer) -> dict[str, Any]:
    """What callbacks and the data would have in a checkpoint, but for a state that is made only in the first step."""
    states: dict[str, Any] = {"callbacks": {}}
    for each in callbacks(trainer):
        with suppress(Exception):
            states["callbacks"][each.state_key] = each.state_dict()
    if (data := datamodule(trainer)) is not None:
        with suppress(Exception):
            states[type(data).__qualname__] = data.state_dict()
    return states


def call_setup_hooks(trainer: Trainer, *given: Any, callbacks: Sequence[Callback] = ()) -> None:
    """What Lightning calls before a strategy's set-up, which may make networks. `given` is what `fit` was given.

    Of callbacks only these are called: others may open files, into which ranks have written.
    """
    assert trainer.state.fn is not None
    if given and trainer.state.fn == TrainerFn.FITTING:
        module, train, val, data = given[:4]
        train, data = (None, train) if isinstance(train, LightningDataModule) else (train, data)
        trainer._data_connector.attach_data(module, train, val, datamodule=data)
        if data is not None:
            call_data(trainer, "setup", stage=trainer.state.fn.value)
    for callback in callbacks:
        callback.setup(trainer, trainer.lightning_module, trainer.state.fn.value)
    call_module(trainer, "setup", stage=trainer.state.fn.value)
    call_module(trainer, "configure_model")


def call_teardown_hooks(trainer: Trainer, callbacks: Sequence[Callback]) -> None:
    """What Lightning does after a run: what `setup` has opened is closed."""
    assert trainer.state.fn is not None
    if datamodule(trainer) is not None:
        call_data(trainer, "teardown", stage=trainer.state.fn.value)
    for callback in callbacks:
        callback.teardown(trainer, trainer.lightning_module, trainer.state.fn.value)
    call_module(trainer, "teardown", stage=trainer.state.fn.value)


def loading_callbacks(trainer: Trainer) -> list[Callback]:
    """The author's callbacks that load a state, for which their `setup` may make the place."""
    loads = ("load_state_dict", "on_load_checkpoint")
    own = [each for each in callbacks(trainer) if not type(each).__module__.startswith("lightning.")]
    return [each for each in own if any(getattr(type(each), name) is not getattr(Callback, name) for name in loads)]


def leave_loops(loop: _Loop) -> None:
    """Leave a loop, and those inside, as Lightning does where a run has ended: the next one does not resume."""
    loop.on_iteration_done()
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            leave_loops(each)


def taken_ahead(trainer: Trainer) -> int:
    """How many batches Lightning has taken that wait to be trained on: one, if the loaders together have no length."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def in_a_step(trainer: Trainer) -> bool:
    """Whether a batch was taken that is not whole: from on_train_batch_start on, also after an error."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return progress.ready != progress.processed


def compiled_whole(module: LightningModule) -> bool:
    """Whether fit was called with torch.compile(module)."""
    return getattr(module, "_compiler_ctx", None) is not None


def fitting(module: LightningModule) -> Trainer | None:
    """The trainer that has fitted the module in this process, up to now without an error."""
    trainer = module._trainer  # None in a process that has only started others
    runs = trainer and trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING
    return trainer if runs else None


def end_by(trainer: Trainer, wish: Callable[..., None]) -> None:
    """Let SIGTERM call `wish`. This replaces the two collectives by which Lightning finds out about a SIGTERM."""
    trainer._signal_connector._sigterm_notifier_fn = wish
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def warn_by(trainer: Trainer, wish: Callable[..., None]) -> int | None:
    """Let Slurm's warning call `wish`, and not Lightning's handler, which saves in the midst of collectives.

    Returns the signal. None outside of Slurm, or if the person has turned Lightning's handler off.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
        return None
    trainer._signal_connector._slurm_sigusr_handler_fn = wish
    return environment.requeue_signal


def path_for_requeue(trainer: Trainer) -> str:
    """Where Lightning looks for a checkpoint when a job of Slurm starts again."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def default_store() -> Any:
    """torch's store, through which the ranks found each other. Rank 0's host serves it."""
    return dist.distributed_c10d._get_default_store()


def limit(group: Any, timeout: timedelta | None) -> None:
    """Let this group's collectives wait so long for the other ranks. The public function is newer than torch 2.11."""
    if timeout is not None:
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timeout, group)


def note_checkpoint(function: Callable[..., Any], seen: Callable[[Any], None]) -> None:
    """Tell `seen` from which checkpoint a run resumes, None if from none, before set-up. Lightning says it only after.

    `function` is about to run in this process: a method of a Trainer's, that of `fit`, `validate`, `test` or `predict`.
    """
    trainer = getattr(function, "__self__", None)
    if not isinstance(trainer, Trainer):
        return
    connector = trainer._checkpoint_connector
    select = type(connector)._select_ckpt_path.__get__(connector)

    def selected(*args: Any, **kwargs: Any) -> Any:
        path = select(*args, **kwargs)
        seen(path)
        return path

    connector._select_ckpt_path = selected


def restore(trainer: Trainer, checkpoint: Any) -> None:
    """Load what a training would go on from, where nothing is trained."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = trainer.strategy.load_checkpoint(checkpoint)
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}


def name_version(logger: Logger, version: int | str | None) -> None:
    """Tell a logger that has chosen no folder the number of one, and a WandbLogger with which run to go on."""
    own = vars(logger)
    if "_version" in own and own["_version"] is None:
        own["_version"] = version
    if isinstance(logger, WandbLogger):
        own["_id"] = own["_wandb_init"]["id"] = version


def begun(logger: Logger) -> Any:
    """The run of Weights & Biases to which a logger writes by now."""
    return logger._experiment if isinstance(logger, WandbLogger) else None


def finish(logger: Logger, status: int) -> None:
    """What Weights & Biases does when a process exits. Python exits no forked one."""
    if begun(logger) is not None:
        with suppress(Exception):  # which would cost the training
            begun(logger).finish(status)


def pass_on(logger: Logger) -> None:
    """Let another process write on: a rank after this process, or this process after its ranks.

    The file of a CSVLogger is opened here, since a rank would empty it first; and whoever writes on needs the names of
    all its columns. The writer of a TensorBoardLogger is closed: a forked rank would wait for its thread for ever.
    """
    if isinstance(logger, TensorBoardLogger) and logger._experiment is not None:
        logger._experiment.close()
        logger._experiment = None  # opened anew, where it is written to
    if not isinstance(logger, CSVLogger):
        return
    writer = logger.experiment
    if os.path.isfile(writer.metrics_file_path):
        with open(writer.metrics_file_path, newline="") as file:
            writer.metrics_keys = next(csv.reader(file), [])


def redraws(wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[Any]:
    """Inside the `with`, torch's function that draws again until all numbers are accepted is wrapped."""
    return mock.patch.object(nn.init, "_no_grad_trunc_normal_", wrapped(nn.init._no_grad_trunc_normal_))


def callbacks(trainer: Trainer) -> list[Callback]:
    """An attribute that Lightning gives a trainer, and its class does not declare."""
    return vars(trainer)["callbacks"]


def datamodule(trainer: Trainer) -> Any:
    """The trainer's data module, which Lightning declares nowhere."""
    return vars(trainer).get("datamodule")


def logs_graph(logger: Logger) -> bool:
    """Whether it is TensorBoard's, and traces the game."""
    return getattr(logger, "_log_graph", False)


def uploads(logger: Logger) -> bool:
    """Whether it is to upload checkpoints: that of Weights & Biases, or of MLflow."""
    return getattr(logger, "_log_model", False) in (True, "all")  # a dummy logger has a method of any name


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    vars(trainer)["callbacks"] = callbacks


def keeping_loaders(kind: type) -> AbstractContextManager[Any]:
    """Inside the `with`, Lightning makes no loader of this kind anew, as it does for overfit_batches and to predict."""
    update = data_connector._update_dataloader

    def updated(loader: Any, *args: Any, **kwargs: Any) -> Any:
        return loader if isinstance(loader, kind) else update(loader, *args, **kwargs)

    return mock.patch.object(data_connector, "_update_dataloader", updated)


def leaving_samplers(trainer: Trainer, held_out: bool) -> AbstractContextManager[Any]:
    """Inside the `with`, training loaders keep their own order, and with `held_out` all others too.

    Lightning would deal them out by a DistributedSampler for any DDPStrategy, also on one device.
    """
    connector, chosen = trainer._data_connector, trainer._accelerator_connector

    def prepared(loader: object, shuffle: bool, mode: RunningStage) -> object:
        dealt = chosen.use_distributed_sampler and not held_out and mode != RunningStage.TRAINING
        with mock.patch.object(chosen, "use_distributed_sampler", dealt):
            return type(connector)._prepare_dataloader(connector, loader, shuffle, mode)

    return mock.patch.object(connector, "_prepare_dataloader", prepared)


def in_backwards(make: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Inside the `with`, torch runs every backward in a context that `make` returns."""
    before = torch.autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with make():
            return before(*args, **kwargs)

    return mock.patch.object(torch.autograd, "_engine_run_backward", run)


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Inside the `with`, this process is the first of so many ranks, and its collectives communicate nothing.

    Inside of another such world that one is away meanwhile, and the process groups that were made in it end.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    outer = dist.get_world_size() if dist.is_initialized() else 0
    if outer:
        assert dist.get_backend() == "fake"
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        if outer:
            dist.init_process_group("fake", rank=0, world_size=outer, store=FakeStore())


def group_in(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """The process group among the arguments of a collective, as a mode for dispatch gets them."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject):
            with suppress(RuntimeError):  # it is something else
                return dist.ProcessGroup.unbox(each)
    raise AssertionError("a collective has a group")


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that draws on this device where none is given."""
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators")  # noqa: B009 - of CUDA and XPU
    return generators[torch.accelerator.current_device_index() if device.index is None else device.index]


def uses(memory: torch.UntypedStorage) -> int:
    """How many tensors have this memory. Compare it with a later time's."""
    return torch._C._storage_Use_Count(memory._cdata)


def users(tensor: Tensor) -> int:
    """How many objects of Python hold this tensor, and how many tensors its memory."""
    return sys.getrefcount(tensor) + uses(tensor.untyped_storage())


def weight_hooks(weight: Tensor) -> list[Callable[..., Any]]:
    """Hooks that `register_hook` has added."""
    return list((weight._backward_hooks or {}).values())


def _of_gradients(hook: Callable[..., Any], given: Tensor | None) -> Tensor | None:
    """An author's hook of a weight, for a gradient, or a weight that has one. torch calls it without one too."""
    is_there = given is not None and not (isinstance(given, nn.Parameter) and given.grad is None)
    return hook(given) if is_there else None


def only_gradients(weight: Tensor) -> None:
    """Let an author's hooks be called only where there is a gradient, as in plain torch."""
    for hooks in (weight._backward_hooks or {}, weight._post_accumulate_grad_hooks or {}):
        new = {key: hook for key, hook in hooks.items() if getattr(hook, "func", None) is not _of_gradients}
        hooks |= {key: partial(_of_gradients, hook) for key, hook in new.items()}


def post_accumulate_hooks(weight: Tensor) -> list[Callable[..., Any]]:
    """Hooks that `register_post_accumulate_grad_hook` has added."""
    return list((weight._post_accumulate_grad_hooks or {}).values())


def module_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Hooks that a call of the module runs, around its forward and in its backward."""
    kinds = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return [hook for hooks in kinds for hook in hooks.values()]


def running_backward() -> int:
    """The number of the backward that this thread runs, -1 outside of one. A backward inside of it has another."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    return running_backward() != -1


def in_checkpoint() -> bool:
    """Whether torch.utils.checkpoint keeps what this thread computes, to compute it again in backward.

    Of such hooks torch uses the innermost ones. With use_reentrant=True there are none, and nothing learns meanwhile.
    """
    if not torch.is_grad_enabled():
        return any(frame.f_code is CheckpointFunction.forward.__code__ for frame, _ in walk_stack(sys._getframe()))
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def forget_port(environment: ClusterEnvironment) -> None:
    """Let Lightning's own environment look for a free port again."""
    if type(environment) is LightningEnvironment:
        environment._main_port = -1


def set_first(first: bool) -> None:
    """Say whether this process is the one that prints and logs. Lightning asks two variables."""
    for asked in (rank_zero_only, utils_rank_zero_only):
        vars(asked)["rank"] = 0 if first else 1


LINES = logging.getLogger("lightning.pytorch.lines")  # commands hide Lightning's other lines


@rank_zero_only
def say(line: str) -> None:
    """Show a line about this training on the first rank, as Lightning shows its own."""
    LINES.info(line)


def steps_of(schedule: LRScheduler) -> int:
    """How many steps a schedule has made. One that chains others does not count itself."""
    return steps_of(schedule._schedulers[0]) if isinstance(schedule, ChainedScheduler) else schedule.last_epoch


def forget_helpers() -> None:
    """Forget what a forked process does not have: threads that compile, the process from which loaders are forked."""
    forkserver._forkserver.__init__()
    if (known := sys.modules.get("torch._inductor.async_compile")) is not None:
        known.AsyncCompile.pool.cache_clear()


def no_autocast_on(kind: str) -> AbstractContextManager[Any]:
    """Inside the `with`, `torch.autocast` for devices of a kind that knows none does nothing, as where it is off."""
    before, enabled = torch.autocast, torch.is_autocast_enabled

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == kind else before(device_type, *args, **kwargs)

    def is_enabled(*kinds: str) -> bool:
        return kind not in kinds and enabled(*kinds)

    return mock.patch.multiple(torch, autocast=autocast, is_autocast_enabled=is_enabled)
