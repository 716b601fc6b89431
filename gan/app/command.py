"""What all commands have in common: how they end, and how they start ranks."""

import errno
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import Namespace
from lightning_utilities.core.rank_zero import rank_zero_only

from datasets.workers import workers_explained
from gan.app import outputs
from gan.files.errors import UserError, escape_warnings, refuse
from gan.files.loading import loading
from gan.files.system import resource
from strategies.processes import agent
from strategies.processes.agent import Launch
from strategies.processes.failure import report
from strategies.processes.launchers import Launched, launched
from strategies.processes.rendezvous import Rendezvous

if TYPE_CHECKING:
    from gan.app.run.computer import Computer


NO_MORE = ("can't start new thread", "Resource temporarily unavailable")  # Python's words, and those of C


def command(work: Callable[[list[str]], int | None]) -> Callable[..., int]:
    """The `main` of a command, from what it does with the words that were typed.

    It returns the exit status: that of `work`, or 0; 2 after a message about what was wrong; 130 after Ctrl-C.
    """

    @wraps(work)
    def main(argv: list[str] | None = None) -> int:
        escape_warnings()
        try:
            with workers_explained():
                return work(sys.argv[1:] if argv is None else argv) or 0
        except BaseException as raised:
            if isinstance(raised, SystemExit) and isinstance(raised.__context__, KeyboardInterrupt):
                raised = raised.__context__  # Lightning has left with a status of its own
            error = _named(raised) or raised
            report(error)
            if isinstance(error, UserError):
                return 2 if agent.speaks() else refuse(error)
            if isinstance(error, KeyboardInterrupt):
                return 128 + signal.SIGINT
            raise

    return main


def _named(error: BaseException | None) -> UserError | None:
    """The error of a user whose shell allows too little, if that is what this error, or its cause, says."""
    if error is None or isinstance(error, UserError):
        return None
    number, text = getattr(error, "errno", None), str(error)
    if resource and (number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text):
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        more = max(4096, 4 * allowed)
        return UserError(f"too many open files: this shell allows a process {allowed}; type ulimit -n {more}")
    if any(words in text for words in NO_MORE):
        return UserError(
            f"no more processes or threads can be started ({text}); type ulimit -u unlimited, or fewer --devices or "
            f"--workers"
        )
    return _named(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


@contextmanager
def working() -> Iterator[None]:
    """Inside the `with`, a command that has read what was typed imports what it works with, Lightning among it."""
    with loading():
        yield
    outputs.quiet()


def take_place(place: Launched | None) -> None:
    """Be the rank that somebody else has started: only the first one prints, and each ends with torchrun."""
    rank_zero_only.rank = place.rank if place is not None else 0  # pyrefly: ignore[missing-attribute] - Lightning's own
    if place is not None and place.launcher.elastic:
        agent.end_with_launcher(place.nodes)


def on_ranks(module: str, argv: Sequence[str], accelerator: str, devices: Any, work: Callable[[str], object]) -> None:
    """Do a work that ranks share, as one of them, by starting them, or alone. `work` gets the device of its process."""
    with working():
        import torch.distributed as dist

        from gan.app.run.computer import machine
        from strategies.processes.cluster import connect

    asked = {"accelerator": accelerator, "devices": devices}
    computer = machine(Namespace(**asked, nodes=1, strategy="ddp", precision="32-true"))
    place = launched()
    take_place(place)
    if place is None and computer.processes > 1:
        run_ranks(module, argv, computer)
        return
    if place is not None:
        connect(place, "gloo")  # so on GPUs too they exchange what is in main memory
    work(computer.device(place.local_rank if place is not None else 0))
    if place is not None:
        dist.destroy_process_group()


def run_ranks(
    module: str,
    argv: Sequence[str],
    computer: "Computer",
    rendezvous: Rendezvous = Rendezvous(),  # noqa: B008 - it cannot be changed
    restarts: int = 0,
    advice: Callable[[str], str] = lambda agent: "",
) -> None:
    """Run a command again as each of the ranks on this host, and wait for them. See `Launch`."""
    if computer.kind == "tpu":
        # pyrefly: ignore[missing-attribute] - torch-tpu adds itself to torch, and wants this from the parent
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=computer.devices)
    rendezvous.check()
    agent.run(Launch([sys.executable, "-m", module, *argv], computer.devices, rendezvous, restarts, advice))
