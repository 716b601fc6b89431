"""Lightning's launchers, but every rank trains inside a `Survivor`: if one rank ends, the others end and name it."""

import contextlib
import os
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from gan.files.errors import UserError
from strategies.private import ScriptLauncher, note_checkpoint, same_command, set_threads
from strategies.processes.launchers import number
from strategies.processes.lost_ranks import Survivor

PARENT = "GAN_FIRST_PROCESS"  # an environment variable: the id of the process that started this rank
_parent = os.environ.pop(PARENT, None)
_imported_in = os.getcwd()


def _folder() -> str:
    """Where the program was started, wherever it went later. LightningCLI imports us while it is in a file's folder."""
    now = os.getcwd()
    return now if os.environ.get("PWD") == now or not Path(_imported_in, sys.argv[0]).exists() else _imported_in


StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class LaunchedStrategy(DDPStrategy):
    """What launchers know of the strategy whose ranks they start."""

    is_dp: bool
    is_starter = False  # it starts ranks of its own, and is a world of its own while they are not running
    resumes_from: Any = None  # the checkpoint from which the run resumes, which the launcher finds out
    cluster_environment: ClusterEnvironment  # both are known before anything is launched
    parallel_devices: list[torch.device]

    @abstractmethod
    def take_part(self, survivor: Survivor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a rank does, inside its survivor: call the function, or serve those ranks that do."""

    @abstractmethod
    def on_one_device(self) -> AbstractContextManager[Any]:
        """Inside the `with` a set-up takes no notice of the strategies that were typed for the ranks."""

    @abstractmethod
    def take_back(self, loops: dict[str, Any]) -> None:
        """Remember in this process, after set-up, what its ranks remember, and where their loops have ended."""


class Scripts(ScriptLauncher):
    """Starts the command again for every other device, where nobody else does. A single process trains by itself."""

    joined = False  # whether this process has been one of several ranks already

    def __init__(self, strategy: LaunchedStrategy) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self.strategy, self.alone = strategy, strategy.num_processes * strategy.num_nodes == 1

    @property
    def is_interactive_compatible(self) -> bool:
        return self.alone

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """As Lightning does, but without Lightning's thread that watches the children. `Survivor` watches them."""
        if self.alone:
            note_checkpoint(function, partial(setattr, self.strategy, "resumes_from"))
            return function(*args, **kwargs)
        if _parent and self.strategy.is_dp and not Scripts.joined:
            raise UserError(
                "this process is a rank of a later training of this script, for which the script has begun anew, and "
                "dp starts ranks of its own; train with dp in another script"
            )
        Scripts.joined = True
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[PARENT]
        parent = number({PARENT: _parent}, PARENT) if _parent and environment.local_rank() else None
        set_threads(num_processes=self.num_processes)
        return survive(self.strategy, function, *args, children=self.procs, parent=parent, **kwargs)

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
        with contextlib.chdir(_folder()):
            command = same_command()
        for local_rank in range(1, self.num_processes):
            variables = {**os.environ, "LOCAL_RANK": str(local_rank)}
            self.procs.append(subprocess.Popen(command, env=variables, cwd=_folder()))


def survive(
    strategy: LaunchedStrategy,
    function: Callable[..., Any],
    *args: Any,
    children: Sequence[subprocess.Popen] = (),
    parent: int | None = None,
    **kwargs: Any,
) -> Any:
    """What a rank does. `children` are the ranks that it has started, `parent` the process that has started it.

    [Note: the thread pool of a fork]
    In a forked process torch makes its pool of threads again when it is first asked for, and takes no lock there. If
    two threads asked at once, as those of autograd do, torch aborted the process: in 7 of 94 trainings on a busy
    machine. So the pool is asked for here, before there is another thread.
    """
    torch.set_num_threads(torch.get_num_threads())
    first = strategy.cluster_environment.node_rank() * strategy.num_processes
    rank = first + strategy.cluster_environment.local_rank()
    survivor = Survivor(rank, first, dict(enumerate(children, first + 1)), parent)
    note_checkpoint(function, partial(setattr, strategy, "resumes_from"))
    return strategy.take_part(survivor, function, *args, **kwargs)
