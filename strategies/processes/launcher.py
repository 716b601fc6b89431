"""Lightning's launchers, but every rank trains inside a `Survivor`: if one rank ends, the others end and name it."""

import contextlib
import os
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from gan.making import aside
from strategies.private import (
    FunctionLauncher,
    Launcher,
    ScriptLauncher,
    note_checkpoint,
    same_command,
    set_threads,
)
from strategies.processes.launched import number, place_of
from strategies.processes.lost_ranks import Survivor
from strategies.sharding.resharded_parameter import resharded

PARENT = "GAN_FIRST_PROCESS"  # an environment variable: the id of the process that started this rank
_parent = os.environ.pop(PARENT, None)
_folder = os.getcwd()  # where the program was started, wherever it goes later


def launcher(strategy: DDPStrategy, start_method: str) -> Launcher:
    """The launcher for Lightning's `start_method`. Where somebody else has started the ranks, it starts none."""
    if start_method == "popen" or place_of(strategy.cluster_environment) is not None:
        return Scripts(strategy)
    return Functions(strategy, start_method=start_method)


class Scripts(ScriptLauncher):
    """Starts the command again for every other device, where nobody else does."""

    def __init__(self, strategy: DDPStrategy) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self.strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """As Lightning does, but without Lightning's thread that watches the children. `Survivor` watches them."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[PARENT]
        first, local = environment.node_rank() * self.num_processes, environment.local_rank()
        parent = number({PARENT: _parent}, PARENT) if _parent and local else None
        self.strategy.lockstep.survivor = Survivor(first + local, first, dict(enumerate(self.procs, first + 1)), parent)
        set_threads(num_processes=self.num_processes)
        note_checkpoint(function, partial(setattr, self.strategy, "resumes_from"))
        result = self.strategy.lockstep.survivor.run(self.strategy.take_part(first + local, function), *args, **kwargs)
        self.strategy.division.end()
        return result

    def _call_children_scripts(self) -> None:
        """Start the same command for each other device, as a person typed it and where it was typed.

        Lightning would add arguments under Hydra, by which all ranks write into the folder of the first one.
        """
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK=str(environment.node_rank()),
            LOCAL_RANK="0",
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
        )
        with contextlib.chdir(_folder):
            command = same_command()
        for local_rank in range(1, self.num_processes):
            variables = {**os.environ, "LOCAL_RANK": str(local_rank)}
            self.procs.append(subprocess.Popen(command, env=variables, cwd=_folder))


class Here(Launcher):
    """Starts nothing: the function is called in this process, the only one."""

    is_interactive_compatible = True

    def __init__(self, strategy: DDPStrategy) -> None:
        self.strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        note_checkpoint(function, partial(setattr, self.strategy, "resumes_from"))
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """There is no other process."""


class Functions(FunctionLauncher):
    """Starts processes that call the function, as notebooks need it. The starting process names one that failed.

    When they have ended, rank 0 hands its weights over to the starting process, in a file.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        strategy = self._strategy
        if trainer is not None:  # the weights must have their dtype here too, to be taken over as they are
            strategy.precision_plugin.convert_module(trainer.lightning_module)
        strategy.handing_over = True
        try:
            return super().launch(partial(_survive, strategy, function), *args, trainer=trainer, **kwargs)
        finally:
            strategy.handing_over = False

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        """Without the weights that are not on this rank: the starting process keeps its own."""
        with aside(trainer.lightning_module, resharded):
            return super()._collect_rank_zero_results(trainer, results)


def _survive(strategy: DDPStrategy, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    environment = strategy.cluster_environment
    first = environment.node_rank() * strategy.num_processes
    strategy.lockstep.survivor = Survivor(first + environment.local_rank(), first)
    strategy.handing_over = False
    note_checkpoint(function, partial(setattr, strategy, "resumes_from"))
    function = strategy.take_part(first + environment.local_rank(), function)
    result = strategy.lockstep.survivor.run(function, *args, **kwargs)
    strategy.division.end()
    strategy.handing_over = True
    return result
