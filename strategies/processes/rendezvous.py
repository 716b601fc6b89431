"""Where the hosts of a run find each other: an address, a file that they share, or torch's environment variables.

[Note: by which network]
gloo takes the address that this host's own name has. That is often one that other hosts cannot reach, such as 127.0.0.1
or a second network card's, or the name has no address. So on several hosts we choose the interface towards the main
address, on which the ranks have found each other. On one host we choose loopback, which no other host reaches. NCCL
chooses well by itself.
"""

import contextlib
import os
import shlex
import socket
import struct
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from gan.files.errors import UserError, explained
from gan.files.system import fcntl
from strategies.processes.launchers import PORTS, number

PORT = 29400  # torchrun's port, if the address has none
FILE = "file:"
GLOO = "GLOO_SOCKET_IFNAME"
THIS_HOST = "127.0.0.1"
SIOCGIFADDR = 0x8915  # asks for an interface's IPv4 address, see netdevice(7)


@dataclass(frozen=True)
class Rendezvous:
    """Where hosts meet. If the environment has NODE_RANK beside MASTER_ADDR, it numbers the hosts."""

    where: str = ""  # HOST:PORT or file:PATH, the same on all hosts; empty: what MASTER_ADDR and MASTER_PORT say
    nodes: tuple[int, int] = (1, 1)  # the least and the most number of hosts

    def __str__(self) -> str:
        return f"the rendezvous {self.where or ':'.join(map(str, self._address()))}"

    @property
    def several(self) -> bool:
        return self.nodes[1] > 1

    @property
    def hosts(self) -> str:
        least, most = self.nodes
        return f"{least} hosts" if least == most else f"{least} to {most} hosts"

    def to_type(self, command: Sequence[str]) -> str:
        """What to type on each of the other hosts, where this one runs this command."""
        words = shlex.join(["python", *command[1:]])
        if self.where:
            return words
        host, port = self._address()
        number = " NODE_RANK=N" if self.fixed() else ""
        return f"MASTER_ADDR={host} MASTER_PORT={port}{number} {words}"

    def check(self) -> None:
        if not self.several:
            return
        if self.where.startswith(FILE):
            folder = self._file().parent
            if not folder.is_dir():
                raise UserError(f"--rendezvous {self.where}: there is no folder {folder}")
        else:
            host, port = self._address()
            with explained(f"{self}: this host knows no host '{host}' ({{why}})", OSError):
                socket.getaddrinfo(host, port)
        if self.fixed() and number(os.environ, "NODE_RANK") >= self.nodes[1]:
            raise UserError(
                f"the environment variable NODE_RANK is '{os.environ['NODE_RANK']}', and there are {self.nodes[1]} "
                f"hosts (--nodes): the last one has number {self.nodes[1] - 1}"
            )

    def fixed(self) -> tuple[str, int] | None:
        """The address of rank 0, if the environment names it and numbers the hosts."""
        return self._address() if self.several and not self.where and "NODE_RANK" in os.environ else None

    def parameters(self, join: int) -> RendezvousParameters:
        """For torch. `join` is the seconds in which all hosts must have come."""
        how: dict[str, Any] = dict(min_nodes=self.nodes[0], max_nodes=self.nodes[1], local_addr=self.own_address())
        if not self.several:
            return RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, **how, is_host=True)
        how |= {"run_id": "gan", "timeout": join, "join_timeout": join}
        if self.where.startswith(FILE):
            return RendezvousParameters("c10d", str(self._file()), **how, store_type="file")
        host, port = self._address()
        if self.fixed():
            how |= {"timeout": 2 * join}  # torch would print stacks of C++: the agent ends it before
            return RendezvousParameters("static", f"{host}:{port}", **how, rank=number(os.environ, "NODE_RANK"))
        return RendezvousParameters("c10d", f"{host}:{port}", **how, is_host=_serves(host, port))

    def own_address(self) -> str | None:
        """This host's address on the network that leads to the rendezvous. Its own name may lead elsewhere."""
        if not self.several:
            return THIS_HOST
        if self.where.startswith(FILE):
            return None
        with contextlib.suppress(OSError):  # torch says what is wrong with the address
            return own_address(self._address()[0])
        return None

    def _file(self) -> Path:
        return Path(self.where.removeprefix(FILE)).absolute()

    def _address(self) -> tuple[str, int]:
        where = self.where
        if not where and (host := os.environ.get("MASTER_ADDR")):
            return host, number(os.environ, "MASTER_PORT") if "MASTER_PORT" in os.environ else PORT
        host, _, port = where.rpartition(":") if ":" in where else (where, "", str(PORT))
        host = host.removeprefix("[").removesuffix("]")  # IPv6
        if not host or not port.isdecimal() or not 0 < int(port) <= PORTS:
            wrong = f"--rendezvous {where} is no address" if where else "several hosts need a place to find each other"
            raise UserError(
                f"{wrong}; type the same on all hosts: --rendezvous HOST:{PORT}, where HOST is one of them (this one "
                f"is {socket.gethostname()}), or --rendezvous file:PATH, a new file on a disk that they share"
            )
        return host, int(port)


def _serves(host: str, port: int) -> bool:
    """Whether this process is to serve the rendezvous: the address is this host's own, and nobody serves it yet.

    torch would ask what this host's own name means, and fail if it means nothing.
    """
    with contextlib.suppress(OSError):
        if own_address(host) in {address[0] for *_, address in socket.getaddrinfo(host, None)}:
            socket.create_server(("", port)).close()
            return True
    return False


# ---- the network to the other hosts: see [Note: by which network] ----


def choose_interface(main_address: str) -> None:
    """Tell gloo which interface to use, if the user has not."""
    with contextlib.suppress(OSError):  # an address that does not exist: torch says so
        if GLOO not in os.environ and (name := _interface(own_address(main_address))):
            os.environ[GLOO] = name


def clear_errors(main_address: str) -> contextlib.AbstractContextManager[None]:
    """Say what to type where gloo has taken an interface that leads to no other host."""
    taken = f"interface {os.environ[GLOO]}" if GLOO in os.environ else "interface that this host's name leads to"
    return explained(
        f"the ranks have met at {main_address}, but gloo cannot connect them over the {taken}; type "
        f"export {GLOO}=NAME on each host, with the interface that leads to the others (ip addr shows them)",
        RuntimeError,
        saying="connectFullMesh",
    )


@contextlib.contextmanager
def clear_meeting(address: str, port: int) -> Iterator[None]:
    """Say which variable is wrong where ranks meet at MASTER_ADDR and MASTER_PORT, and cannot."""
    taken = (
        f"the environment variable MASTER_PORT is '{port}', and another program listens there already; set it to a "
        f"free port of {address}, the same on all ranks"
    )
    unknown = (
        f"the environment variable MASTER_ADDR is '{address}', and this host knows no such host ({{why}}); set it to "
        f"the host of rank 0"
    )
    with explained(unknown, socket.gaierror), explained(taken, RuntimeError, saying="EADDRINUSE"):
        socket.getaddrinfo(address, port)
        yield


def own_name(main_address: str) -> str:
    """What other ranks may call this host: its address towards the main one, which is often the same."""
    with contextlib.suppress(OSError):
        if not ip_address(address := own_address(main_address)).is_loopback:
            return address
    return main_address  # on other hosts this name may lead here


def own_address(towards: str) -> str:
    """The address that this host has for the host `towards`. Nothing is sent."""
    family, kind, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def _interface(address: str) -> str | None:
    if address == THIS_HOST:
        return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)  # macOS has lo0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this one has no address
                answer = fcntl.ioctl(asks, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
