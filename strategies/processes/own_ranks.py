"""The ranks of dp and of notebooks: a process starts them itself, and gets back what they have trained."""

import ctypes
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from gan.files.disk import whole_file
from gan.files.errors import RankLost, UserError, explained
from gan.files.system import LINUX
from gan.module import GanModule
from strategies import private
from strategies.batches import random_state
from strategies.objects.reachable import Reachable
from strategies.processes.starting import LaunchedStrategy, StartMethod, survive

REFUSED, FOUND, TRAINED = "refused", "found", "trained"  # words of a UserError, results, the checkpoint after fit
PATIENCE = 10.0  # seconds that ranks have to end, before they are ended
OMP_PAUSE_HARD = 2  # of OpenMP's omp.h
LIMITS = "max_epochs", "max_batches"  # of the loop over epochs, which Lightning sets when it begins
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def _generator(device: torch.device, state: bytes) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


# A spawned rank's loaders have generators. torch would share the memory of a copy of their state, and this process lets
# that go before the rank has it.
ForkingPickler.register(torch.Generator, lambda own: (_generator, (own.device, own.get_state().numpy().tobytes())))


class OwnRanks(private.FunctionLauncher):
    """Starts the ranks of dp, and those of other policies in a notebook or where a `start_method` was typed.

    [Note: ranks of one process]
    A person starts one process, a script or a notebook. Each `fit`, `validate`, `test` or `predict` in it starts a rank
    for each device, and waits for them. A forked rank has all that this process has, a spawned one what can be pickled.
    Where nothing was typed and forked ranks could not train (see `can_fork`) they are spawned.

    After `fit` the ranks save a checkpoint, and this process loads it as one device would that resumes. So the same
    comes back that a checkpoint has: weights, buffers, averages, optimizers, the states of callbacks, and what the game
    remembers. After an interrupt too: see Interruptible. In between this process is a world of its own, on the CPU.
    """

    _strategy: LaunchedStrategy
    is_interactive_compatible = True  # `refuse_to_spawn` says what to type where a notebook cannot

    def __init__(self, strategy: LaunchedStrategy, start_method: StartMethod) -> None:
        super().__init__(strategy, "fork" if start_method == "popen" else start_method)
        self.typed = start_method != "popen"
        self.folder = Path()  # of one launch: what the ranks leave there
        self.given: tuple[Any, ...] = ()  # to fit
        self.aside: tuple[Trainer, list[Callback]] | None = None  # of a training that has failed

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any) -> Any:
        strategy, device = self._strategy, self._strategy.parallel_devices[0]
        end_openmp()
        if not self.typed:
            self._start_method = "fork" if can_fork(device.type) else "spawn"
        if self._start_method != "fork":
            refuse_to_spawn(trainer, args, kwargs, typed=self.typed)
        for logger in trainer.loggers:
            private.pass_on(logger)
            if self._start_method == "fork" and private.begun(logger) is not None:
                raise UserError(
                    "WandbLogger has begun a run in this process, and ranks that are forked cannot write to that run; "
                    "leave logger.watch(...) and logger.experiment to the game's on_fit_start, on the rank where "
                    "self.trainer.is_global_zero is true"
                )
        self._already_fit = False  # unlike Lightning's, this process has all that a second fit begins with
        strategy.is_starter = False
        port = os.environ.get("MASTER_PORT")
        root = trainer.default_root_dir if os.access(trainer.default_root_dir, os.W_OK) else None
        try:
            with tempfile.TemporaryDirectory(prefix="gan-ranks-", dir=root) as folder:
                self.folder = Path(folder)
                return self._launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            for how in (signal.SIGTERM, signal.SIGKILL):
                for process in self.procs:  # those that train on, as where Ctrl-C has reached this process alone
                    process.join(PATIENCE)
                self.kill(how)
            self.aside = trainer, private.callbacks(trainer)
            private.set_callbacks(trainer, [])  # Lightning would tell them of the error, and the ranks have done so
            raise
        finally:
            strategy.is_starter = True
            os.environ.pop("MASTER_PORT", None)  # Lightning's, which by the next fit may be another program's
            if port is not None:
                os.environ["MASTER_PORT"] = port
            private.forget_port(strategy.cluster_environment)

    def put_back(self) -> None:
        """When Lightning has told the callbacks."""
        if self.aside is not None:
            private.set_callbacks(*self.aside)
        self.aside = None

    def _launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any) -> Any:
        refused, self.given = self.folder / REFUSED, args
        try:
            function = partial(_apart, random_state.capture(), self._train, trainer, function)
            super().launch(function, *args, trainer=trainer, **kwargs)
            return self._found()["results"]
        except KeyboardInterrupt:
            private.say("waiting for the ranks, which end after this step; interrupt again not to wait")
            for limit in (PATIENCE, None):
                for process in self.procs:
                    process.join(limit)
                self.kill(signal.SIGTERM)  # where the interrupt has reached this process alone
            if (self.folder / FOUND).exists():
                self.update_main_process_results(trainer, {})
            raise
        except (ProcessRaisedException, ProcessExitedException):
            if refused.exists():
                raise UserError(refused.read_text("utf-8")) from None
            raise

    def _train(self, trainer: Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        status = 1
        private.set_callbacks(trainer, [*private.callbacks(trainer), Interruptible(self)])
        try:
            with self._telling():
                found = survive(self._strategy, function, *args, **kwargs)
            status = 0
        except BaseException as error:
            private.interrupt(trainer, error)  # as Lightning does in ranks that it has not started
            # When one rank has ended, torch sends SIGTERM to the others, which have loggers to finish.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise
        finally:
            for logger in trainer.loggers:
                private.finish(logger, status)
        if trainer.state.fn == TrainerFn.FITTING:
            self.save(trainer)
        return found

    def save(self, trainer: Trainer) -> None:
        with self._telling():
            trainer.save_checkpoint(self.folder / TRAINED, weights_only=False)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Inside the `with`, the process that has started the ranks gets the words of a UserError."""
        try:
            yield
        except UserError as error:
            if not isinstance(error, RankLost):
                with whole_file(self.folder / REFUSED) as part:
                    part.write_text(str(error), "utf-8")
            raise

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> private.WorkerOutput | None:
        """In files: Lightning's queue is a pipe, and this process does not read it before the rank has ended."""
        if self._strategy.local_rank != 0:
            return None
        found = {
            "results": results,
            "logged": {name: getattr(trainer, name) for name in METRICS},
            "loops": trainer.fit_loop.state_dict(),
            "limits": {name: getattr(trainer.fit_loop, name) for name in LIMITS},
            "versions": [logger.version for logger in trainer.loggers],
            "folders": [getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks],
        }
        with whole_file(self.folder / FOUND) as part:
            part.write_bytes(pickle.dumps(move_data_to_device(found, torch.device("cpu"))))
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return private.WorkerOutput(best, None, trainer.state, None, {})

    def _found(self) -> dict[str, Any]:
        return pickle.loads((self.folder / FOUND).read_bytes())

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """As if this process had trained. The folders are those that loggers and ModelCheckpoints have chosen."""
        found = self._found()
        for name, metrics in found["logged"].items():
            getattr(trainer, name).clear()
            getattr(trainer, name).update(metrics)
        for logger, version in zip(trainer.loggers, found["versions"], strict=True):
            private.name_version(logger, version)
            private.pass_on(logger)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._strategy.is_starter = True
        vars(trainer.fit_loop).update(found["limits"])
        try:
            self._take_back(trainer, self.folder / TRAINED, found["loops"], found["folders"])
        except Exception as error:
            kept = Path(trainer.default_root_dir) / f"{self.folder.name}.ckpt"
            shutil.move(self.folder / TRAINED, kept)
            raise UserError(
                f"the training has ended, but this process could not load what its ranks have trained, which is in "
                f"{kept}: {str(error) or type(error).__name__}"
            ) from error

    def _take_back(self, trainer: Trainer, checkpoint: Path, loops: dict[str, Any], folders: list[str | None]) -> None:
        """What training on one device would have left here."""
        strategy = self._strategy
        trainer.lightning_module.trainer = trainer
        private.attach_callbacks(trainer)
        for callback, folder in zip(trainer.checkpoint_callbacks, folders, strict=True):
            if folder is not None:
                callback.dirpath = folder  # pyrefly: ignore[missing-attribute] - a rank has found it there
        callbacks = private.loading_callbacks(trainer)
        private.call_setup_hooks(trainer, *self.given, callbacks=callbacks)
        strategy.connect(trainer.lightning_module)
        strategy.resumes_from = checkpoint
        try:
            with strategy.on_one_device():
                strategy.setup(trainer)
            private.restore(trainer, checkpoint)
            strategy.take_back(loops)
            private.call_teardown_hooks(trainer, callbacks)
        finally:
            strategy.teardown()
        trainer.fit_loop.load_state_dict({**loops, "state_dict": {}})
        private.leave_loops(trainer.fit_loop)


class Interruptible(Callback):
    """Lets an interrupt end all ranks after the same step. What is saved there comes back, as after `fit`."""

    def __init__(self, launcher: OwnRanks) -> None:
        self.launcher, self.parent = launcher, os.getppid()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else a callback has its own way
            signal.signal(signal.SIGINT, partial(self._note, trainer.strategy))

    def _note(self, strategy: Any, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        if os.getppid() != self.parent:  # torch sends the signal when that is gone
            raise KeyboardInterrupt
        strategy.ending.wish(number)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.ending.look():
            self.launcher.save(trainer)
            self.launcher._collect_rank_zero_results(trainer, None)


def can_fork(kind: str) -> bool:
    """Whether a forked process could train on devices of this kind.

    It could use no GPU if this process has begun to use one. Nor could it differentiate if this process has done so
    where there is a GPU: torch then has a thread for each, and refuses a process that does not have them. It says so
    only there, so a process is forked to ask. It also says whether the device itself can be used there, which it cannot
    if this process has only looked for GPUs by `torch.cuda.is_available()`.
    """
    for each in {kind, "cuda"} - {"cpu"}:
        if getattr(torch.get_device_module(each), "is_initialized", lambda: False)():
            return False
    asked = os.fork()
    if asked:
        return os.waitpid(asked, 0)[1] == 0
    try:
        torch.zeros((), device=kind, requires_grad=True).backward()
        os._exit(0)
    finally:
        os._exit(1)


def end_openmp() -> None:
    """End the threads with which this one computes on the CPU; the next computation starts others.

    A forked process would not have them, and GNU's OpenMP would wait for them there for ever.
    """
    if not LINUX:
        return
    with open("/proc/self/maps") as file:
        found = {line.split(maxsplit=5)[-1].strip() for line in file if "libgomp" in line}
    for library in found:
        ctypes.CDLL(library).omp_pause_resource_all(OMP_PAUSE_HARD)


def refuse_to_spawn(trainer: Trainer, *given: Any, typed: bool) -> None:
    """Raise if ranks cannot be spawned, with pickle's words for what cannot be pickled."""
    begun = "ranks are spawned"
    if not typed:
        begun += ", and not forked from a process that has begun to use a GPU or to differentiate beside one"
    first = "leave start_method out, or type 'fork'" if typed else "let fit() be the first that computes"
    if hasattr(sys, "ps1"):
        raise UserError(f"{begun}; a notebook cannot do that: {'' if typed else 'restart it, and '}{first}")
    why = (
        f"{begun}, and the game, its data or the Trainer cannot be pickled: {{why}}; keep that out of them, or {first}"
    )
    with explained(why, Exception, UserError):
        ForkingPickler.dumps((given, trainer))


def _apart(state: Mapping[str, Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it in a rank, which has memory of its own, and the random states of the process that has started it.

    A tensor that is sent to a process shares its memory: all ranks would update the same weights. And a fork seeds
    Python's generator anew.
    """
    random_state.restore(state)
    private.forget_helpers()
    shared: dict[int, torch.UntypedStorage] = {}
    for game in (each for each in args if isinstance(each, GanModule)):
        for _, tensor in Reachable([game]).objects.values():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue
            if tensor.device.type == "cpu" and tensor.is_shared():
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in shared:
                    shared[memory.data_ptr()] = memory.clone()
                where = shared[memory.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(*where)
    return function(*args, **kwargs)
