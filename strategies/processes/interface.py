"""By which network other hosts reach this one.

gloo takes the address that this host's own name has. That is often one that other hosts cannot reach, such as 127.0.0.1
or a second network card's, or the name has no address. So on several hosts we choose the interface towards the main
address, on which the ranks have found each other. On one host we choose loopback, which no other host reaches. NCCL
chooses well by itself.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address

import torch.distributed as dist

from gan.files.errors import UserError
from gan.files.system import fcntl

GLOO = "GLOO_SOCKET_IFNAME"
THIS_HOST = "127.0.0.1"
SIOCGIFADDR = 0x8915  # asks for an interface's IPv4 address, see netdevice(7)


def choose_interface(main_address: str) -> None:
    """Tell gloo which interface to use, if the user has not."""
    with contextlib.suppress(OSError):  # an address that does not exist: torch says so
        if GLOO not in os.environ and (name := _interface(own_address(main_address))):
            os.environ[GLOO] = name


@contextlib.contextmanager
def clear_errors(main_address: str) -> Iterator[None]:
    """Say what to type where gloo has taken an interface that leads to no other host."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        taken = f"interface {os.environ[GLOO]}" if GLOO in os.environ else "interface that this host's name leads to"
        raise UserError(
            f"the ranks have met at {main_address}, but gloo cannot connect them over the {taken}; type "
            f"export {GLOO}=NAME on each host, with the interface that leads to the others (ip addr shows them)"
        ) from error


@contextlib.contextmanager
def clear_meeting(address: str, port: int) -> Iterator[None]:
    """Say which variable is wrong where ranks meet at MASTER_ADDR and MASTER_PORT, and cannot."""
    try:
        socket.getaddrinfo(address, port)
        yield
    except socket.gaierror as error:
        raise UserError(
            f"the environment variable MASTER_ADDR is '{address}', and this host knows no such host "
            f"({error.strerror}); set it to the host of rank 0"
        ) from error
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"the environment variable MASTER_PORT is '{port}', and another program listens there already; set it to "
            f"a free port of {address}, the same on all ranks"
        ) from error


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
    """The name of the interface that has this IPv4 address."""
    if address == THIS_HOST:
        return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)  # macOS has lo0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this one has no address
                answer = fcntl.ioctl(asks, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
