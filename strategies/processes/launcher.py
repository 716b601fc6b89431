"""Lightning's launchers, but every rank trains inside a `Survivor`: if one rank ends, the others end and name it."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from strategies.private import FunctionLauncher, Launcher, ScriptLauncher, set_threads
from strategies.processes.lost_ranks import Survivor

PARENT = "GAN_FIRST_PROCESS"  # an environment variable: the id of the process that started this rank
_parent = os.environ.pop(PARENT, None)


def launcher(strategy: DDPStrategy, start_method: str) -> Launcher:
    """The launcher for Lightning's `start_method`."""
    if start_method == "popen":
        return Scripts(strategy)
    return Functions(strategy, start_method=start_method)


class Scripts(ScriptLauncher):
    """Starts the command again for every other device. Under torchrun or srun it starts nothing."""

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
        parent = int(_parent) if _parent and local else None
        self.strategy.survivor = Survivor(first + local, first, dict(enumerate(self.procs, first + 1)), parent)
        set_threads(num_processes=self.num_processes)
        return self.strategy.survivor.run(function, *args, **kwargs)


class Functions(FunctionLauncher):
    """Starts processes that call the function, as notebooks need it. The starting process names one that failed."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return super().launch(partial(_survive, self._strategy, function), *args, trainer=trainer, **kwargs)


def _survive(strategy: DDPStrategy, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    environment = strategy.cluster_environment
    first = environment.node_rank() * strategy.num_processes
    strategy.survivor = Survivor(first + environment.local_rank(), first)
    return strategy.survivor.run(function, *args, **kwargs)
