"""A real Slurm on this machine: munge, a controller, and two nodes, each a slurmd of its own."""

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from tests.support import commands

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
SOON = 30  # seconds
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

# cred_expire is also how many seconds a job waits in the queue after it went back into it.
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=FORCE:8 State=UP GraceTime=60 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


class Cluster:
    """Node1 and node2, with 16 CPUs each, and their queue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: list[subprocess.Popen] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": PATH,
        }

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are there."""
        for name in ("state", "log"):
            (self.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        text = CONFIG.format(folder=self.folder, host=host, user="root", ports=_free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", *munge)  # force: others need not reach its socket
        self.until("munge does not answer", lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-c")
        for node in ("node1", "node2"):
            self._daemon("slurmd", "-D", "-N", node)
        self.until("the nodes do not come up", lambda: self.call("sinfo", "-h", "-o", "%D %T", check=False) == "2 idle")

    def stop(self) -> None:
        """End all daemons and all that they have started, which does not end with them."""
        while left := self._processes():
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for daemon in self.daemons:
                daemon.wait()

    def _processes(self) -> list[int]:
        """All that know this cluster, by their environment."""
        mark, found = f"SLURM_CONF={self.environment['SLURM_CONF']}\0".encode(), []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has just ended
                if mark in environ.read_bytes():
                    found.append(int(environ.parent.name))
        return found

    def call(self, *command: str, check: bool = True, **environment: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(command, capture_output=True, text=True, env={**self.environment, **environment})
        if check and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", number)))

    def wait(self, number: str, seconds: float, states: set[str] = ENDED) -> dict[str, str]:
        """Wait until a job has one of the states."""
        self.until(f"job {number} does not come so far", lambda: self.job(number)["JobState"] in states, seconds)
        return self.job(number)

    def _daemon(self, *command: str) -> None:
        said: IO[str] = open(self.folder / "log" / f"said-{len(self.daemons)}", "w")  # noqa: SIM115
        with said:
            self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=said, stderr=said))

    def until(self, words: str, there: Callable[[], object], seconds: float = SOON) -> None:
        assert commands.until(there, seconds), words


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster for tests; skips them where there cannot be one."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("Slurm's daemons need root")
    one = Cluster(folder)
    try:
        one.start()
        yield one
    finally:
        one.stop()


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
