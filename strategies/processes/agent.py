"""Starts the ranks of a command through torch's elastic agent (the engine of torchrun), and starts them again.

The agent is a process that only waits: it starts one process a device, notices at once when one ends, ends the others,
and finds the agents of the other hosts at a rendezvous. What torch's agent does not do is done here:

- It names the rank that failed first, with its process and how it ended, and counts the restarts.
- A mistake that a restart cannot cure is not tried again. Nor is an error that comes back at the same step.
- A signal to end is handed on, and the ranks have all the time that they need to save. torch's agent would kill them
  after 30 seconds.
- A host that the network has cut off asks again and again until it is back at the rendezvous.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed.elastic.rendezvous.registry as handlers
from torch.distributed import DistError
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from gan.files.errors import UserError, printable, refuse
from gan.files.system import unless_within
from strategies.processes.board import NEVER, VARIABLE, Board
from strategies.processes.failure import ERROR, FILE, FOLLOWS, REFUSED, Failure, cause, read
from strategies.processes.rendezvous import Rendezvous

NAME = "GAN_AGENT"  # an environment variable: who has started this rank
JOIN = 900  # seconds in which the hosts must find each other, at the start and after a restart
LATE = 30  # seconds more that torch has to say so: it may wait without end, as for the answer of another program
ORPHANED = 300  # seconds that a rank has to save after its agent was killed
SAME_STEP = 3  # so often a failure may come at one step
AGAIN = 1.0  # seconds after which a signal is a second wish to end; before, it is the first one, which came twice
# Seconds that ranks have to end after a second signal.
GRACE: dict[int, float] = {signal.SIGINT: 5.0, signal.SIGTERM: 60.0}


@dataclass(frozen=True)
class Launch:
    """What to start: `command` in `ranks` processes on each host of the rendezvous."""

    command: Sequence[str]
    ranks: int
    rendezvous: Rendezvous
    restarts: int
    advice: Callable[[str], str]  # for the last error: how the run of the agent of this name goes on by hand


def speaks() -> bool:
    """Whether this process is a rank whose agent prints its errors."""
    return NAME in os.environ and FILE in os.environ


def name() -> str:
    """The name of this rank's agent. No other agent has it."""
    return os.environ[NAME]


def end_with_launcher(hosts: int) -> None:
    """End this rank if the process that has started it is killed. Else it would train on, unseen.

    On one host all ranks save first. Of several hosts, only this one is lost. The others name it, and go on without it
    if they may.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        with contextlib.suppress(OSError, ValueError):  # who has read what it says may be gone too
            ends = "this rank is gone, so it ends" if hosts > 1 else "the ranks is gone, so they save and end"
            say(f"the process that started {ends}")
        if hosts > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHANED)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def run(launch: Launch) -> None:
    """Start the ranks, and return when all have ended well. Raise the first cause of what failed."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what they say is said here
    with tempfile.TemporaryDirectory(prefix="gan-agent-", ignore_cleanup_errors=True) as folder:
        variables = {
            NAME: f"agent {socket.gethostname()} {folder}",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are handed on, see `hand_on`
            # A store for each attempt. That of all agents is not found again when rank 0 has moved to another host.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            VARIABLE: str(Path(folder, "board")),
            # Where a host is lost, torch's store prints stacks of C++ on all others, in which our one line is not seen.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }
        history = History(launch.restarts)
        late = unless_within(JOIN + LATE, _give_up, launch.rendezvous, history, folder)
        with mock.patch.dict(os.environ, variables), late:
            _run(launch, DefaultLogsSpecs(log_dir=folder), history)


def _run(launch: Launch, files: DefaultLogsSpecs, history: "History") -> None:
    from strategies.processes.stopping import SIGNALS, handle

    since, told = time.monotonic(), False
    meeting = launch.rendezvous
    if meeting.several:
        until = time.strftime("%H:%M", time.localtime(time.time() + JOIN))
        where = filter(None, (socket.gethostname(), meeting.own_address()))
        say(
            f"this host ({', '.join(where)}) waits at {meeting} for {meeting.hosts}, until {until} at most; on each of "
            f"the others type\n  {meeting.to_type(launch.command)}"
        )
    while True:
        agent, signals = None, contextlib.ExitStack()
        try:
            agent = Agent(launch, files, handlers.get_rendezvous_handler(meeting.parameters(JOIN)), history)
            signals = handle((signal.SIGINT, *SIGNALS), agent.hand_on)
            result = agent.run()
            if result is None or not result.is_failed():  # None: RendezvousGracefulExitError
                return
            if history.ended:
                if not history.killed:
                    say(history.last)
                raise KeyboardInterrupt
            advice = "" if history.untrue else launch.advice(name())
            raise UserError("\n".join(filter(None, (history.last, advice))))
        except (elastic.RendezvousConnectionError, elastic.RendezvousTimeoutError, DistError) as error:
            if "EADDRINUSE" in str(error):
                raise UserError(f"{meeting}: another program listens there already; take another port") from error
            if agent is not None and agent.trained:
                since, agent.trained = time.monotonic(), False
            if history.ended:
                return
            if agent is not None and agent.get_worker_group().state is WorkerState.HEALTHY and not history.left:
                # NCCL keeps a rank for seconds after another is lost. By then that one's host may have ended.
                gone = f"{meeting}: the host that keeps it has ended, or is not reached, and no restart is left"
                raise UserError("\n".join(filter(None, (gone, launch.advice(name()))))) from error
            if time.monotonic() - since > JOIN:
                raise _have_not_met(meeting) from error
            if not told:
                told = True
                say(f"{meeting} is not reached; trying for {JOIN // 60} minutes")
            time.sleep(2)
        except elastic.RendezvousClosedError:
            if history.ended:
                return
            raise UserError(
                f"the run at {meeting} has ended, on another host or before; see what the others said"
            ) from None
        finally:
            signals.close()
            if agent is not None:
                agent.handler.shutdown()


def _have_not_met(meeting: Rendezvous) -> UserError:
    return UserError(
        f"{meeting}: {meeting.hosts} have not met there within {JOIN // 60} minutes; start the same command on each, "
        f"see whether all reach it, and whether another program listens there"
    )


def _give_up(meeting: Rendezvous, history: "History", folder: str) -> None:
    if not history.met:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(refuse(_have_not_met(meeting)))


class History:
    """What has failed so far: how often it may still be tried, and the last cause."""

    def __init__(self, restarts: int) -> None:
        self.left = self.allowed = restarts
        self.last = ""
        self.met = False  # the hosts have found each other
        self.ended = False  # somebody has asked the run to end
        self.killed = False  # and the ranks did not, so that the agent has killed them
        self.untrue = False  # a trial has shown that the weights are not those of one device
        self._step, self._times, self._why = NEVER, 0, ""

    def again(self, failure: Failure, step: int) -> bool:
        """Whether to start the ranks again after a failure at this step (NEVER: before their first step)."""
        self.untrue = failure.error == "RanksDiffer"
        alike = failure.kind == ERROR and (step, failure.why) == (self._step, self._why)
        self._times = self._times + 1 if step == self._step else 1
        self._step, self._why = step, failure.why
        where = f"step {step}" if step != NEVER else "before the first step"
        self.last = str(failure) if failure.kind == REFUSED else f"{failure} ({where})"
        mistake = step <= 0 and failure.kind == ERROR  # in the program, and nothing is lost
        if self.ended or failure.kind == REFUSED or mistake:
            return False
        if alike or self._times == SAME_STEP:
            what = "the second time that this error came" if alike else "the third failure"
            self.last += f"\nThis was {what} there, so the ranks are not started again."
            return False
        if self.left == 0:
            if self.allowed:
                self.last += f"\nThe ranks were started again {self.allowed} times, and are not any more."
            return False
        self.left -= 1
        told = "" if failure.kind == FOLLOWS else f"{self.last}\n"  # the rank that noticed it has said it
        say(f"{told}restart {self.allowed - self.left} of {self.allowed}: all ranks start again")
        return True


class Agent(LocalElasticAgent):
    """torch's agent for one host."""

    def __init__(self, launch: Launch, files: DefaultLogsSpecs, handler: Any, history: History) -> None:
        host, port = launch.rendezvous.fixed() or (None, None)
        spec = WorkerSpec(
            role="rank",
            local_world_size=launch.ranks,
            rdzv_handler=handler,
            entrypoint=launch.command[0],
            args=tuple(launch.command[1:]),
            max_restarts=history.allowed,
            monitor_interval=0.1,
            master_addr=host,
            master_port=port,
            local_addr=launch.rendezvous.own_address(),
        )
        super().__init__(spec, files)
        self.handler, self.history, self.ranks = handler, history, launch.ranks
        self.trained = False  # its ranks have been started
        self._failed = False
        self._wished = 0.0  # when somebody asked first that the run ends
        self._remaining_restarts = history.left

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.trained = self.history.met = True
        self.board = Board.new(Path(os.environ[VARIABLE]), self.ranks)
        started = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close

        def note_and_close(*args: Any, **kwargs: Any) -> None:
            handlers = context.subprocess_handlers.items()
            self.ended_here |= {rank for rank, handler in handlers if handler.proc.poll() is None}
            close(*args, **kwargs)

        self.ended_here: set[int] = set()  # the ranks of this host that ran yet when torch's agent ended all
        context.close = note_and_close
        return started

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self._failed:
            say("a host has come, or starts again: all ranks start again with it")
        self._failed = False
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            failures = [self._read(rank, failure) for rank, failure in result.failures.items()]
            again = self.history.again(cause(failures), self.board.furthest())
            self._failed = again
            # torch's loop takes one off before it starts the ranks again.
            self._remaining_restarts = self.history.left + 1 if again else 0
        return result

    def _read(self, rank: int, torchs: Any) -> Failure:
        """One that the agent itself has ended, before that rank said anything, follows the failure of another."""
        found = read(rank, socket.gethostname(), torchs)
        return replace(found, kind=FOLLOWS) if torchs.local_rank in self.ended_here and not found.at else found

    def hand_on(self, number: int, *_: Any) -> None:
        """Tell the ranks of this host to end. They save and end by themselves; then the agent ends."""
        self.history.ended = True
        self._remaining_restarts = 0
        handed, processes = 0, [] if self._pcontext is None else list(self._pcontext.pids().values())
        nothing = number == signal.SIGINT and processes and self.board.furthest() == NEVER
        handed_on = signal.SIGTERM if nothing else number  # Python would print a stack of each rank
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, handed_on)
                handed += 1
        if not handed:
            raise KeyboardInterrupt  # nobody is there to save anything
        now = time.monotonic()
        if self._wished and now - self._wished > AGAIN and number in GRACE:
            threading.Thread(target=self._kill, args=(GRACE[number],), daemon=True).start()
        self._wished = self._wished or now

    def _kill(self, seconds: float) -> None:
        """End the ranks that still run then. In a collective, Python does not hear a signal."""
        time.sleep(seconds)
        context: Any = self._pcontext
        running = [each.proc for each in context.subprocess_handlers.values() if each.proc.poll() is None]
        if running:
            places = zip(self.get_worker_group().workers, self.board.read().values(), strict=True)
            where = ", ".join(f"rank {worker.global_rank} {place}" for worker, place in places)
            self.history.killed = True
            say(f"the ranks do not end by themselves, so they are killed: {where}")
        for process in running:
            process.kill()


def say(text: str) -> None:
    print(printable(f"\n{text}"), file=sys.stderr, flush=True)  # below the progress bar
