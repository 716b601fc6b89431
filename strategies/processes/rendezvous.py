"""Where the hosts of a run find each other: an address, a file that they share, or torch's environment variables."""

import contextlib
import os
import shlex
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from gan.files.errors import UserError
from strategies.processes.interface import THIS_HOST, own_address
from strategies.processes.launchers import PORTS, number

PORT = 29400  # torchrun's port, if the address has none
FILE = "file:"


@dataclass(frozen=True)
class Rendezvous:
    """`where` is HOST:PORT or file:PATH, the same on all hosts. Empty: what MASTER_ADDR and MASTER_PORT say.

    `nodes` is the least and the most number of hosts. If the environment also has NODE_RANK, it numbers the hosts.
    """

    where: str = ""
    nodes: tuple[int, int] = (1, 1)

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
        """Raise if the hosts could not find each other."""
        if not self.several:
            return
        if self.where.startswith(FILE):
            folder = self._file().parent
            if not folder.is_dir():
                raise UserError(f"--rendezvous {self.where}: there is no folder {folder}")
        else:
            host, port = self._address()
            try:
                socket.getaddrinfo(host, port)
            except OSError as error:
                raise UserError(f"{self}: this host knows no host '{host}' ({error.strerror})") from error
        if self.fixed() and number(os.environ, "NODE_RANK") >= self.nodes[1]:
            raise UserError(
                f"the environment variable NODE_RANK is '{os.environ['NODE_RANK']}', and there are {self.nodes[1]} "
                f"hosts (--nodes): the last one has number {self.nodes[1] - 1}"
            )

    def fixed(self) -> tuple[str, int] | None:
        """The address of rank 0, if the environment names it and numbers the hosts."""
        numbered = not self.where and "NODE_RANK" in os.environ
        return self._address() if self.several and numbered else None

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
