"""How hosts find each other: the network, the port, the backend."""

import os
import socket

import pytest
import torch.distributed as dist

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.processes import rendezvous
from strategies.processes.rendezvous import GLOO, Rendezvous, choose_interface, clear_errors
from tests.support.parity import trainer

NAMES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(GLOO, "")  # so that it is put back
    monkeypatch.delenv(GLOO)


@pytest.mark.parametrize(
    ("where", "endpoint", "store"),
    [
        ("127.0.0.1:1234", "127.0.0.1:1234", None),
        ("127.0.0.1", "127.0.0.1:29400", None),
        ("file:/meet", "/meet", "file"),
    ],
)
def test_hosts_meet_at_an_address_or_in_a_file(where, endpoint, store):
    found = Rendezvous(where, (2, 4)).parameters(60)
    assert (found.backend, found.endpoint, found.min_nodes, found.max_nodes) == ("c10d", endpoint, 2, 4)
    assert found.get("store_type") == store and found.get_as_int("join_timeout") == 60
    if store is None:
        assert found.local_addr == "127.0.0.1"  # the address on the way there, not what this host's name means


def test_the_environment_numbers_the_hosts(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    meeting = Rendezvous("", (2, 2))
    assert meeting.fixed() is None
    assert meeting.parameters(60).backend == "c10d"
    monkeypatch.setenv("NODE_RANK", "1")
    assert meeting.fixed() == ("127.0.0.1", 1234)
    found = meeting.parameters(60)
    assert (found.backend, found.endpoint, found.get("rank")) == ("static", "127.0.0.1:1234", 1)
    assert Rendezvous("127.0.0.1:99", (2, 2)).parameters(60).backend == "c10d"  # what is typed goes first


NAMED = "the environment variable "
REFUSED = [
    ("", dict(MASTER_PORT="0"), f"{NAMED}MASTER_PORT is '0', and ports have numbers from 1"),
    ("", dict(NODE_RANK="two"), f"{NAMED}NODE_RANK is 'two', which is no number"),
    ("", dict(NODE_RANK="2"), rf"{NAMED}NODE_RANK is '2', and there are 2 hosts .*: the last one has number 1"),
    ("", dict(MASTER_ADDR=None), "several hosts need a place to find each other; type the same on all hosts: --rendez"),
    ("host:port", {}, "--rendezvous host:port is no address; type"),
    (":1234", {}, "--rendezvous :1234 is no address; type"),
    ("host:70000", {}, "--rendezvous host:70000 is no address; type"),
    ("nosuch.invalid:29400", {}, "the rendezvous nosuch.invalid:29400: this host knows no host 'nosuch.invalid'"),
    ("file:/no/such/folder/meet", {}, "--rendezvous file:/no/such/folder/meet: there is no folder /no/such/folder"),
]


@pytest.mark.parametrize(("where", "variables", "words"), REFUSED)
def test_no_place_to_meet_is_refused(where, variables, words, monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", **variables}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=f"^{words}"):
        Rendezvous(where, (2, 2)).check()
    Rendezvous(where, (1, 1)).check()


# ---- interface ----


MESH = "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:152] timed out connecting: Connection refused"


@pytest.mark.parametrize(
    ("address", "before", "told"),
    [
        ("127.0.0.1", None, "lo"),
        ("127.0.0.1", "eth7", "eth7"),  # what the user has chosen stays
        ("no-such-host.invalid", None, None),
        ("127.0.0.77", None, None),  # no interface has it: it is left to torch
    ],
)
def test_gloo_is_told_the_interface_towards_the_main_address(address, before, told, monkeypatch):
    if before is not None:
        monkeypatch.setenv(GLOO, before)
    monkeypatch.setattr(rendezvous, "own_address", lambda towards: socket.gethostbyname(towards))
    choose_interface(address)
    assert os.environ.get(GLOO) == told


@pytest.mark.parametrize(("chosen", "words"), [("eth7", "interface eth7"), (None, "that this host's name leads to")])
def test_ranks_that_gloo_cannot_connect_say_what_to_type(chosen, words, monkeypatch):
    if chosen is not None:
        monkeypatch.setenv(GLOO, chosen)
    said = rf"met at 10.0.0.1, but .*{words}; type export {GLOO}=NAME on each host"
    with pytest.raises(UserError, match=said), clear_errors("10.0.0.1"):
        raise RuntimeError(MESH)
    with pytest.raises(RuntimeError, match=r"^other$") as caught, clear_errors("10.0.0.1"):
        raise RuntimeError("other")
    assert not isinstance(caught.value, UserError)


@pytest.mark.promise("garbage in the variables of a launcher; a main port that is taken")
def test_a_main_port_that_is_taken_is_named_with_its_variable():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        words = f"^the environment variable MASTER_PORT is '{port}', and another program"
        with pytest.raises(UserError, match=words), rendezvous.clear_meeting("127.0.0.1", port):
            dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    words = "^the environment variable MASTER_ADDR is 'no host', and this host knows no"
    with pytest.raises(UserError, match=words), rendezvous.clear_meeting("no host", 29500):
        pass


# ---- backends ----


@pytest.mark.parametrize("name", ["mpi", "cpu:mpi", "smoke"])
def test_what_torch_lacks_is_refused(name):
    word = name.rpartition(":")[2]
    with pytest.raises(UserError, match=f"has no backend '{word}' here, but gloo.*; type gloo") as refusal:
        PhaseStrategy(process_group_backend=name)
    assert ("built on a machine with MPI" in str(refusal.value)) == (word == "mpi")


def test_nccl_is_refused_on_the_cpu(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    with pytest.raises(UserError, match="nccl communicates between GPUs only, and ranks compute on cpu; type gloo"):
        trainer(PhaseStrategy(process_group_backend="nccl"), 2, 1)
    trainer(PhaseStrategy(process_group_backend="nccl"), 1, 1)  # one rank communicates with nobody
