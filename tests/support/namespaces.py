"""Two hosts on this machine, joined by a cable that can be cut.

A host is a network namespace of Linux. Its processes see no other network than the cable, and a host name of their own;
they share the disk. It needs root and iproute2.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

VARIABLE = "TESTS_HOST"  # of the environment: on which host a forked process is to be
NETWORK, NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET and CLONE_NEWUTS
ADDRESSES = "10.0.0.1", "10.0.0.2"
CABLE = "cable"  # the name of each end in its namespace


class Hosts:
    """Host 0 and host 1."""

    def __init__(self) -> None:
        self.names = [f"gan-{os.getpid()}-{number}" for number in range(2)]

    def start(self, host: int, command: Sequence[str], **settings: Any) -> subprocess.Popen:
        """Start a command on a host. `settings` are those of Popen. What is left of it ends with the host."""
        name = self.names[host]
        named = "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name
        return subprocess.Popen(["ip", "netns", "exec", name, *named, *command], **settings)

    def cut(self) -> None:
        """Cut the cable. Host 0 sees that its end has no link; host 1 hears nothing more."""
        _ip("-n", self.names[0], "link", "set", CABLE, "down")

    def restore(self) -> None:
        """Join the hosts again."""
        _ip("-n", self.names[0], "link", "set", CABLE, "up")

    def create(self) -> None:
        one, other = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("-n", one, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", other)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            for link in (CABLE, "lo"):
                _ip("-n", name, "link", "set", link, "up")

    def remove(self) -> None:
        """Remove the hosts, with all that still runs there."""
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                for process in map(int, _ip("netns", "pids", name).split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                _ip("netns", "delete", name)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """The hosts; where they cannot be made, the test is skipped."""
    hosts = Hosts()
    try:
        hosts.create()
    except (OSError, subprocess.CalledProcessError) as error:
        with contextlib.suppress(OSError):
            hosts.remove()
        said = getattr(error, "stderr", None) or error
        pytest.skip(f"two hosts need root and iproute2 (apt-get install iproute2): {said}")
    try:
        yield hosts
    finally:
        hosts.remove()


def enter() -> None:
    """Be on the host that the environment names, as `Hosts.start` does it for a new program; without one stay here."""
    if name := os.environ.get(VARIABLE):
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{name}") as network:
            if libc.setns(network.fileno(), NETWORK) or libc.unshare(NAMES):
                raise OSError(ctypes.get_errno(), f"host {name} cannot be entered")
        socket.sethostname(name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
